"""Train the demo's target: a deep, thin Llama on the source of Python's standard library.

    python examples/train_demo_target.py --output eagle31_hf/demo/target

About an hour on 2 CPU cores. Deep and thin (24 layers, 128 wide), so that a target step costs many draft steps,
as in a real LLM. Writes the model (bfloat16), the tokenizer and `training.json` with what the card reports.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle31_hf.demo.corpus import HELD_OUT, held_out_file, training_files

VOCAB_SIZE = 2048
LENGTH = 512
BATCH = 4


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|begin|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=specials, initial_alphabet=alphabet)
    )
    bpe.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )


def packed(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Returns all texts, each closed by the end token, cut into sequences (N, LENGTH)."""
    ids = [i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


def learning_rate(progress: float, peak: float = 3e-3, warmup: float = 0.03) -> float:
    if progress < warmup:
        return peak * progress / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))))


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    return sum(model(input_ids=batch, labels=batch).loss.item() * len(batch) for batch in ids.split(BATCH)) / len(ids)


def new_target() -> LlamaForCausalLM:
    """Makes the untrained target."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config)


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """Makes an optimizer that decays matrices, but not norms."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def train(model: LlamaForCausalLM, ids: torch.Tensor, args: argparse.Namespace) -> dict:
    """Trains on sequences (N, LENGTH), writing the model now and then; returns what is worth writing down."""
    optimizer = new_optimizer(model)
    order = torch.empty(0, dtype=torch.long)
    running, num_steps = float("nan"), 0
    start = time.time()
    for step in range(args.steps):
        progress = max(step / args.steps, (time.time() - start) / (60 * args.minutes))
        if progress >= 1:
            break
        if len(order) < BATCH:
            order = torch.cat([order, torch.randperm(len(ids))])
        batch, order = ids[order[:BATCH]], order[BATCH:]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        num_steps = step + 1
        if step % 50 == 0:
            print(f"step {step} loss {running:.3f} {(time.time() - start) / 60:.1f} min", flush=True)
        if step % 400 == 399:
            model.save_pretrained(args.output)
    return {
        "steps": num_steps,
        "tokens_trained": num_steps * BATCH * LENGTH,
        "minutes": round((time.time() - start) / 60, 1),
        "train_loss": round(running, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--minutes", type=float, default=60, help="ends the schedule early on a slow machine")
    args = parser.parse_args()
    torch.manual_seed(0)
    texts = list(training_files())
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(args.output)
    ids, held_out = packed(tokenizer, texts), packed(tokenizer, [held_out_file(name) for name in HELD_OUT])[:64]
    model = new_target()
    print(f"{len(texts)} files, {ids.numel():,} tokens, {model.num_parameters():,} parameters", flush=True)
    record = {"python": sys.version.split()[0], "files": len(texts), "tokens_in_corpus": ids.numel()}
    record |= train(model, ids, args) | {"held_out_loss": round(mean_loss(model, held_out), 4)}
    model.to(torch.bfloat16).save_pretrained(args.output)
    (args.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
