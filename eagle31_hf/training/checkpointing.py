"""A Trainer whose runs can be resumed: whole checkpoints of a drafter, with finite weights, and none after a run has
diverged."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import logging

from .card import note_training, write_card
from .divergence import DivergenceWatch
from .optimizer import MuonTrainer, check_same
from .saving import (
    changed_since,
    check_finite,
    check_vocabulary,
    checkpoints,
    ended_state,
    last_checkpoint,
    remove_oldest,
    write_record,
)
from .spreading import reach_within

logger = logging.get_logger(__name__)


class CheckpointingTrainer(MuonTrainer):
    """A Trainer over a `DraftingObjective` that saves its drafter in the native format, resumes, and stops a run that
    diverges.

    `facts`: about the data, written into `training.json` with every checkpoint.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.facts: dict[str, Any] = {}
        self._watch = DivergenceWatch(self.accelerator, self.args)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """Trains as `Trainer.train`; `resume_from_checkpoint=True` takes the newest checkpoint that was written to its
        end. Raises ValueError where there is none."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"{self.args.output_dir}: holds no complete checkpoint to resume from; train without resuming."
                )
        self._watch = DivergenceWatch(self.accelerator, self.args)
        changes = changed_since(resume_from_checkpoint, self.learnt_by()) if resume_from_checkpoint else ""
        if changes:
            logger.warning("the run was begun with another loss, and goes on with what is asked for now: %s.", changes)
        if resume_from_checkpoint in (None, False) and self.args.should_save:
            # an earlier run's, which says that it is finished
            Path(self.args.output_dir, TRAINER_STATE_NAME).unlink(missing_ok=True)
        output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        if self.args.save_strategy != SaveStrategy.NO:
            self.save_state()
        return output

    @property
    def position_reach(self) -> int:
        """How far positions are spread: as far as `args` say, within what the drafter's rope bears."""
        return reach_within(self.drafter.config, self.args.position_reach, self.args.depth)

    def learnt_by(self) -> dict[str, Any]:
        """Returns what the loss of a run is made of, as `training.json` keeps it: the fields of `Settings`, and what is
        done to the batches."""
        batches = {"train_prompts": self.args.train_prompts, "position_reach": self.position_reach}
        return vars(self.args.settings()) | batches

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Takes the gradients of a batch, whose loss is watched."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._watch.add_loss(loss)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Called once in a step, before the weights change."""
        norm = super()._get_grad_norm(model, grad_norm)
        self._watch.end_step(self.state.global_step + 1, norm)
        return norm

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing where all steps are done: the Trainer itself only looks after a step, so a finished run would
        take one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs, and looks for divergence. Raises TrainingDivergedError where it finds one."""
        super().log(logs, start_time)
        if "loss" in logs and self.is_in_train:
            # the Trainer subtracts it from itself, which of one that is not finite leaves NaN for ever
            self._tr_loss.zero_()
            self._watch.check_steps()
        if "train_loss" in logs:  # the end, before the best checkpoint takes the place of the last weights
            self.check_weights()

    def check_weights(self) -> None:
        """Raises TrainingDivergedError where a trained weight is NaN or infinite."""
        trained = (weight for weight in self.model.parameters() if weight.requires_grad)
        self._watch.check_weights(trained, self.state.global_step)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """Leaves a finished run finished where its last checkpoint is gone, and finds its best one where the folder was
        moved to."""
        begun = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint).parent
            ended = ended_state(folder)
            if ended is not None and ended.global_step >= max_steps:
                self.state = ended
                self.state.init_training_references(self, max_steps, num_train_epochs, trial)
            best = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best.is_dir():  # spelled as the folder is now: what rotates checkpoints compares names
                self.state.best_model_checkpoint = str(best)
        return begun

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint. The Trainer's state, written last, says that it is whole: that of an earlier run must
        not say it of this one.

        Weights that are not finite are never written; nor are those with which the loss is not, as a finite checkpoint
        would go for them.
        """
        self.check_weights()
        if self._watch.last is not None and not math.isfinite(self._watch.last.loss):
            logger.warning("step %d: the loss is not finite; no checkpoint is written.", self.state.global_step)
            return
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        with self._no_rotation() as limit:
            super()._save_checkpoint(model, trial)
        if self.args.should_save:
            remove_oldest(self._get_output_dir(trial), limit, self.state.best_model_checkpoint)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """Ends the run; with a limit of one checkpoint, the best one is what is kept."""
        with self._no_rotation() as limit:
            output = super()._finalize_training(trial, num_train_samples, start_time)
        best = self.state.best_model_checkpoint
        if self.args.should_save and limit == 1 and best is not None:
            for path in checkpoints(self._get_output_dir(trial)):
                if not path.samefile(best):
                    shutil.rmtree(path, ignore_errors=True)
        return output

    @contextmanager
    def _no_rotation(self) -> Iterator[int | None]:
        """Hides the limit on checkpoints, which it yields, from the Trainer: that would take folders such as
        checkpoint-best for old ones."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield limit
        finally:
            self.args.save_total_limit = limit

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # nor may it be written before every process has written its part

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the drafter in the native format, whole also where its training state is sharded."""
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir, self.accelerator.get_state_dict(self.model))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        check_finite(folder, self.drafter.state_dict() if state_dict is None else state_dict)
        if state_dict is not None:
            state_dict = {name.removeprefix("drafter."): value for name, value in state_dict.items()}
        note_training(
            self.drafter.card_facts,
            self.args,
            self.state,
            self._train_batch_size,
            self.trained_by(),
            self.position_reach,
        )
        facts = self.facts | {"optimizer": self.optimizer_names}
        write_record(folder, self.drafter, self.learnt_by(), facts)
        self.drafter.save_pretrained(folder, state_dict=state_dict)
        write_card(folder, self.drafter, self.hub_model_id)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the drafter's own card, instead of the Trainer's."""
        if self.is_world_process_zero():
            write_card(Path(self.args.output_dir), self.drafter, self.hub_model_id)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        check_vocabulary(self.drafter, resume_from_checkpoint)
        check_same(resume_from_checkpoint, self.optimizer_names)
        super()._load_from_checkpoint(resume_from_checkpoint, model if self.is_fsdp_enabled else self.drafter)

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(self.state.best_model_checkpoint)
