"""Generate with a drafter and see what it brought.

python examples/generate.py                                              # the demo pair, offline
python examples/generate.py --target Qwen/Qwen3-8B --drafter PATH "def"  # yours
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import eagle31_hf
from eagle31_hf import demo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt", nargs="?", default="def read_config(path):\n")
parser.add_argument("--target", default=demo.FOLDER / "target")
parser.add_argument("--drafter", default=demo.FOLDER / "eagle31")
parser.add_argument("--max-new-tokens", type=int, default=64)
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.target)
target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
drafter = eagle31_hf.Eagle31DrafterModel.from_pretrained(args.drafter, dtype=torch.float32)

inputs = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False)
with eagle31_hf.track_acceptance() as stats:
    output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=args.max_new_tokens)

print(tokenizer.decode(output[0], skip_special_tokens=True))
print(stats.summary())

alone = target.generate(**inputs, max_new_tokens=args.max_new_tokens)
print("same as the target alone:", torch.equal(output, alone))
