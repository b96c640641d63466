"""Rivals: ways of speculating that transformers has itself. A report measures them beside this library's rounds,
greedily and one prompt at a time."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..generation.candidate_generator import Eagle31CandidateGenerator
from ..modeling import Eagle31DrafterModel

LOOKUP, LOOP = "prompt-lookup", "assisted-loop"
RIVALS = (LOOKUP, LOOP)
LOOKUP_LENGTHS = (3, 10)  # tokens: those of transformers' own example, and those of the method's authors
Generate = Callable[..., Tensor]  # ids (B, T) and arguments of generate() -> sequences (B, T + N)


def rivals(
    names: tuple[str, ...], target: Any, drafters: Mapping[str, Eagle31DrafterModel], depth: int
) -> dict[str, Generate]:
    """Returns how rivals decode, by what a report calls them: by prompt lookup, which drafts the tokens that followed
    the text's last ones where these occurred before, and by `in_their_loop`, which drafts chains of `depth`."""
    found = dict[str, Generate]()
    if LOOKUP in names:
        for count in LOOKUP_LENGTHS:
            found[f"prompt lookup, {count} tokens"] = partial(target.generate, prompt_lookup_num_tokens=count)
    if LOOP in names:
        for label, drafter in drafters.items():
            name = f"{label} in transformers' assisted loop, {depth} deep"
            found[name] = partial(in_their_loop, target, drafter, depth)
    return found


def in_their_loop(target: Any, drafter: Eagle31DrafterModel, depth: int, ids: Tensor, **options: Any) -> Tensor:
    """Generates in the loop which transformers has for assistants, with chains that a drafter drafts through an
    `Eagle31CandidateGenerator`. Raises RuntimeError where the loop did not ask for it, as in a release that finds its
    assistant by another name."""
    made = Eagle31CandidateGenerator(drafter, target, depth, ids.shape[1] + options["max_new_tokens"])
    asked = list[dict[str, Any]]()

    def ours(**arguments: Any) -> Eagle31CandidateGenerator:
        asked.append(arguments)
        return made

    target._get_candidate_generator = ours
    try:
        with made:  # asked for prompt lookup, generate() enters the loop
            found: Tensor = target.generate(ids, prompt_lookup_num_tokens=depth, **options)
    finally:
        del target._get_candidate_generator
    if not asked:
        raise RuntimeError(
            "transformers' loop did not draft with the drafter: this release finds its assistant in another way;"
            " expected transformers 5.17 to 5.24, or no assisted-loop among the rivals."
        )
    return found
