"""Trains small targets from nothing, resumably: what `train_demo_target.py` and `train_second_target.py` have in
common.

A small model's greedy text soon repeats itself. In the last steps the model is therefore also taught to find less
likely what it repeats when it writes on by itself: sequence-level unlikelihood (arXiv 1908.04319).

B sequences of a batch, L tokens of a sequence, N tokens of a text.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from eagle31_hf.storage.fingerprints import digest

TOKENS = 2048  # of a step
SHORT, LONG = 512, 1024  # L, in the first part of training and in the second
LONG_FROM = 0.6  # of training
UNREPEATED_FROM = 0.92  # of training
CONTINUED, PROMPT, CONTINUATION = 12, 64, 128  # texts that are gone on with in a step, and tokens
WARM_UP, DESCENT = 0.02, 0.4  # shares of training in which the rates rise, and in which they fall
SAVE_STEPS = 250
MATRIX_RATE, REST_RATE = 5e-3, 3e-3


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer of pairs of bytes, with `<|begin|>` (0) before each text and `<|end|>` (1)."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|begin|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet)
    )
    bpe.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )


def token_ids(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> Tensor:
    """Returns all texts, each closed by the end token, as one (N,)."""
    return torch.tensor([i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])


def cut(ids: Tensor, length: int) -> Tensor:
    """Cuts a text (N,) into sequences (N // length, length)."""
    return ids[: len(ids) // length * length].view(-1, length)


def drawn(ids: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Draws pieces (count, length) of a text (N,)."""
    starts = torch.randint(0, len(ids) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([ids[start : start + length] for start in starts.tolist()])


def batch_of(ids: Tensor, step: int, steps: int) -> Tensor:
    """Returns the batch (B, L) of a step: a function of its number alone, so that a resumed run sees what it would have
    seen."""
    length, first = (SHORT, 0) if step < LONG_FROM * steps else (LONG, int(LONG_FROM * steps))
    sequences, size = cut(ids, length), TOKENS // length
    in_an_epoch = len(sequences) // size
    epoch, number = divmod(step - first, in_an_epoch)
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(1000 * length + epoch))
    return sequences[order[number * size : (number + 1) * size]]


def repeated(ids: Tensor, size: int = 4) -> Tensor:
    """Returns a mask (B, L): True for the tokens of every `size` in a row that were there before in their sequence."""
    pieces = ids.unfold(1, size, 1)
    is_repeated = (pieces[:, :, None] == pieces[:, None]).all(-1).tril(-1).any(-1)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for offset in range(size):
        mask[:, offset : offset + is_repeated.shape[1]] |= is_repeated
    return mask


def loss_of_repeating(model: PreTrainedModel, ids: Tensor, step: int) -> Tensor:
    """Returns the mean of -log(1 - probability) of what the model repeats when it greedily goes on after pieces of a
    text (N,), drawn for the step."""
    prompts = drawn(ids, CONTINUED, PROMPT, seed=step)
    options = {"max_new_tokens": CONTINUATION, "do_sample": False, "eos_token_id": None}
    # what autocast keeps of a pass without gradients would have none in the next
    with torch.autocast(ids.device.type, torch.bfloat16, cache_enabled=False):
        written = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    logits = model(input_ids=written).logits[:, :-1].float()
    likely = logits.log_softmax(-1).gather(-1, written[:, 1:, None])[..., 0].exp()
    mask = repeated(written)[:, 1:]
    mask[:, : PROMPT - 1] = False
    return -(1 - likely).clamp(min=1e-4).log()[mask].sum() / mask.sum().clamp(min=1)


def loss_of(model: PreTrainedModel, ids: Tensor, step: int, steps: int) -> Tensor:
    """Returns the loss of a step: of text, and toward the end also of what the model repeats."""
    batch = batch_of(ids, step, steps)
    loss = model(input_ids=batch, labels=batch).loss
    return loss if step < UNREPEATED_FROM * steps else loss + loss_of_repeating(model, ids, step)


def rate_factor(progress: float) -> float:
    """Returns what the rates are multiplied by, at a share of training: warm-up, plateau, linear descent."""
    return min(1.0, progress / WARM_UP, max(0.02, (1 - progress) / DESCENT))


def new_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Makes Muon for the layers' matrices, and AdamW for embeddings, head and norms."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]
    chosen = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=REST_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(model: PreTrainedModel, ids: Tensor, steps: int, state_file: Path) -> dict[str, float]:
    """Trains on a text (N,) in bf16 autocast, and goes on from `state_file`, which is written now and then. Returns
    what is worth writing down."""
    optimizers = new_optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    first, running, minutes = 0, 0.0, 0.0
    run = {"steps": steps, "text": digest(ids.numpy().tobytes())}
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        if {name: state[name] for name in run} != run:
            raise ValueError(
                f"{state_file} is of a run of {state['steps']} steps, or of other text; expected this one's."
            )
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, running, minutes = state["step"], state["running"], state["minutes"]
    began = time.time() - 60 * minutes
    for step in range(first, steps):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate_factor((step + 1) / steps)
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = loss_of(model, ids, step, steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        minutes = (time.time() - began) / 60
        if step % 50 == 0:
            print(f"step {step}/{steps} loss {running:.3f} {minutes:.1f} min", flush=True)
        if (step + 1) % SAVE_STEPS == 0:
            counters = {"step": step + 1, "running": running, "minutes": minutes}
            save_state(state_file, model, optimizers, run | counters)
    return {
        "steps": steps,
        "tokens_trained": steps * TOKENS,
        "minutes": round(minutes, 1),
        "train_loss": round(running, 4),
    }


def save_state(
    file: Path, model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], facts: dict[str, float | str]
) -> None:
    """Writes what a run needs to go on, atomically."""
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    new = file.with_name(f"{file.name}.new")
    torch.save(state | facts, new)
    os.replace(new, file)


@torch.no_grad()
def mean_loss(model: PreTrainedModel, ids: Tensor) -> float:
    """Returns the mean loss of a text (N,), cut into sequences of `SHORT` tokens."""
    sequences = cut(ids, SHORT)
    losses = [model(input_ids=batch, labels=batch).loss.item() * len(batch) for batch in sequences.split(4)]
    return sum(losses) / len(sequences)


def parse_args(description: str, steps: int) -> argparse.Namespace:
    """Reads the command line of a script that trains a target."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps, help=f"of {TOKENS:,} tokens, default %(default)s")
    parser.add_argument("--files", type=int, help="train on the first so many files only")
    parser.add_argument("--held-out", type=int, default=64, help=f"pieces of {SHORT} tokens, default %(default)s")
    return parser.parse_args()


def write_target(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    held_out: list[str],
    args: argparse.Namespace,
) -> None:
    """Trains a target on texts, and writes it in bfloat16 with its tokenizer and `training.json`. The state to go on
    from is OUTPUT.state, which is deleted at the end."""
    ids = token_ids(tokenizer, texts)
    print(f"{len(texts)} files, {len(ids):,} tokens, {model.num_parameters():,} parameters", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.output)
    state_file = args.output.with_name(f"{args.output.name}.state")
    record = {"python": sys.version.split()[0], "files": len(texts), "tokens_in_corpus": len(ids)}
    record |= train(model, ids, args.steps, state_file)
    record |= {"held_out_loss": round(mean_loss(model, token_ids(tokenizer, held_out)[: args.held_out * SHORT]), 4)}
    model.to(torch.bfloat16).save_pretrained(args.output)
    (args.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    state_file.unlink(missing_ok=True)
    print(json.dumps(record), flush=True)
