"""Captured rounds beside eager ones: the same text, the time of each, and what runs how.

python examples/gpu.py                                              # the demo pair, offline
python examples/gpu.py --target Qwen/Qwen3-8B --drafter PATH --dtype bfloat16
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import eagle31_hf
from eagle31_hf import demo
from eagle31_hf.generation.captured.kept import explained

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt", nargs="?", default="def read_config(path):\n")
parser.add_argument("--target", default=demo.FOLDER / "target")
parser.add_argument("--drafter", default=demo.FOLDER / "eagle31")
parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
parser.add_argument("--max-new-tokens", type=int, default=128)
parser.add_argument("--calls", type=int, default=3, help="the first one captures what the others replay")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = getattr(torch, args.dtype)
tokenizer = AutoTokenizer.from_pretrained(args.target)
target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device)
drafter = eagle31_hf.Eagle31DrafterModel.from_pretrained(args.drafter, dtype=dtype).to(device)
inputs = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False).to(device)


def decoded(**options) -> tuple[list[int], float]:
    """The tokens of one call, and the tokens a second."""
    began = time.perf_counter()
    output = target.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, **options)[0].tolist()
    return output, (len(output) - inputs["input_ids"].shape[1]) / (time.perf_counter() - began)


decoded()  # the first call loads what all need
alone, speed = decoded()
print(f"the target alone: {speed:.1f} tokens/s")
for call in range(args.calls):
    # `disable_compile` is transformers' own switch: here it has rounds run eagerly.
    for options in ({}, {"disable_compile": True}):
        with eagle31_hf.track_acceptance() as stats:
            text, speed = decoded(assistant_model=drafter, **options)
        how = " and ".join(stats.executions) or "eagerly"
        length = f"accepted length {stats.mean_accepted_length:.2f}"
        print(f"call {call + 1}, {how}: {speed:.1f} tokens/s, {length}, same text: {text == alone}")
print(stats.summary())
print(explained(drafter, target))
