"""Prompts as they should not be: what a drafter makes of them that it was not trained on. T tokens.

The renderings are those of "Attention Drift" (arXiv 2605.09992), with a foreign system prompt and noise.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..training.kinds import Chat
from .prompts import Renderer, Source

FOREIGN = "You are the captain of a trading vessel in the year 1720. Answer in rhyme, and never mention the weather."
NOISY_SHARE = 0.1  # of the tokens, replaced by random ones
Change = Callable[[Renderer, Source, Tensor, int], Tensor | None]  # makes other ids (T,) of a prompt and its number


def no_bos(renderer: Renderer, source: Source, ids: Tensor, number: int) -> Tensor | None:
    """Leaves out the token that begins every text; None where there is none."""
    return ids[1:] if len(ids) > 1 and ids[0] == renderer.tokenizer.bos_token_id else None


def no_template(renderer: Renderer, source: Source, ids: Tensor, number: int) -> Tensor | None:
    """Renders the words of a chat alone; None for what has no template."""
    has_template = source.chat is not None and renderer.tokenizer.chat_template is not None
    return renderer.plain(source.words) if has_template else None


def neither(renderer: Renderer, source: Source, ids: Tensor, number: int) -> Tensor | None:
    """Renders the words of a chat alone, without the token that begins a text."""
    bare = no_template(renderer, source, ids, number)
    return None if bare is None else no_bos(renderer, source, bare, number)


def foreign_system_prompt(renderer: Renderer, source: Source, ids: Tensor, number: int) -> Tensor | None:
    """Puts another system prompt in place of a chat's; in front of a text, its words."""
    if source.chat is not None and renderer.tokenizer.chat_template is not None:
        asked = [message for message in source.chat.messages if message["role"] not in ("system", "developer")]
        return renderer.templated(Chat([{"role": "system", "content": FOREIGN}, *asked], source.chat.tools))
    begins = int(ids[0] == renderer.tokenizer.bos_token_id)
    words = renderer.plain(f"{FOREIGN}\n\n", special=False)
    return torch.cat((ids[:begins], words, ids[begins:]))


def noise(renderer: Renderer, source: Source, ids: Tensor, number: int) -> Tensor | None:
    """Replaces NOISY_SHARE of the tokens after the first, the same ones for the same `number`."""
    generator = torch.Generator().manual_seed(number)
    hit = torch.rand(len(ids), generator=generator) < NOISY_SHARE
    hit[0] = False
    return torch.where(hit, torch.randint(renderer.vocab_size, (len(ids),), generator=generator), ids)


PERTURBATIONS: dict[str, Change] = {
    "no BOS": no_bos,
    "no template": no_template,
    "no template, no BOS": neither,
    "foreign system prompt": foreign_system_prompt,
    f"{NOISY_SHARE:.0%} of the tokens replaced": noise,
}
