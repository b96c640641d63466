"""Training that diverges stops, says so, and leaves only finite weights behind."""

import math

import pytest
import torch
from accelerate.state import AcceleratorState
from factories import build
from safetensors.torch import load_file
from training_runs import make_examples, make_trainer
from transformers import TrainerCallback

from eagle31_hf.training.saving import CHECK_EVERY, LEAST_SCALE, TrainingDivergedError, check_divergence, num_not_finite

LONG = {"num_train_epochs": 50, "max_grad_norm": 0.0, "matrix_learning_rate": None}
SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
BREAKS_AT = 4


class Break(TrainerCallback):
    """Sets, from step BREAKS_AT on, a learning rate with which no weight stays finite."""

    def __init__(self):
        self.steps = 0

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self.steps = state.global_step + 1
        for group in optimizer.param_groups if self.steps >= BREAKS_AT else ():
            group["lr"] = 3e38


def diverged(folder, **options):
    """A run that breaks at a step: the trainer, the steps it took, and the error."""
    breaks = Break()
    trainer = make_trainer(folder, callbacks=[breaks], **LONG | options)
    with pytest.raises(TrainingDivergedError) as caught:
        trainer.train()
    return trainer, breaks.steps, str(caught.value)


def assert_finite_checkpoints(folder, expected: list[str]):
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == expected
    for name in expected:
        weights = load_file(folder / name / "model.safetensors")
        assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.parametrize("options", [{"logging_steps": 1}, {"logging_steps": 500}, {"logging_strategy": "no"}], ids=str)
def test_it_stops_within_some_steps(tmp_path, options):
    _, steps, said = diverged(tmp_path, **options)
    assert steps == CHECK_EVERY
    assert said == (
        f"weights are not finite after step {CHECK_EVERY}. Training has diverged and was stopped; no checkpoint was"
        " written before. To go on, begin anew with lower rates, with max_grad_norm=1, or with bf16 instead of fp16."
    )


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_last_finite_checkpoint_is_kept(tmp_path, evaluates):
    options = SAVING | ({"eval_dataset": make_examples(3, seed=1), "save_steps": 2} | EVALUATING if evaluates else {})
    _, steps, said = diverged(tmp_path, **options)
    assert steps == BREAKS_AT, "weights that are not finite are found where they would be saved or evaluated"
    kept = "checkpoint-2" if evaluates else "checkpoint-3"
    assert_finite_checkpoints(tmp_path, [kept])
    assert f"weights are not finite after step {BREAKS_AT}" in said
    assert f"the last checkpoint with finite weights is {tmp_path / kept}" in said
    assert "train its drafter on in a new run (eagle31 train --drafter)" in said


@pytest.mark.parametrize(
    "options", [{}, EVALUATING | SAVING | {"save_steps": 2, "save_total_limit": None}], ids=["last", "best"]
)
def test_a_run_that_diverges_at_its_very_end_is_no_success(tmp_path, options):
    """Also where an earlier checkpoint would be loaded as the best."""
    options = options | ({"eval_dataset": make_examples(3, seed=1)} if options else {})
    _, _, said = diverged(tmp_path, max_steps=BREAKS_AT + 1, **options)
    assert "weights are not finite after step" in said
    assert not (tmp_path / "model.safetensors").exists()


def test_the_loss_is_shown_as_it_is(tmp_path):
    trainer, _, _ = diverged(tmp_path, logging_steps=1)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [math.isfinite(loss) for loss in losses[: BREAKS_AT + 1]] == [True] * BREAKS_AT + [False]


class Spoil(TrainerCallback):
    """Makes the loss of some steps NaN, by the drafter's own embedding, which is not trained."""

    def __init__(self, drafter, steps: range):
        self.weight, self.steps = drafter.embed_tokens.weight.data, steps
        self.whole = self.weight.clone()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 in self.steps:
            self.weight.fill_(float("nan"))

    def on_step_end(self, args, state, control, **kwargs):
        self.weight.copy_(self.whole)


@pytest.fixture
def scaled_trainer(tmp_path, monkeypatch):
    """`scaled_trainer(init_scale, **options)`: a run in fp16, which skips a step that overflows and halves its scale.

    accelerate offers it on accelerators only, but torch on CPUs too.
    """
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")

    def make(init_scale: float, **options):
        trainer = make_trainer(tmp_path, **LONG | {"max_grad_norm": 1.0} | options)
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"  # the Trainer has set it
        trainer.accelerator.native_amp, trainer.accelerator.scaler = (
            True,
            torch.amp.GradScaler("cpu", init_scale=init_scale),
        )
        return trainer

    return make


def test_a_scale_that_is_still_to_be_found_is_no_divergence(scaled_trainer):
    """Gradients of the first steps overflow, and their steps are skipped."""
    trainer = scaled_trainer(2.0**24, max_steps=20)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    num_broken = sum(not math.isfinite(norm) for norm in norms)
    assert 5 <= num_broken < 20
    assert trainer.accelerator.scaler.get_scale() == 2.0 ** (24 - num_broken)


def test_a_step_that_overflows_changes_no_weight(scaled_trainer):
    """Neither AdamW's nor Muon's."""
    drafter = build()
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    trainer = scaled_trainer(2.0**60, drafter=drafter, max_steps=1, matrix_learning_rate=0.03)
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 2.0**59
    assert all(torch.equal(weight, before[name]) for name, weight in drafter.state_dict().items())


def test_a_loss_that_no_scale_mends_is(scaled_trainer, tmp_path):
    """All steps are skipped: the checkpoints that are written meanwhile hold the weights of the last sound step."""
    drafter = build()
    options = {"callbacks": [Spoil(drafter, range(4, 99))], **SAVING, "save_total_limit": None}
    trainer = scaled_trainer(LEAST_SCALE * 2**9, drafter=drafter, **options)
    with pytest.raises(
        TrainingDivergedError, match=r"weights or gradients are not finite after step 13\..* is .*checkpoint-12\. To go"
    ):
        trainer.train()
    assert_finite_checkpoints(tmp_path, sorted(f"checkpoint-{step}" for step in range(1, 13)))
    sound, last = (load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (3, 12))
    assert all(torch.equal(weight, last[name]) for name, weight in sound.items())


def test_some_steps_that_are_skipped_are_forgotten(scaled_trainer):
    drafter = build()
    trainer = scaled_trainer(1.0, drafter=drafter, callbacks=[Spoil(drafter, range(4, 7))], max_steps=8)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [math.isfinite(loss) for loss in losses] == [True] * 3 + [False] * 3 + [True] * 2


def test_weights_that_a_dtype_cannot_hold_are_not_written(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.drafter.lm_head.weight.data[0, 0] = 1e6
    trainer.drafter.half()
    with pytest.raises(
        RuntimeError,
        match=r"lm_head.weight holds NaN or infinity as torch.float16; expected finite weights, and wrote none",
    ):
        trainer.save_model()
    assert not [*tmp_path.iterdir()]


def test_weights_broken_before_the_first_step(tmp_path):
    """Folders that are no checkpoints do not get in the way."""
    (tmp_path / "checkpoint-best").mkdir()
    trainer = make_trainer(tmp_path)
    trainer.drafter.norm.weight.data[0] = float("nan")
    with pytest.raises(
        TrainingDivergedError,
        match=r"^weights are not finite after step 0\. Training .* no checkpoint was written before",
    ):
        check_divergence(trainer)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_is_enough(value):
    weights = [torch.zeros(3, 4), torch.zeros(0), torch.zeros(2, dtype=torch.long), torch.zeros(5).bfloat16()]
    assert int(num_not_finite(weights)) == 0
    weights[0][2, 1] = weights[3][4] = value
    assert int(num_not_finite(weights)) == 2
