"""A drafter for every family of targets is evaluated, for every third also trained a step, or refused in one sentence
before that. What a step does beyond an evaluation is no matter of the target's family."""

import sys
from pathlib import Path

import pytest
import torch
from training_runs import make_trainer

sys.path.append(str(Path(__file__).parents[1] / "generation"))

from families import FAMILIES, REFUSED, NotThereError, build_target

from eagle31_hf.cache_names import IS_RENAMED
from eagle31_hf.training.fresh import new_drafter

# A layer between the last state and the head, or, before transformers 5.24, logits of fewer tokens than the head gives.
NOT_TRAINED = {"ModernBERT decoder"} | (set() if IS_RENAMED else {"Inkling2"})
ROWS = [
    {"input_ids": [(5 * i + j) % 9 + 1 for j in range(16)], "answers": [j >= 6 for j in range(16)]} for i in range(4)
]


def target_of(name: str):
    for attention in ("sdpa", "eager"):
        try:
            return build_target(name, attention)
        except NotThereError as reason:
            said = str(reason)
    pytest.skip(said)


@pytest.mark.parametrize(("name", "is_trained"), [(name, i % 3 == 0) for i, name in enumerate(FAMILIES)])
def test_every_family_trains_or_says_why_not(tmp_path, name, is_trained):
    target = target_of(name)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    torch.manual_seed(0)
    drafter = new_drafter(target)
    options = {
        "target": target,
        "eval_dataset": ROWS[:1],
        "eval_prompts": 1,
        "eval_max_new_tokens": 3,
        "learning_rate": 1e-3,
        "depth": 2,
    }
    if name in NOT_TRAINED:
        with pytest.raises(ValueError, match="does not work with this architecture"):
            make_trainer(tmp_path, ROWS, drafter, **options)
        return
    first = {key: value.clone() for key, value in drafter.named_parameters()}
    trainer = make_trainer(tmp_path, ROWS, drafter, max_steps=1, **options)
    if is_trained:
        trainer.train()
        moved = [key for key, value in drafter.named_parameters() if not torch.equal(value, first[key])]
        assert len(moved) > len(first) / 2
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] > 0
    if FAMILIES[name].bug is None:
        assert ("eval_served_accepted_length" in metrics) == (FAMILIES[name].chain != REFUSED), (
            "generate() drafts where it can"
        )
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items()), (
        "the target is trained, too"
    )
