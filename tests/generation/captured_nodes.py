"""Counts the nodes of captured rounds: the operations that a GPU would be given by a draft and a verify, on a pretend
accelerator, where rounds run uncaptured. An operation of `kernels` counts as one. And whether anything in them makes
the host wait, which could not be captured at all.

    python tests/generation/captured_nodes.py           a table
    python tests/generation/captured_nodes.py --lines   and the operations of a draft step, a tree's level and a verify
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from pretend import LAUNCHES, WAITS, Held, accelerator, moved
from transformers import AutoModelForCausalLM, Lfm2Config, LlamaConfig, Qwen3Config, Qwen3NextConfig

from eagle31_hf import Eagle31Config, Eagle31DrafterModel
from eagle31_hf.generation.captured.kept import release
from eagle31_hf.generation.captured.round import Round
from eagle31_hf.generation.captured.seam import Uncaptured, seams

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 512,
}  # fmt: skip
TARGETS = {"Llama": (LlamaConfig, 32), "Qwen3": (Qwen3Config, 36)}  # and the layers of the model whose nodes are told
# Targets with recurrent states, which have no experts: these make the host wait, be it a transformers' matter.
STATES = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mlp_only_layers": [0, 1, 2, 3],
}  # fmt: skip
TARGETS_WITH_STATES = {
    "Qwen3-Next": (Qwen3NextConfig, STATES),
    "LFM2": (Lfm2Config, {"layer_types": ["conv", "full_attention"] * 2}),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DRAFTERS = {"eagle31": {}, "eagle3": {"fc_norm": False, "norm_output": False}}
# Every target, dtype and drafter; the last is an eagle31 drafter whose weights are held in 8 bits.
WAYS = [("Llama", "bf16", "eagle31"), ("Qwen3", "bf16", "eagle3"), ("Llama", "fp32", "fp8")]
FEW, MORE = 4, 5  # layers of targets that are run
CHAIN, TREE = {"num_assistant_tokens": 3}, {"num_assistant_tokens": 3, "draft_tree_top_k": 4}
PROMPT_TOKENS, NEW_TOKENS, LONGER = 12, 3, 6
PARTS = {
    "draft": Round.draft, "verify": Round.verify, "layout": Round._layout, "reading": Round._read,
    "target": Round._run_target, "keep": Round.keep,
}  # fmt: skip


def models(target: str, num_layers: int, dtype: torch.dtype, drafter: str) -> tuple[Any, Eagle31DrafterModel]:
    """A target of so many layers that ends no text, and a drafter, both random, on the pretend device."""
    torch.manual_seed(0)
    kind, fields = TARGETS_WITH_STATES.get(target) or (TARGETS[target][0], {})
    config = kind(**SIZES, **fields, num_hidden_layers=num_layers, eos_token_id=None, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    flags = DRAFTERS.get(drafter, {})
    of_drafter = Eagle31Config(**SIZES, **flags, draft_vocab_size=256, aux_hidden_state_layer_ids=[1, 2, 3])
    drafts = Eagle31DrafterModel(of_drafter).eval().to(dtype)
    drafts = drafts if drafter in DRAFTERS else drafts.quantize(drafter)
    return moved(model), moved(drafts)


@dataclass
class Counts:
    """Counts of the last round, by its parts: nodes by operation, and waits by reason and line; how many rounds there
    were, and how often the host waited in all."""

    nodes: dict[str, Counter[str]] = field(default_factory=dict)
    waits: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)
    rounds: int = 0
    all_waits: int = 0


@contextmanager
def counting() -> Iterator[Counts]:
    """A context that counts."""
    counts = Counts()

    def counted(name: str, function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            launches, waits = LAUNCHES.copy(), WAITS.copy()
            out = function(*args, **kwargs)
            counts.nodes[name] = LAUNCHES - launches
            counts.waits[name] = WAITS - waits
            counts.rounds += name == "verify"
            return out

        return run

    WAITS.clear()
    try:
        for name, function in PARTS.items():
            setattr(Round, function.__name__, counted(name, function))
        yield counts
    finally:
        counts.all_waits = WAITS.total()
        for function in PARTS.values():
            setattr(Round, function.__name__, function)


def decode(pair: tuple[Any, Eagle31DrafterModel], knobs: dict[str, Any], num_tokens: int = NEW_TOKENS) -> Counts:
    """Decodes so many tokens in captured rounds."""
    ids = Held(torch.randint(SIZES["vocab_size"], (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)))
    release(pair[1])  # what is kept would run the functions that an earlier call has counted
    with seams(lambda device: Uncaptured()), counting() as counts:
        pair[0].generate(
            ids,
            attention_mask=Held(torch.ones_like(ids.x)),
            max_new_tokens=num_tokens,
            do_sample=False,
            assistant_model=pair[1],
            **knobs,
        )
    return counts


def deeper(knobs: dict[str, Any]) -> dict[str, Any]:
    return knobs | {"num_assistant_tokens": knobs["num_assistant_tokens"] + 1}


def figures(target: str, dtype: str, drafter: str) -> dict[str, Any]:
    """All that the table tells of a target, a dtype and a drafter; nodes of the large target are extrapolated from two
    small ones, since every layer has the same."""
    pair, larger = (models(target, depth, DTYPES[dtype], drafter) for depth in (FEW, MORE))
    deep = decode(pair, deeper(CHAIN))  # with waits for what is tried once
    chain, tree, longer = decode(pair, CHAIN), decode(pair, TREE), decode(pair, CHAIN, LONGER)
    step = deep.nodes["draft"] - chain.nodes["draft"]
    level = decode(pair, deeper(TREE)).nodes["draft"] - tree.nodes["draft"]
    of_a_layer = decode(larger, CHAIN).nodes["verify"] - chain.nodes["verify"]
    rest = (TARGETS[target][1] - FEW) * of_a_layer.total()
    waits = sum((each.waits[part] for each in (chain, tree) for part in ("draft", "verify")), Counter())
    return {
        "layer": of_a_layer.total(),
        "verify": chain.nodes["verify"].total() + rest,
        "verify a tree": tree.nodes["verify"].total() + rest,
        "accept": (chain.nodes["verify"] - chain.nodes["target"]).total(),
        "layout": chain.nodes["layout"].total(),
        "reading": chain.nodes["reading"].total(),
        "step": step.total(),
        "level": level.total(),
        "copies": (longer.all_waits - chain.all_waits) / (longer.rounds - chain.rounds),
        "waits": {" ".join(place): count for place, count in waits.items()},
        "lines": {"a step": step, "a level": level, **chain.nodes},
    }


def figures_with_states(target: str) -> dict[str, Any]:
    """The nodes of a round of chains, and how often the host waits in it."""
    pair = models(target, FEW, torch.float32, "eagle31")
    decode(pair, CHAIN)  # with waits for what is tried once
    chain, longer = (decode(pair, CHAIN, length) for length in (LONGER, 2 * LONGER))
    return {
        "verify": chain.nodes["verify"].total(),
        "keep": longer.nodes["keep"].total(),
        "copies": (longer.all_waits - chain.all_waits) / (longer.rounds - chain.rounds),
        "waits": {" ".join(place): count for part in longer.waits.values() for place, count in part.items()},
    }


def all_figures() -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    with accelerator():
        found = {" ".join(way): figures(*way) for way in WAYS}
        return found | {target: figures_with_states(target) for target in TARGETS_WITH_STATES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", action="store_true")
    args = parser.parse_args()
    found = all_figures()
    for name, each in found.items():
        print(name, *(f"{one} {each[one]:g}" for one in each if one not in ("waits", "lines")), sep="  ")
        for place, count in each["waits"].items():
            print(f"    {count} waits: {place}")
        for part, counts in each.get("lines", {}).items() if args.lines else ():
            print(f"    {part}: {dict(sorted(counts.items(), key=lambda item: -item[1]))}")


if __name__ == "__main__":
    main()
