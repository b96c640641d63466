"""Batches for the tests: prompts of different lengths, what the target alone makes of them, and how they went along."""

import torch
from conftest import VOCAB, greedy_text
from observers import speculate
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from eagle31_hf import AcceptanceStats, Eagle31DrafterModel

PAD = 6  # a token of its own right, so that padding that is not hidden changes the text
FOREIGN = ([4], [9, 0, 7, 7, 1, 2, 2], [3, 3])  # prompts no drafter knows anything about


def left_padded(prompts: list[list[int]], pad: int = PAD) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask (B, L)."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[pad] * (longest - len(ids)) + list(ids) for ids in prompts])
    return padded, torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])


def known_prompts(target: PreTrainedModel, *lengths: int) -> list[list[int]]:
    """Beginnings of the text the drafters know."""
    return [greedy_text(target)[0, :length].tolist() for length in lengths]


def mixed_prompts(target: PreTrainedModel) -> list[list[int]]:
    """Five prompts of different lengths: the longest but one is foreign to the drafters, and one is a single token."""
    return [*known_prompts(target, 5, 9), FOREIGN[0], *known_prompts(target, 11), FOREIGN[1]]


def alone(target: PreTrainedModel, prompts: list[list[int]], **kwargs):
    """The output of plain generate for a batch of prompts."""
    ids, mask = left_padded(prompts)
    return target.generate(ids, attention_mask=mask, **{"pad_token_id": PAD, "do_sample": False} | kwargs)


def together(target: PreTrainedModel, drafter: Eagle31DrafterModel, prompts: list[list[int]], pad: int = PAD, **kwargs):
    """The output of generate with the drafter, and the statistics. `pad`: the token before a shorter prompt."""
    ids, mask = left_padded(prompts, pad)
    return speculate(target, drafter, ids, attention_mask=mask, **{"pad_token_id": PAD, "do_sample": False} | kwargs)


def keeps_step(stats: AcceptanceStats) -> bool:
    """Whether every round of drafting committed as many tokens to every sequence as to the others."""
    rounds = [one.accepted_per_round for one in stats.sequences]
    return all(len({counts[i] for counts in rounds if i < len(counts)}) == 1 for i in range(max(map(len, rounds))))


class Idle(StoppingCriteria):
    """Never stops, and is no criterion the library knows: sequences keep step. Notes all texts it is shown."""

    def __init__(self):
        self.texts: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        self.texts.append(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Notebook(LogitsProcessor):
    """Keeps state, as a grammar does: its favourites depend on how often it was called. Notes all texts it is shown."""

    def __init__(self, vocab_size: int = VOCAB, strength: float = 3.0):
        self.texts: list[list[list[int]]] = []
        self.favours = strength * torch.randn(128, vocab_size, generator=torch.Generator().manual_seed(0))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.texts.append(input_ids.tolist())
        return scores + self.favours[len(self.texts)]
