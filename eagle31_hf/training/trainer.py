"""`Eagle31Trainer`: transformers' Trainer for a drafter beside its frozen target. K depths."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, SaveStrategy, SchedulerType
from transformers.utils import logging

from ..features import decoder_layers
from ..hub import CARD, render_card
from ..modeling import Eagle31DrafterModel
from .alignment import AlignmentReader
from .arguments import Eagle31TrainingArguments
from .divergence import DivergenceWatch
from .evaluation import EvalShare, Evaluation, served
from .kinds import check_ids, tokens_of
from .loss_mask import loss_denominators
from .objective import Batch, DraftingObjective, Sums
from .packing import Collator, PackedExamples
from .regenerate import stop_ids
from .saving import (
    check_finite,
    check_vocabulary,
    checkpoints,
    ended_state,
    last_checkpoint,
    remove_oldest,
    write_record,
)
from .target import StoredTarget, TargetReader, shard, stored_target

logger = logging.get_logger(__name__)
REFUSAL = "EAGLE drafting: "  # how generate() begins to say that it cannot
SEEN = 4  # rows that are looked at before anything begins


class Eagle31Trainer(Trainer):
    """Trains an `Eagle31DrafterModel`. Everything of `transformers.Trainer` works as there, but for what a target and
    its drafter change.

    `target`: the frozen model, any dtype, quantized or spread over devices; None where `train_dataset` is a
    `HiddenStateStore` with states. Datasets hold rows {"input_ids", "answers"}, see `packing`. Loss and figures are of
    all processes and accumulated batches together. Raises ValueError for a drafter, a target and data that do not
    belong together.
    """

    args: Eagle31TrainingArguments

    def __init__(
        self,
        model: Eagle31DrafterModel,
        args: Eagle31TrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        target: PreTrainedModel | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        data_collator: Any = None,
        **kwargs: Any,
    ):
        if not isinstance(model, Eagle31DrafterModel):
            raise ValueError(
                f"model is a {type(model).__name__}; expected the Eagle31DrafterModel to train, and the target as"
                " target=."
            )
        args._n_gpu = min(args.n_gpu, 1)  # several devices without a launcher are the target's
        self.target, self.reader = target, self._reader(model, target, args, train_dataset)
        freeze(model, args)
        if args.packing and hasattr(train_dataset, "__len__") and not isinstance(train_dataset, PackedExamples):
            train_dataset = PackedExamples(train_dataset, args.max_length)
        for rows in (train_dataset, eval_dataset):
            check_rows(rows, model.config.vocab_size)
        objective = DraftingObjective(model, args.settings(), self.reader.logits)
        super().__init__(
            model=objective,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            data_collator=data_collator or Collator(),
            **kwargs,
        )
        if isinstance(self.reader, StoredTarget):
            self.reader.to(args.device)
        self.facts: dict[str, Any] = {}  # about the data, written with every checkpoint
        self._sums: Tensor | None = None
        self._num_broken = torch.zeros((), device=args.device)
        self._watch = DivergenceWatch(self.accelerator, args)

    @staticmethod
    def _reader(
        drafter: Eagle31DrafterModel, target: PreTrainedModel | None, args: Eagle31TrainingArguments, rows: Any
    ):
        """What says what the target would: the target itself, or what a store has kept of it."""
        if target is None:
            if args.attention_alignment:
                raise ValueError(
                    "attention_alignment reads the target's attention, which a store does not hold; pass target=, or"
                    " leave it at 0."
                )
            return stored_target(drafter, rows)
        target.eval().requires_grad_(False)
        if args.shard_target:
            shard(target)
        reader = TargetReader(target, drafter.config.resolve_layer_ids(len(decoder_layers(target))), args.shard_target)
        if args.attention_alignment and reader.group is not None:
            raise ValueError(
                "attention_alignment reads all heads of the target's attention, which are spread over processes; leave"
                " it at 0, or load the target without tensor parallelism."
            )
        drafter.load_target_embeddings(reader.ends)
        return reader

    @property
    def drafter(self) -> Eagle31DrafterModel:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False).drafter

    # Training.

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """The batches of one optimizer step, and how many shares their losses are divided by at each depth (K,), over
        all processes."""
        if self._watch.is_due:
            self._watch.check_steps()
        samples = list(islice(epoch_iterator, num_batches))
        settings = self.args.settings()
        shares = [
            loss_denominators(
                batch["answers"], batch["documents"], settings.depth, settings.convention, settings.normalisation
            )
            for batch in samples
        ]
        totals = torch.stack(shares).sum(0) if shares else torch.zeros(settings.depth, dtype=torch.long)
        return samples, self.accelerator.reduce(totals.to(device), "sum")

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch: Tensor | None = None):
        """The loss of one batch; gradients of processes are averaged, so the sum over all of them is scaled by their
        number."""
        is_logged = (self.state.global_step + 1) % max(1, int(self.state.logging_steps or self.args.logging_steps)) == 0
        self.accelerator.unwrap_model(model, keep_torch_compile=False).watches = is_logged
        outputs = model(self.batch(inputs, aligns=self.args.attention_alignment > 0), totals=num_items_in_batch)
        self._sums = outputs["sums"] if self._sums is None else self._sums + outputs["sums"]
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
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

    def batch(self, inputs: dict[str, Tensor], aligns: bool = False) -> Batch:
        """A collated batch with the target's states: those of the store, or read now."""
        ids = inputs["input_ids"]
        answers = inputs["answers"]
        documents = inputs["documents"]
        alignment = watch = None
        if isinstance(self.reader, StoredTarget):
            return self._sound(Batch(ids, answers, documents, inputs["states"], inputs["last_states"]))
        if aligns:
            reader = AlignmentReader(
                self.reader.target, self.reader.layer_ids, self.args.depth, self.args.alignment_slots
            )
            alignment, watch = reader.choose(answers, documents, self.args.loss_mask), reader.watch
        states, last = self.reader.read(ids, documents, watch)
        return self._sound(Batch(ids, answers, documents, states, last, alignment))

    def _sound(self, batch: Batch) -> Batch:
        batch, count = batch.without_broken()
        self._num_broken += count
        return batch

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the figures of training since the last time, by depth: `accuracy_1` is of the first drafted token. Texts
        whose states the target gives as NaN or infinite are left out and counted."""
        if "loss" in logs and self._sums is not None:
            stacked = self.accelerator.reduce(self._sums, "sum")
            logs |= by_depth(Sums.means(stacked.cpu()))
            num_broken = int(self.accelerator.reduce(self._num_broken.clone(), "sum"))
            logs |= {"texts_with_broken_states": num_broken} if num_broken else {}
            self._sums = None
        super().log(logs, start_time)
        if "loss" in logs and self.is_in_train:
            # the Trainer subtracts it from itself, which of one that is not finite leaves NaN for ever
            self._tr_loss.zero_()
            self._watch.check_steps()
        if "train_loss" in logs:  # the end, before the best checkpoint takes the place of the last weights
            self._check_weights()

    def _check_weights(self) -> None:
        self._watch.check_weights(
            (weight for weight in self.model.parameters() if weight.requires_grad), self.state.global_step
        )

    # Evaluation.

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Each process its share of the rows; none is counted twice, and all run equally many batches."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.eval_dataset[rows] if isinstance(rows, str) else rows
        if rows is None or not hasattr(rows, "__len__"):
            raise ValueError(f"eval_dataset is a {type(rows).__name__}; expected rows with a length.")
        share: Dataset = EvalShare(rows, self.args.process_index, self.args.world_size)
        return DataLoader(
            share,
            self.args.eval_batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only=None,
        ignore_keys=None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Teacher-forced figures by depth, accepted length by walking the answers, and what generate() accepts after a
        few prompts."""
        if self.is_in_train:
            self._check_weights()
        model = self.model
        if not self.accelerator._models:
            model = self.accelerator.prepare_model(model, evaluation_mode=not self.is_fsdp_enabled)
            self.model = model if self.is_fsdp_enabled else self.model
        model.eval()
        self.accelerator.unwrap_model(model, keep_torch_compile=False).watches = True
        stops = stop_ids(self.reader if self.target is None else self.target, self.processing_class)
        evaluation = Evaluation(self.args.eval_settings(), self.drafter.draft_to_target_ids(), {*stops})
        with torch.no_grad():
            for inputs in dataloader:
                batch = self.batch(self._prepare_inputs(inputs))
                evaluation.add(batch, model(batch, settings=self.args.eval_settings()))
        metrics = evaluation.metrics(self.accelerator)
        share: Any = dataloader.dataset
        rows = share.examples
        if self.target is not None and not self.reader.in_step and not self.is_fsdp_enabled and self.args.eval_prompts:
            metrics |= self._served(rows, evaluation.settings.depth)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(rows))

    def _served(self, rows: Any, depth: int) -> dict[str, float]:
        """What generate() accepts; nothing for a target it cannot draft for, which another server may."""
        try:
            return served(
                self.target,
                self.drafter,
                rows,
                self.args.eval_prompts,
                depth,
                self.args.eval_max_new_tokens,
                self.accelerator,
            )
        except ValueError as error:
            if not str(error).startswith(REFUSAL):
                raise
            logger.warning_once(
                "there are no served_ figures, as generate() refuses to draft for this target: %s", error
            )
            return {}

    # Saving and loading.

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """As `Trainer.train`; `resume_from_checkpoint=True` takes the newest checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"{self.args.output_dir}: holds no complete checkpoint to resume from; train without resuming."
                )
        self._sums = None
        self._num_broken.zero_()
        self._watch = DivergenceWatch(self.accelerator, self.args)
        if resume_from_checkpoint in (None, False) and self.args.should_save:
            # an earlier run's, which says that it is finished
            Path(self.args.output_dir, TRAINER_STATE_NAME).unlink(missing_ok=True)
        output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        if self.args.save_strategy != SaveStrategy.NO:
            self.save_state()
        return output

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """A finished run stays finished where its last checkpoint is gone, and its best one is found where the folder
        was moved to."""
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
        """The Trainer's state, written last, says that a checkpoint is whole: that of an earlier run must not say it of
        this one.

        Weights that are not finite are never written; nor are those with which the loss is not, as a finite checkpoint
        would go for them.
        """
        self._check_weights()
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
        """With a limit of one checkpoint, the best one is what is kept."""
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
        """The limit on checkpoints, hidden from the Trainer, which would take folders such as checkpoint-best for old
        ones."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield limit
        finally:
            self.args.save_total_limit = limit

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # nor may it be written before every process has written its part

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The drafter in the native format, whole also where its training state is sharded."""
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
        self._note_training()
        write_record(folder, self.drafter, self.args.settings(), self.facts)
        self.drafter.save_pretrained(folder, state_dict=state_dict)
        self._write_card(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            self._write_card(Path(self.args.output_dir))

    def _write_card(self, folder: Path) -> None:
        config: Any = self.drafter.config
        card = render_card(config, self.drafter.card_facts, self.hub_model_id or folder.name)
        (folder / CARD).write_text(card, encoding="utf-8")

    def _note_training(self) -> None:
        """What the card will say."""
        args, facts = self.args, self.drafter.card_facts
        steps, batch = (
            self.state.global_step,
            self._train_batch_size * args.gradient_accumulation_steps * args.world_size,
        )
        facts.training |= {
            "Steps": f"{steps:,} of {batch} rows of up to {args.max_length:,} tokens",
            "Loss": f"{args.loss}, {args.depth} deep, normalised by {args.normalisation}, rows: {args.loss_mask}",
            "Optimizer": f"learning rate {args.learning_rate:g}, {SchedulerType(args.lr_scheduler_type).value}",
        }
        evaluated = next((entry for entry in reversed(self.state.log_history) if "eval_accepted_length" in entry), None)
        if evaluated is not None:
            facts.training["Accepted length"] = (
                f"{evaluated['eval_accepted_length']:.2f} a target forward, walking the answers held out,"
                f" {args.eval_settings().depth} deep"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        check_vocabulary(self.drafter, resume_from_checkpoint)
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, self.drafter)

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(self.state.best_model_checkpoint)


def freeze(drafter: Eagle31DrafterModel, args: Eagle31TrainingArguments) -> None:
    """Leaves trainable what `args` say; of a target's modules nothing ever is."""
    for module, is_trained in ((drafter.embed_tokens, args.train_embeddings), (drafter.lm_head, args.train_head)):
        if module is not None:
            module.requires_grad_(is_trained)


def check_rows(rows: Any, vocab_size: int) -> None:
    """Looks at a few rows. Raises ValueError for ids the target does not have."""
    if not hasattr(rows, "__len__") or isinstance(rows, dict):
        return
    for index in range(min(SEEN, len(rows))):
        item = rows[index]
        for row in item if isinstance(item, list) else [item]:
            check_ids(tokens_of(row).input_ids, vocab_size)


def by_depth(figures: dict[str, list[float]]) -> dict[str, float]:
    return {f"{name}_{k + 1}": round(value, 5) for name, values in figures.items() for k, value in enumerate(values)}
