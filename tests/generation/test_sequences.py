"""The sequences of a batch as tensors are those that lists of their tokens would be."""

import random

import pytest
import torch

from eagle31_hf.cache.transfer import Commit
from eagle31_hf.generation.sequences import Sequences

CPU, PAD = torch.device("cpu"), 99
PROMPTS = [[4, 2, 7], [1, 5, 0], [3, 3, 3]]


def grown(sequences: Sequences, tokens: list[list[int]], finished: list[bool]) -> Commit:
    """Appends tokens, accepted at a chain's nodes."""
    commit = Commit(CPU, tokens, [list(range(len(new))) for new in tokens], finished)
    sequences.append(commit, finished)
    return commit


@pytest.mark.parametrize("keeps_step", [True, False], ids=["lock_step", "own_pace"])
def test_they_grow_as_lists_do(keeps_step):
    """Past every capacity they have held so far, some of them ended."""
    draw, texts, finished = random.Random(0), [list(prompt) for prompt in PROMPTS], [False] * 3
    sequences = Sequences(torch.tensor(PROMPTS), PAD)
    for step in range(120):
        count = draw.randint(0, 4)
        counts = [count if keeps_step else draw.randint(0, 4) * (not finished[b]) for b in range(3)]
        new = [[draw.randint(0, 9) for _ in range(count)] for count in counts]
        texts = [text + more for text, more in zip(texts, new, strict=True)]
        finished = [was or (b == 1 and step == 60) for b, was in enumerate(finished)]
        assert grown(sequences, new, finished) is sequences.commit
        longest = max(map(len, texts))
        assert (len(sequences), sequences.finished, sequences.prompt_length) == (3, finished, 3)
        assert sequences.lengths.host == sequences.lengths.on(CPU)[:, 0].tolist() == [len(text) for text in texts]
        assert sequences.longest == max(len(text) for text, ended in zip(texts, finished, strict=True) if not ended)
        assert [prefix.tolist() for prefix in sequences.prefixes()] == [[text] for text in texts]
        assert sequences.last().tolist() == [[text[-1]] for text in texts]
        assert sequences.padded().tolist() == [text + [PAD] * (longest - len(text)) for text in texts]
    assert longest > 200


def test_the_longest_of_all_where_none_goes_on():
    sequences = Sequences(torch.tensor(PROMPTS), PAD)
    grown(sequences, [[1], [1, 2, 3], []], [True] * 3)
    assert sequences.longest == 6


def test_the_prompt_is_not_written_to():
    prompt = torch.tensor(PROMPTS)
    grown(Sequences(prompt, PAD), [[8], [8, 8], [8]], [False] * 3)
    assert prompt.tolist() == PROMPTS


def test_a_commit_says_which_sequences_go_on():
    commit = Commit(CPU, [[5, 6], [7], []], [[0, 2], [0], []], [False, True, False])
    assert commit.ids.tolist() == [[5, 6], [7, 0], [0, 0]]
    assert commit.counts.host == commit.counts.on(CPU)[:, 0].tolist() == [2, 1, 0]
    assert commit.path.tolist() == [[0, 2], [0, 1], [0, 1]]
    assert (commit.going, commit.going_index.tolist(), commit.is_going.tolist()) == ([0, 2], [0, 2], [[1], [0], [1]])
    assert Commit(CPU, [[5, 6], [7], []], [[0, 1], [0], []], [False] * 3).path is None
