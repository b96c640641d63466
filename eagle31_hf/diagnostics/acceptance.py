"""Acceptance of a drafter, measured by decoding prompts with it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..acceptance import AcceptanceStats, track_acceptance
from ..modeling import Eagle31DrafterModel


def measure_acceptance(
    target: PreTrainedModel,
    drafter: Eagle31DrafterModel,
    prompts: Iterable[Tensor],
    drafting: int | Mapping[str, Any],
    max_new_tokens: int,
) -> AcceptanceStats:
    """Continues every prompt greedily and returns the counts of all of them together.

    `prompts`: token ids (B, T) without padding. `drafting`: tokens drafted a round, or arguments of `generate` by their
    names, as `num_assistant_tokens` and `draft_tree_top_k`; what they leave out is as `drafter.generation_config` has
    it. Raises ValueError for a target that cannot be drafted for.
    """
    settings = {"num_assistant_tokens": drafting} if isinstance(drafting, int) else drafting
    with track_acceptance() as stats:
        for prompt in prompts:
            target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                custom_generate=drafter.decode,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                **settings,
            )
    return stats


def counts_of(stats: AcceptanceStats) -> dict[str, Any]:
    """Returns the counts of several prompts' rounds as plain figures, which add up over prompts: `tokens` that the
    rounds gave, `rounds`, one for every sequence that a forward verified, and by depth how many tokens were `drafted`
    and `accepted`."""
    return {
        "tokens": stats.generated_tokens - stats.prefills,
        "rounds": len(stats.accepted_per_round),
        "drafted": stats.drafted_per_position,
        "accepted": stats.accepted_per_position,
    }


def chain_knobs(depth: int) -> dict[str, Any]:
    """Returns the arguments of `generate` for the drafter's chains of that depth, none ended earlier and none from the
    text, whatever the drafter's own."""
    chains = {"num_assistant_tokens": depth, "draft_tree_top_k": 1}
    return chains | {"assistant_confidence_threshold": 0.0, "prompt_lookup_num_tokens": 0}
