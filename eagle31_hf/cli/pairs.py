"""A target and its drafter as `eagle31 generate`, `chat`, `app` and `serve` take them: arguments, loading."""

import argparse
from typing import Any

from ..modeling import Eagle31DrafterModel
from .parsing import DTYPES, add_path, add_reading, knob, reading_options

# the knobs that are options, and what their help says
KNOBS = {
    "num_assistant_tokens": "tokens drafted a round (default: the drafter's own)",
    "draft_tree_top_k": "children of a node; above 1 trees are drafted instead of chains",
    "draft_tree_total_tokens": "nodes of a tree, the root included",
    "prompt_lookup_num_tokens": "tokens of a chain taken from the text, where its last tokens stood before; 0: none",
}


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the pair and say how it is held and drafts."""
    add_path(parser, "--target", "folder or Hub repository of the model to speed up", required=True)
    add_path(parser, "--drafter", "folder or Hub repository of an EAGLE 3 or 3.1 drafter for it", required=True)
    for name, what in KNOBS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=knob(name), help=f"{what}; or auto")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of both models (default: auto, the target's own)"
    )
    parser.add_argument(
        "--drafter-weights", choices=("int8", "fp8"), help="hold the drafter's weights in 8 bits (default: as they are)"
    )
    add_reading(parser)


def knobs_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of generate() that say how to draft."""
    return {knob: getattr(args, knob) for knob in KNOBS if getattr(args, knob) is not None}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of generate() for --temperature, 0: greedy; without it sampling is the target's own."""
    sampled = {"temperature": args.temperature} if args.temperature else {}
    return {} if args.temperature is None else {"do_sample": args.temperature > 0, **sampled}


def load_drafter(args: argparse.Namespace, target: Any) -> Any:
    """Loads the drafter, of the target's dtype and on its device."""
    drafter: Any = Eagle31DrafterModel.from_pretrained(args.drafter, dtype=target.dtype, **reading_options(args))
    drafter = drafter.to(target.device).eval()
    if args.drafter_weights is not None:
        drafter.quantize(args.drafter_weights)
    return drafter
