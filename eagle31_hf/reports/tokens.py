"""A generation, token by token: which tokens were drafted and accepted, which the target added, and what it refused."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..acceptance import Round


def shown_round(found: Round, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns the round of the only sequence of a batch as plain values, ids as their texts: the `accepted` drafts, the
    `bonus` token (None where a draft ended the text), and all `drafts`, children below the token they follow, each with
    its `text`, its `depth` and whether it `is_accepted`."""
    [tokens], [drafts] = found.tokens, found.drafts
    count = found.num_accepted[0] or 0
    texts, shown = ([_text_of(token, tokenizer) for token in ids] for ids in (tokens, drafts))
    parents = [*range(len(drafts))] if found.parents is None else found.parents[0]
    return {
        "accepted": texts[:count],
        "bonus": texts[count] if len(tokens) > count else None,
        "drafts": [
            {"text": shown[node - 1], "depth": depth, "is_accepted": is_accepted}
            for node, depth, is_accepted in _in_order(drafts, parents, tokens[:count])
        ],
    }


def _text_of(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns what a token adds to a text: decoded alone, it may lack the space that it begins with."""
    once, twice = (str(tokenizer.decode([token] * count)) for count in (1, 2))
    return twice[len(once) :] or once


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
