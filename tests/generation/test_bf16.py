"""In bf16 a text may depart from the target's own where rounding decides, and nowhere else."""

import pytest
import torch
from bf16 import LIMIT, check_family, ulp

from eagle31_hf.generation.rejection_sampler import LockStepSampler, RejectionSampler

INITIALIZER_RANGE = 0.02  # transformers' own; the target's margins then move by a few ulp at most, seldom by 2
SMALL = {"num_prompts": 4, "max_new_tokens": 12, "initializer_range": INITIALIZER_RANGE}
TEXTS = 2 * 4 * 2  # each prompt alone and in a batch, by chains and by trees


@pytest.mark.parametrize("name", ["Gemma3 text, window", "Mixtral"])
def test_departures_are_ties(name):
    tally = check_family(name, **SMALL)
    assert tally.failures == []
    assert tally.texts == TEXTS
    assert tally.same + len(tally.margins) == TEXTS
    assert tally.accepted > TEXTS  # else plain decoding would have been compared with itself


@pytest.mark.parametrize(
    ("kind", "name"), [(RejectionSampler, "Qwen3"), (LockStepSampler, "Falcon, alibi")], ids=["free", "lock_step"]
)
def test_a_wrong_verification_is_reported(monkeypatch, kind, name):
    """By margins of many ulp, though every token is the target's second best: a tie now and then cannot hide it."""
    original = kind.accept

    def second_best(self, sequences, drafts, logits, ends):
        if drafts.num_nodes > 1:  # the prompt's own token stays right
            logits.scatter_(-1, logits.argmax(-1, keepdim=True), float("-inf"))
        return original(self, sequences, drafts, logits, ends)

    monkeypatch.setattr(kind, "accept", second_best)
    tally = check_family(name, num_prompts=4, max_new_tokens=4, initializer_range=INITIALIZER_RANGE)
    touched = tally.texts if kind is RejectionSampler else tally.texts // 2  # only batches are decoded in lock-step
    assert tally.same == tally.texts - touched
    assert len(tally.failures) > touched / 2
    assert max(tally.margins) > 4 * LIMIT


@pytest.mark.parametrize("value", [0.0312, 1.0, 1.99, 2.0, 3.14, -100.0])
def test_ulp_is_the_next_number_of_bf16(value):
    x = torch.tensor(value).bfloat16().abs()
    assert ulp(x) == (torch.nextafter(x, torch.tensor(float("inf"), dtype=x.dtype)) - x).float()
