"""Counts, for every way to decode, how often a round makes the host wait for the device, and how many operations it
launches: on a pretend accelerator, with a Llama and synthetic acceptance. Launches are those of a Llama of 32 layers,
extrapolated from two of fewer layers, since every layer launches the same.

    python tests/generation/host_waits.py [--lines]     a table; with --lines where the host waits
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from captured_nodes import FEW, SIZES, models
from pretend import LAUNCHES, WAITS, Held, accelerator
from torch import Tensor

from eagle31_hf import Eagle31DrafterModel, track_acceptance
from eagle31_hf.generation.planning.controller import LevelController

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from synthetic import MARK, synthetic_decoding

LAYERS = 32  # of the Llama whose launches are told
MORE = 6  # layers of those that are run, or FEW
SURVIVAL = tuple(0.75 ** (depth + 1) for depth in range(12))
CHAIN = {"num_assistant_tokens": 5}
TREE = {"num_assistant_tokens": 5, "draft_tree_top_k": 4, "draft_tree_total_tokens": 16}
SAMPLED = {"do_sample": True, "top_k": 20, "temperature": 0.8}
# Ways to decode: name -> the drafting knobs, the sampling options, and the sequences of the batch.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "chain": (CHAIN, {}, 1),
    "tree": (TREE, {}, 1),
    "auto": ({"num_assistant_tokens": "auto"}, {}, 1),
    "sampled chain": (CHAIN, SAMPLED, 1),
    "sampled tree": (TREE, SAMPLED, 1),
    "chain, batch of 4": (CHAIN, {}, 4),
    "tree, batch of 4": (TREE, {}, 4),
    "sampled chain, batch of 4": (CHAIN, SAMPLED, 4),
}
LAUNCHES_TOLD = ("chain", "tree")
PROMPT_TOKENS, WARM = 12, 3
SHORT, LONG = 6, 12  # the difference of two texts leaves out what is done once a call
LONGER = 24  # where launches are told, which are not those of every round, and of auto, whose rounds the clock decides


def counts(target: Any, drafter: Eagle31DrafterModel, way: str, num_tokens: int) -> tuple[Counter, Counter]:
    """Decodes so many tokens: how often the host waited, by reason and line; and rounds, decisions and launches."""
    knobs, sampling, num_sequences = WAYS[way]
    ids = Held(torch.randint(SIZES["vocab_size"], (num_sequences, PROMPT_TOKENS)))
    if sampling:
        options: dict[str, Any] = {"assistant_model": drafter, **knobs, **sampling}
    else:
        options = {"custom_generate": synthetic_decoding(drafter, knobs, SURVIVAL), "do_sample": False}
    WAITS.clear()
    LAUNCHES.clear()
    noted = Counter[str]()
    width = LevelController.width

    def counted(self: LevelController, scores: Tensor, level: int) -> int:
        noted["decisions"] += 1
        return width(self, scores, level)

    LevelController.width = counted  # type: ignore[method-assign]
    try:
        with track_acceptance() as stats:
            target.generate(ids, attention_mask=Held(torch.ones_like(ids.x)), max_new_tokens=num_tokens, **options)
    finally:
        LevelController.width = width  # type: ignore[method-assign]
    noted["launches"] = sum(LAUNCHES.values())
    noted["rounds"] = stats.target_forwards
    return Counter(WAITS), noted


def by_round(target: Any, drafter: Eagle31DrafterModel, way: str) -> dict[str, Any]:
    """Waits, launches and decisions about levels, of a round in the midst of a text; and where it waits."""
    counts(target, drafter, way, WARM)  # what is tried and built once
    few, short = counts(target, drafter, way, SHORT)
    many, long = counts(target, drafter, way, LONGER if way in (*LAUNCHES_TOLD, "auto") else LONG)
    rounds = long["rounds"] - short["rounds"]
    lines = {" ".join(place): (many[place] - few[place]) / rounds for place in many}
    return {
        "waits": sum(lines.values()),
        "launches": (long["launches"] - short["launches"]) / rounds,
        "decisions": (long["decisions"] - short["decisions"]) / rounds,
        "lines": {place: count for place, count in lines.items() if count},
    }


def figures() -> dict[str, dict[str, Any]]:
    """Returns what a round of every way takes: {way: {"waits", "launches", "decisions", "lines"}}."""
    with accelerator():
        pair, larger = (models("Llama", depth, torch.bfloat16, "eagle31") for depth in (FEW, MORE))
        for target, _ in (pair, larger):
            setattr(target, MARK, True)
        found = {way: by_round(*pair, way) for way in WAYS}
        for way in LAUNCHES_TOLD:
            of_a_layer = (by_round(*larger, way)["launches"] - found[way]["launches"]) / (MORE - FEW)
            found[way]["launches"] += (LAYERS - FEW) * of_a_layer
    return found


def with_inputs_on_the_host() -> dict[str, tuple[list, list]]:
    """Returns the texts of two prompts of unequal length with and without the drafter, by way to draft: the inputs lie
    on the host, both models on the device."""
    processors = {"min_new_tokens": 4, "eos_token_id": 3, "bad_words_ids": [[7], [8, 9]], "repetition_penalty": 1.2}
    ways = {"chain": CHAIN, "tree": TREE, "text": CHAIN | {"prompt_lookup_num_tokens": 5}}
    with accelerator():
        target, drafter = models("Llama", FEW, torch.float32, "eagle31")
        ids = torch.randint(10, SIZES["vocab_size"], (2, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        found = {}
        for way, knobs in (ways | {f"{way}, processors": knobs | processors for way, knobs in ways.items()}).items():
            options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": LONGER}
            options |= {name: value for name, value in knobs.items() if name in processors}
            ours = target.generate(ids, assistant_model=drafter, **options | knobs)
            found[way] = ours.tolist(), target.generate(ids, **options).tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", action="store_true")
    args = parser.parse_args()
    print(f"{'a round of':28} {'waits':>6} {'launches':>9} {'decisions':>10}")
    for way, found in figures().items():
        launches = f"{found['launches']:9.0f}" if way in LAUNCHES_TOLD else " " * 9
        print(f"{way:28} {found['waits']:6.2f} {launches} {found['decisions']:10.2f}")
        for place, count in found["lines"].items() if args.lines else ():
            print(f"    {count:5.2f}  {place}")


if __name__ == "__main__":
    main()
