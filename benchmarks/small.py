"""A small target, for which every millisecond of drafting counts: auto from the first call on, what it has to learn
included, and chains of three, beside plain decoding. Random weights, acceptance by decree."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from command import progress, run_benchmark
from engine import Setting, build, geometric, seconds_of_call

from eagle31_hf.acceptance import track_acceptance
from eagle31_hf.bench import environment
from eagle31_hf.cli.parsing import positive

RATES = (0.45, 0.65)  # chances that a draft is accepted: 1.7 and 2.3 tokens a round where three are drafted
KNOBS: dict[str, dict[str, Any]] = {"auto": {"num_assistant_tokens": "auto"}, "chain of 3": {"num_assistant_tokens": 3}}
DEPTH = 12  # drafts deeper than this are never accepted
CALLS = 6


def measure_small(
    prompt_tokens: int = 64, max_new_tokens: int = 192, progress: Callable[[str], None] = lambda message: None
) -> dict[str, Any]:
    """Returns {"runs", "environment"}. A run is a rate of acceptance and a setting: `speedups` over the target alone by
    call, in order, `speedup` of all calls, `mean_accepted_length` in tokens a target forward."""
    runs = []
    for rate in RATES:
        target, drafter = build("small", torch.float32, "cpu")  # a new pair, of which auto knows nothing
        prompt = torch.randint(0, target.config.vocab_size, (1, prompt_tokens))
        settings = [Setting(name, knobs, geometric(rate, DEPTH)) for name, knobs in KNOBS.items()]
        warm_up = Setting("warm-up", {"num_assistant_tokens": 1}, (0.0,))
        for setting in (None, warm_up):
            seconds_of_call(target, drafter, setting, prompt, max_new_tokens)
        alone: list[float] = []
        walls: dict[str, list[float]] = {name: [] for name in KNOBS}
        lengths: dict[str, float] = {}
        for call in range(CALLS):
            progress(f"{rate} accepted, call {call + 1} of {CALLS}")
            alone.append(seconds_of_call(target, drafter, None, prompt, max_new_tokens))
            for setting in settings:
                with track_acceptance() as stats:
                    walls[setting.name].append(
                        seconds_of_call(target, drafter, setting, prompt, max_new_tokens, seed=call)
                    )
                lengths[setting.name] = stats.mean_accepted_length
        runs += [
            {
                "rate": rate,
                "setting": name,
                "speedups": [a / w for a, w in zip(alone, seconds, strict=True)],
                "speedup": sum(alone) / sum(seconds),
                "mean_accepted_length": lengths[name],
                "milliseconds_a_token_alone": 1000 * sum(alone) / (CALLS * max_new_tokens),
            }
            for name, seconds in walls.items()
        ]
    return {
        "runs": runs,
        "environment": environment(target, prompts=1, max_new_tokens=max_new_tokens, prompt_tokens=prompt_tokens),
    }


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    result = measure_small(args.prompt_tokens, args.max_new_tokens, progress)
    lines = ["accepted  drafting     tokens a round  speedup  by call"]
    lines += [
        f"{run['rate']:>8}  {run['setting']:<11} {run['mean_accepted_length']:>15.2f}  {run['speedup']:>6.2f}x "
        + "".join(f" {speedup:.2f}" for speedup in run["speedups"])
        for run in result["runs"]
    ]
    return result, "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=positive, default=64, help="(default: 64)")
    parser.add_argument("--max-new-tokens", type=positive, default=192, help="tokens a sequence (default: 192)")


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
