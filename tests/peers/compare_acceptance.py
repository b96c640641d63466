"""Accepted tokens by position, ours beside vLLM's, for the demo pair and the same prompts (greedy, fp32).

    python tests/peers/compare_acceptance.py --vllm-python PATH_TO_A_PYTHON_WITH_VLLM [--depth 7] [--prompts 12] [--max-new-tokens 96]

vLLM always drafts to full depth and counts a text's last round whole, past the length limit too; so we decode a little further and count
the rounds that begin before the limit. Exit status 1 where a count differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from eagle31_hf import demo, track_acceptance

HERE = Path(__file__).parent


def our_counts(target, drafter, prompts, depth: int, max_new_tokens: int) -> dict:
    """Accepted and drafted tokens by position over the rounds that begin with fewer than `max_new_tokens` tokens."""
    accepted, drafts, texts = [0] * depth, 0, []
    for prompt in prompts:
        with track_acceptance() as stats:
            sequence = target.generate(
                prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, num_assistant_tokens=depth,
                max_new_tokens=max_new_tokens + depth + 1, do_sample=False, eos_token_id=None,
            )  # fmt: skip
        generated = 1
        for accepted_len in stats.accepted_per_round:
            if generated >= max_new_tokens:
                break
            generated += accepted_len + 1
            drafts += 1
            for position in range(accepted_len):
                accepted[position] += 1
        texts.append(sequence[0, prompt.shape[1] :][:max_new_tokens].tolist())
    return {"drafts": drafts, "accepted_per_position": accepted, "texts": texts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()
    target, tokenizer = demo.load_target()
    prompts = demo.prompts(tokenizer, args.prompts)
    same = True
    for name in demo.DRAFTERS:
        ours = our_counts(target, demo.load_drafter(name), prompts, args.depth, args.max_new_tokens)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump([prompt[0].tolist() for prompt in prompts], file)
            file.flush()
            command = [
                args.vllm_python, HERE / "vllm_counts.py", "--target", demo.FOLDER / "target", "--drafter", demo.FOLDER / name,
                "--prompts", file.name, "--num-speculative-tokens", str(args.depth), "--max-new-tokens", str(args.max_new_tokens), "--json",
            ]  # fmt: skip
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        vllm = json.loads(output.strip().splitlines()[-1])
        for label, counts in (("ours", ours), ("vLLM", vllm)):
            print(f"{name:<8} {label}: {counts['drafts']} drafts, accepted by position {counts['accepted_per_position']}")
        same &= ours["accepted_per_position"] == vllm["accepted_per_position"] and ours["drafts"] == vllm["drafts"]
    print("same counts" if same else "COUNTS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
