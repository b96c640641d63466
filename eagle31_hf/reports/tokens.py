"""A generation, token by token: which tokens were drafted and accepted, which the target added, and what it refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..acceptance import Round
from .document import Generation, ShownDraft, ShownRound

PROMPT_END = 240  # characters of the prompt that are shown


def shown_round(found: Round, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns the round of the only sequence of a batch as plain values, ids as their texts."""
    [tokens], [drafts] = found.tokens, found.drafts
    count = found.num_accepted[0] or 0
    texts, shown = ([str(tokenizer.decode([token])) for token in ids] for ids in (tokens, drafts))
    parents = [*range(len(drafts))] if found.parents is None else found.parents[0]
    return {
        "accepted": texts[:count],
        "bonus": texts[count] if len(tokens) > count else None,
        "drafts": [
            [shown[node - 1], depth, is_accepted]
            for node, depth, is_accepted in _in_order(drafts, parents, tokens[:count])
        ],
    }


def _in_order(drafts: Sequence[int], parents: Sequence[int], accepted: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Returns node, depth and whether it was accepted of every draft, each followed by what was drafted after it."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents, 1):
        children.setdefault(parent, []).append(node)
    found = list[tuple[int, int, bool]]()
    left = [(node, 1, True) for node in reversed(children.get(0, []))]
    while left:
        node, depth, is_on_path = left.pop()
        is_accepted = is_on_path and depth <= len(accepted) and drafts[node - 1] == accepted[depth - 1]
        found.append((node, depth, is_accepted))
        left += [(child, depth + 1, is_accepted) for child in reversed(children.get(node, []))]
    return found


def generation_of(title: str, prompt: str, rounds: Sequence[Mapping[str, Any]]) -> Generation:
    """Makes a generation of the end of its prompt and of rounds as `shown_round` returns them."""
    shown = [
        ShownRound(found["accepted"], found["bonus"], [ShownDraft(*draft) for draft in found["drafts"]])
        for found in rounds
    ]
    return Generation(title, ("..." if len(prompt) > PROMPT_END else "") + prompt[-PROMPT_END:], shown)
