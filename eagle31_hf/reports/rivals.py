"""Rivals: ways of speculating that transformers has itself. A report measures them beside this library's rounds,
greedily and one prompt at a time."""

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line reads the names alone
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..modeling import Eagle31DrafterModel

LOOKUP, LOOP = "prompt-lookup", "assisted-loop"
RIVALS = (LOOKUP, LOOP)
LOOKUP_LENGTHS = (3, 10)  # tokens: those of transformers' own example, and those of the method's authors
Generate = Callable[..., "Tensor"]  # ids (1, T) and arguments of generate() -> sequences (1, T + N)


def rivals(
    names: tuple[str, ...], target: "PreTrainedModel", drafters: Mapping[str, "Eagle31DrafterModel"], depth: int
) -> dict[str, Generate]:
    """Returns how rivals decode, by what a report calls them. `depth`: tokens that a drafter drafts in the loop."""
    found = dict[str, Generate]()
    if LOOKUP in names:
        for count in LOOKUP_LENGTHS:
            found[f"prompt lookup, {count} tokens"] = looked_up(target, count)
    if LOOP in names:
        for label, drafter in drafters.items():
            found[f"{label} in transformers' assisted loop, {depth} deep"] = in_their_loop(target, drafter, depth)
    return found


def looked_up(target: "PreTrainedModel", count: int) -> Generate:
    """Returns a function that generates by prompt lookup: it drafts the `count` tokens that followed the text's last
    ones where these occurred before."""

    def generate(ids: "Tensor", **options: Any) -> "Tensor":
        return target.generate(ids, prompt_lookup_num_tokens=count, **options)

    return generate


def in_their_loop(target: "PreTrainedModel", drafter: "Eagle31DrafterModel", depth: int) -> Generate:
    """Returns a function that generates in the loop which transformers has for assistants, with chains that a drafter
    drafts through an `Eagle31CandidateGenerator`."""

    from ..generation.candidate_generator import Eagle31CandidateGenerator

    def generate(ids: "Tensor", **options: Any) -> "Tensor":
        made = Eagle31CandidateGenerator(drafter, target, depth, ids.shape[1] + options["max_new_tokens"])
        with drafting_by(target, made):  # asked for prompt lookup, generate() enters the loop
            return looked_up(target, depth)(ids, **options)

    return generate


@contextmanager
def drafting_by(target: Any, generator: Any):
    """A context in which transformers' loop drafts by an `Eagle31CandidateGenerator`, whatever assistant it has. Raises
    RuntimeError where the loop did not ask for it, as in a release that finds its assistant by another name."""
    asked = list[bool]()

    def found(**arguments: Any) -> Any:
        asked.append(True)
        return generator

    target._get_candidate_generator = found
    try:
        with generator:
            yield
    finally:
        del target._get_candidate_generator
    if not asked:
        raise RuntimeError(
            "transformers' loop did not draft with the drafter: this release finds its assistant in another way;"
            " expected transformers 5.17 to 5.23, or no assisted-loop among the rivals."
        )
