"""Train the demo's target: a deep, thin Llama on the source of Python's standard library.

    python examples/train_demo_target.py --output eagle31_hf/demo/target

About two hours on a CPU core; a run that was stopped goes on. Deep and thin (24 layers, 128 wide), so that a target
step costs many draft steps, as in a real LLM. Writes the model (bfloat16), the tokenizer and `training.json` with what
the card reports.
"""

import torch
from corpus import training_files
from pretraining import parse_args, train_tokenizer, write_target
from transformers import LlamaConfig, LlamaForCausalLM

from eagle31_hf.demo import HELD_OUT, held_out_file

VOCAB_SIZE = 2048


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


def main() -> None:
    args = parse_args(__doc__, steps=4000)
    torch.manual_seed(0)
    texts = list(training_files())[: args.files]
    held_out = [held_out_file(name) for name in HELD_OUT]
    write_target(new_target(), train_tokenizer(texts, VOCAB_SIZE), texts, held_out, args)


if __name__ == "__main__":
    main()
