"""A Trainer whose runs can be resumed: whole checkpoints of a drafter and its optimizers, with finite weights, and none
after a run has diverged."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import logging

from ..modeling import Eagle31DrafterModel
from . import saving
from .arguments import Eagle31TrainingArguments
from .documents import reach_within
from .optimizer import MUON, check_same, with_muon

logger = logging.get_logger(__name__)


class CheckpointingTrainer(Trainer):
    """A Trainer over a `DraftingObjective` whose matrices Muon may train, which saves its drafter in the native format,
    resumes, and stops a run that diverges. It overrides, of transformers' Trainer:

    - `create_optimizer`, `_get_learning_rate`, `_load_optimizer_and_scheduler`: two optimizers with a rate each.
    - `_run_epoch`, `_init_training_state`: a run that is finished would take one more step, and a folder that was moved
      would lose its best checkpoint.
    - `_save_checkpoint`, `_save_rng_state`, `_finalize_training`: a checkpoint is finite, known to be whole by what is
      written last, and never taken for another's folder when old ones are removed.
    - `save_model`, `_save`, `_load_from_checkpoint`, `_load_best_model`, `create_model_card`: what is saved is the
      drafter alone, with its record and card.

    `facts`: about the data, written into `training.json` with every checkpoint. `optimizer_names`: what trains the
    matrices and the rest, as it is written there.
    """

    args: Eagle31TrainingArguments

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.facts: dict[str, Any] = {}
        self.saved_step: int | None = None  # of the best checkpoint, once its weights are loaded
        self._matrix_rate = 0.0
        # the class of an optimizer that the caller hands over, which then trains everything
        given = None if self.optimizer is None else type(self.optimizer)
        given = self.optimizer_cls_and_kwargs[0] if self.optimizer_cls_and_kwargs else given
        self.has_muon = given is None and self.args.matrix_learning_rate is not None
        rest = given.__name__ if given else str(getattr(self.args.optim, "value", self.args.optim))
        self.optimizer_names = {"matrices": MUON if self.has_muon else rest, "rest": rest}

    @property
    def objective(self) -> Any:
        """The drafter with its loss, out of what wraps it."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def drafter(self) -> Eagle31DrafterModel:
        return self.objective.drafter

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Makes Muon for the drafter's matrices, and what transformers makes for everything else; for all of it where
        there is no `matrix_learning_rate`, or the caller gave an optimizer."""
        make = super().create_optimizer
        if self.optimizer is None and self.has_muon:
            self.optimizer = with_muon(lambda: make(model), self.drafter, self.args, self.is_deepspeed_enabled)
        return make(model)

    def settle_optimizer(self) -> None:
        """Has an optimizer without a schedule set the weights that are to be used; a step sets them back."""
        settle = getattr(self.optimizer, "eval", None)
        if callable(settle):
            settle()

    def _get_learning_rate(self) -> float:
        """Returns the rate to log, and keeps that of matrices; called before the schedule changes them."""
        self._matrix_rate = self.optimizer.param_groups[-1]["lr"]
        return super()._get_learning_rate()

    def rates(self) -> tuple[float, float | None]:
        """Returns the peaks of the rates of the rest and of matrices: those a resumed run was begun with, or of
        `args`."""
        groups = self.optimizer.param_groups if self.optimizer is not None else [{}]
        # a scheduler of the caller's may be of a kind that keeps no peaks
        rate = groups[0].get("initial_lr", groups[0].get("lr", self.args.learning_rate))
        return rate, groups[-1].get("initial_lr", self.args.matrix_learning_rate) if self.has_muon else None

    def trained_by(self) -> str:
        """Returns what a card says of the optimizers and their rates."""
        rate, matrix_rate = self.rates()
        rest = f"{self.optimizer_names['rest']}, learning rate {rate:g}"
        return f"{MUON} for matrices, learning rate {matrix_rate:g}; {rest}" if self.has_muon else rest

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the states of a checkpoint, and with them the rates its run was begun with."""
        super()._load_optimizer_and_scheduler(checkpoint)
        asked = self.args.learning_rate, self.args.matrix_learning_rate if self.has_muon else None
        if checkpoint is not None and self.rates() != asked:
            logger.warning("a resumed run keeps its rates: %s. Those asked for now do not count.", self.trained_by())

    @property
    def position_reach(self) -> int:
        """The farthest position that texts are spread to: as `args` say, within what the drafter's rope bears."""
        return reach_within(self.drafter.config, self.args.position_reach, self.args.depth)

    def learnt_by(self) -> dict[str, Any]:
        """Returns what the loss of a run is made of, as `training.json` keeps it: the fields of `Settings`, and what is
        done to the batches."""
        batches = {"train_prompts": self.args.train_prompts, "position_reach": self.position_reach}
        return vars(self.args.settings()) | batches

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing where all steps are done: the Trainer itself only looks after a step, so a finished run would
        take one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """Finds a run's best checkpoint where the folder was moved to."""
        begun, checkpoint = super()._init_training_state(*args), args[3]
        if checkpoint is not None:
            best = Path(checkpoint).parent / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best.is_dir():  # spelled as the folder is now: what rotates checkpoints compares names
                self.state.best_model_checkpoint = str(best)
        return begun

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint. The Trainer's state, written last, says that it is whole: that of an earlier run must
        not say it of this one. Weights that are not finite are never written. Raises OSError naming a file that cannot
        be written, as on a full disk.
        """
        saving.check_divergence(self)
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        with saving.without_limit(self.args) as limit, saving.naming_unwritten(folder):
            super()._save_checkpoint(model, trial)
        if self.args.should_save:
            saving.remove_oldest(self._get_output_dir(trial), limit, self.state.best_model_checkpoint)

    def _finalize_training(self, trial: Any, *args: Any) -> Any:
        """Ends the run, and keeps its last checkpoint whatever the limit: a run is known by it to be finished. Where
        only better ones are saved, it is not yet."""
        last = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.save_strategy == SaveStrategy.BEST and not (last / TRAINER_STATE_NAME).is_file():
            self._save_checkpoint(self.model, trial)
        with saving.without_limit(self.args):
            return super()._finalize_training(trial, *args)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # nor may it be written before every process has written its part

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the drafter in the native format, whole also where its training state is sharded."""
        if self.is_fsdp_enabled:
            self._save(output_dir, self.accelerator.get_state_dict(self.model))
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        else:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        self.settle_optimizer()
        saving.check_finite(folder, self.drafter.state_dict() if state_dict is None else state_dict)
        if state_dict is not None:
            state_dict = {name.removeprefix("drafter."): value for name, value in state_dict.items()}
        saving.note_training(self)
        facts = self.facts | {"optimizer": self.optimizer_names, "step": saving.step_of(self.args)}
        saving.write_record(folder, self.drafter, self.learnt_by(), facts)
        self.drafter.save_pretrained(folder, state_dict=state_dict)
        saving.write_card(folder, self.drafter, self.hub_model_id)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the drafter's own card, instead of the Trainer's."""
        if self.is_world_process_zero():
            saving.write_card(Path(self.args.output_dir), self.drafter, self.hub_model_id)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        saving.check_drafter(self.drafter, resume_from_checkpoint)
        check_same(resume_from_checkpoint, self.optimizer_names)
        super()._load_from_checkpoint(resume_from_checkpoint, model if self.is_fsdp_enabled else self.drafter)

    def _load_best_model(self) -> None:
        self.settle_optimizer()  # later it would set the weights that are loaded
        if self.is_fsdp_enabled:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(self.state.best_model_checkpoint)
        self.saved_step = self.state.best_global_step
