"""Does a drafter still serve its target once that has a LoRA adapter? Trains one on source of Python's standard
library, and prints the accepted length of chains on files held out and after questions: without the adapter, with it,
and with the drafter's `fc` fitted anew, by least squares, to give of the adapted states what it gave of the target's.

    python examples/adapted_target.py --target HuggingFaceTB/SmolLM2-135M-Instruct \\
        --drafter model_cards/SmolLM2-135M-Instruct-eagle31
"""

import argparse
import copy
import random

import torch
from corpus import training_files
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import eagle31_hf
from eagle31_hf.modeling import normed_target_states
from eagle31_hf.targets.layers import decoder_layers, target_states

LENGTH, BATCH, RATE = 192, 4, 4e-4
HELD_OUT, PROMPT, SKIPPED = 20, 120, 1500  # files; tokens of a prompt, after so many letters
CALIBRATED, RIDGE = 60, 0.1  # files of the fit; how far it may go, as a share of the states' own size
QUESTIONS = ("Give me three tips for sleeping better.", "What is the capital of France?", "How do I bake bread?")


def accepted_length(target, drafter, prompts: list[Tensor]) -> float:
    with eagle31_hf.track_acceptance() as stats:
        for ids in prompts:
            mask = torch.ones_like(ids)
            target.generate(
                input_ids=ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=48, num_assistant_tokens=5
            )
    return stats.mean_accepted_length


def adapt(target, texts: list[Tensor], steps: int):
    """The target with an adapter that was trained on texts (T,)."""
    adapted = get_peft_model(target, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([weight for weight in adapted.parameters() if weight.requires_grad], lr=RATE)
    tokens, draw = torch.cat(texts), torch.Generator().manual_seed(0)
    for _ in range(steps):
        begins = torch.randint(0, len(tokens) - LENGTH, (BATCH,), generator=draw).tolist()
        ids = torch.stack([tokens[begin : begin + LENGTH] for begin in begins])
        with torch.autocast("cpu", torch.bfloat16):
            loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted.eval()


@torch.no_grad()
def fitted(drafter, adapted, texts: list[Tensor]):
    """A copy of the drafter whose `fc` makes of the adapted target's states (N, n*ht) what it made of the target's."""
    layer_ids = drafter.config.resolve_layer_ids(len(decoder_layers(adapted.get_base_model())))

    def states() -> Tensor:
        found = [target_states(adapted.get_base_model(), ids[None], layer_ids)[0][0] for ids in texts]
        return normed_target_states(drafter, torch.cat(found)).double()

    new = states()
    with adapted.disable_adapter():
        old = states()
    weight, gram = drafter.fc.weight.double(), new.T @ new
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    change = torch.linalg.solve(gram + ridge, new.T @ ((old - new) @ weight.T)).T
    copied = copy.deepcopy(drafter)
    copied.fc.weight.copy_(weight + change)
    return copied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub repository of the model")
    parser.add_argument("--drafter", required=True, help="folder or Hub repository of its drafter")
    parser.add_argument("--steps", type=int, default=120, help="of the adapter's training (default: 120)")
    parser.add_argument("--files", type=int, default=140, help="of the standard library (default: 140)")
    args = parser.parse_args()
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    drafter = eagle31_hf.Eagle31DrafterModel.from_pretrained(args.drafter, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    files = [text for text in training_files() if len(text) > 2 * SKIPPED]
    files = random.Random(0).sample(files, min(args.files, len(files)))
    ids = [torch.tensor(tokenizer(text[SKIPPED:])["input_ids"]) for text in files]
    held_out = min(HELD_OUT, len(ids) // 2)
    sets = {"files held out": [text[None, :PROMPT] for text in ids[:held_out]]}
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        sets["questions"] = [tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in chats]

    def show(name: str, target, drafter) -> None:
        lengths = (f"{of} {accepted_length(target, drafter, prompts):.2f}" for of, prompts in sets.items())
        print(f"{name:<16}", *lengths, sep="  ")

    show("the target", target, drafter)
    adapted = adapt(target, ids[held_out:], args.steps)
    show("with an adapter", adapted, drafter)
    show("fc fitted anew", adapted, fitted(drafter, adapted, [text[:LENGTH] for text in ids[-CALIBRATED:]]))


if __name__ == "__main__":
    main()
