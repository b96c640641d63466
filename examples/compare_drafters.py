"""EAGLE 3.1 beside EAGLE 3 where drift should show: deep chains, texts past the trained length, noisy prompts.

    python examples/compare_drafters.py [--prompts 12] [--max-new-tokens 96] [--depth 10]

The demo's drafters were trained on 256 tokens and 4 steps. Greedy decoding of held-out files; acceptance is accepted
over drafted.
"""

import argparse

import torch

import eagle31_hf
from eagle31_hf import demo
from eagle31_hf.diagnostics.acceptance import measure_acceptance

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--prompts", type=int, default=12)
parser.add_argument("--max-new-tokens", type=int, default=96)
parser.add_argument("--depth", type=int, default=10)
args = parser.parse_args()

target, tokenizer = demo.load_target()
generator = torch.Generator().manual_seed(0)


def with_noise(prompt: torch.Tensor, share: float) -> torch.Tensor:
    """Replaces that share of the prompt's tokens by random ones."""
    hit = torch.rand(prompt.shape, generator=generator) < share
    return torch.where(hit, torch.randint(2, len(tokenizer), prompt.shape, generator=generator), prompt)


short = demo.prompts(tokenizer, args.prompts)
window = {"layer_types": ["sliding_attention"], "sliding_window": 192}
conditions = {  # what is decoded, and fields of the drafter's config to change
    "96-token prompts": (short, {}),
    "20% of the prompt replaced": ([with_noise(prompt, 0.2) for prompt in short], {}),
    "400-token prompts": (demo.prompts(tokenizer, args.prompts, num_tokens=400), {}),
    "400, window of 192": (demo.prompts(tokenizer, args.prompts, num_tokens=400), window),
    "768-token prompts": (demo.prompts(tokenizer, args.prompts, num_tokens=768), {}),
    "768, window of 192": (demo.prompts(tokenizer, args.prompts, num_tokens=768), window),
}
for condition, (prompts, fields) in conditions.items():
    for name in demo.DRAFTERS:
        drafter = eagle31_hf.Eagle31DrafterModel.from_pretrained(demo.FOLDER / name, dtype=torch.float32, **fields)
        stats = measure_acceptance(target, drafter, prompts, args.depth, args.max_new_tokens)
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rates)
        print(
            f"{condition:<28} {name:<8} accepted length {stats.mean_accepted_length:.2f}   by position {rates}",
            flush=True,
        )
