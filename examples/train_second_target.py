"""Train a second target for `search_recipe.py`, unlike the demo's: another family, another vocabulary,
another depth, text of another language.

    python examples/train_second_target.py --output second

About half an hour on a CPU core; a run that was stopped goes on. A Qwen3 of 8 layers, 192 wide, with its own head and
3,072 ids, on the C++ headers that torch comes with. Writes the model (bfloat16), the tokenizer and `training.json`.
"""

from pathlib import Path

import torch
from pretraining import parse_args, train_tokenizer, write_target
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 3072
HELD_OUT = 24  # every so many files, one that is not trained on
LEFT_OUT = {"ops"}  # generated: thousands of files that are nearly the same
LARGEST_FILE = 200_000  # bytes


def headers(held_out: bool) -> list[str]:
    """Returns the text of the headers that are trained on, or of those that are held out."""
    root = Path(torch.__file__).parent / "include"
    paths = [
        path
        for path in sorted(root.rglob("*.h"))
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts) and path.stat().st_size <= LARGEST_FILE
    ]
    chosen = [path for number, path in enumerate(paths) if (number % HELD_OUT == 0) == held_out]
    return [path.read_text(encoding="utf-8", errors="ignore") for path in chosen]


def new_target() -> Qwen3ForCausalLM:
    """Makes the untrained target."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    args = parse_args(__doc__, steps=1600)
    torch.manual_seed(0)
    texts = headers(held_out=False)[: args.files]
    write_target(new_target(), train_tokenizer(texts, VOCAB_SIZE), texts, headers(held_out=True), args)


if __name__ == "__main__":
    main()
