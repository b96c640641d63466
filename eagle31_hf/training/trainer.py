"""`Eagle31Trainer`: transformers' Trainer for a drafter beside its frozen target. K depths."""

from collections.abc import Iterator
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import EvalLoopOutput, SaveStrategy
from transformers.utils import logging

from ..modeling import Eagle31DrafterModel, refuse_parallel
from ..quantized import refuse_quantized
from ..seeding import generator_of
from ..targets.layers import decoder_layers
from .answers import stop_ids
from .arguments import Eagle31TrainingArguments
from .checkpointing import CheckpointingTrainer
from .documents import position_skips
from .ends import TargetEnds
from .evaluation import Evaluation, TrainingFigures, served, share_of
from .images import image_ids, refuse_images
from .kinds import check_ids, tokens_of
from .loss_mask import loss_denominators
from .objective import Batch, DraftingObjective
from .packing import COLUMNS, Collator, Example, PackedExamples
from .read_ahead import States, StatesAhead, TrainingBatches
from .saving import CHECK_EVERY, changed_since, check_data, check_divergence, check_step, last_checkpoint
from .target import TargetReader, ends_behind, shard

logger = logging.get_logger(__name__)
CHECKED = 4  # items of a dataset that are looked at before anything begins


class Eagle31Trainer(CheckpointingTrainer):
    """Trains an `Eagle31DrafterModel`. Everything of `transformers.Trainer` works as there, but for what a target and
    its drafter change: `get_train_dataloader` and `get_batch_samples` read ahead, and count what losses are divided by,
    `training_step` counts FLOP, `compute_loss` reads the target, `get_eval_dataloader` and `evaluation_loop` measure
    acceptance, `log` adds figures; `train` and what `CheckpointingTrainer` overrides are about saving and resuming.

    `target`: the frozen model, any dtype, quantized or spread over devices; None where `train_dataset` is a
    `HiddenStateStore` with states, or `StreamedStates`. Datasets hold examples {"input_ids", "answers"}, see `packing`.
    Loss and figures are of all processes and accumulated batches together. Raises ValueError for a drafter, a target
    and data that do not belong together.
    """

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
        refuse_quantized(model, "trained")
        refuse_parallel(model, "trained")
        args._n_gpu = min(args.n_gpu, 1)  # several devices without a launcher are the target's
        self.target = target
        self.reader = source_of_states(model, target, args, train_dataset)
        self._image_ids = image_ids(getattr(self.reader, "ends", self.reader).config)
        # of the drafter's own tables those are trained that `args` say; the target's never are
        for table, is_trained in ((model.embed_tokens, args.train_embeddings), (model.lm_head, args.train_head)):
            if table is not None:
                table.requires_grad_(is_trained)
        if args.packing and hasattr(train_dataset, "__len__") and not isinstance(train_dataset, PackedExamples):
            train_dataset = PackedExamples(train_dataset, args.max_length)
        for dataset in (train_dataset, eval_dataset):
            check_examples(dataset, model.config.vocab_size)
        super().__init__(
            model=DraftingObjective(model, args.settings(), self.reader.logits),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            data_collator=data_collator or Collator(),
            **kwargs,
        )
        if isinstance(self.reader, TargetEnds):
            self.reader.to(args.device)
        self._figures, self._batches = TrainingFigures(args.device), TrainingBatches()

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """Trains as `Trainer.train`; `resume_from_checkpoint=True` takes the newest checkpoint that was written to its
        end. Raises ValueError where there is none, or its run began with other data than `facts` tell of, or with
        steps of another size; TrainingDivergedError where the run diverges."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"{self.args.output_dir}: holds no complete checkpoint to resume from; train without resuming."
                )
        if resume_from_checkpoint:
            check_data(resume_from_checkpoint, self.facts.get("data"))
            check_step(resume_from_checkpoint, self.args)
            was = changed_since(resume_from_checkpoint, self.learnt_by())
            if was:
                logger.warning("the run was begun with another loss, and goes on with what is asked for now: %s.", was)
        self._figures, self.saved_step = TrainingFigures(self.args.device), None
        try:
            output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            self._batches.close()
        if self.args.save_strategy != SaveStrategy.NO:
            self.save_state()
        return output

    def get_train_dataloader(self) -> DataLoader:
        return self._batches.without_moving(super().get_train_dataloader())

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        """Returns the batches of one optimizer step, see `as_trained`, and the denominators of their losses at each
        depth (K,), over all processes. What is drawn for them follows from the run's seed, the step and the process, so
        that nothing else that is drawn changes it."""
        if self.state.global_step % CHECK_EVERY == 0:
            check_divergence(self)
        began = monotonic()
        samples = self._batches.take(epoch_iterator, num_batches)
        self._figures.add_waiting(monotonic() - began)
        draws = generator_of(self.args.seed, self.state.global_step, self.args.process_index)
        how = self.args.train_prompts, self._image_ids, self.position_reach, draws
        samples = [as_trained(batch, *how) for batch in samples]
        for batch in samples:
            self._figures.begin(batch["documents"])
        if isinstance(self.reader, TargetReader) and self.reader.is_apart:
            ahead = StatesAhead(self._read_apart, samples)
            samples = [batch | {"ahead": ahead} for batch in samples]
        settings = self.args.settings()
        ways = (settings.depth, settings.convention, settings.normalisation)
        denominators = [loss_denominators(batch["answers"], batch["documents"], *ways) for batch in samples]
        totals = torch.stack(denominators).sum(0) if samples else torch.zeros(settings.depth, dtype=torch.long)
        return samples, self.accelerator.reduce(totals.to(device), "sum")

    def training_step(self, model, inputs, *args: Any, **kwargs: Any) -> Tensor:
        with self._figures.counting(inputs["documents"]):
            return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch: Tensor | None = None):
        """Returns the loss of one batch. Gradients of processes are averaged, so it is scaled by their number."""
        is_logged = (self.state.global_step + 1) % max(1, int(self.state.logging_steps or self.args.logging_steps)) == 0
        self.objective.watches = is_logged
        outputs = model(self.batch(inputs), totals=num_items_in_batch)
        self._figures.add(outputs["sums"])
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _read_apart(self, inputs: dict[str, Tensor]) -> States:
        """Returns the target's states of a batch, on the target's device."""
        reader: Any = self.reader
        refuse_images(inputs["input_ids"], self._image_ids)
        return reader.read(inputs["input_ids"].to(reader.device), inputs["documents"])

    def batch(self, inputs: dict[str, Any]) -> Batch:
        """Returns a collated batch with the target's states: those of the store, or read ahead, or now. Texts with
        states that are NaN or infinite are left out, and counted. Raises ValueError for images without states."""
        tokens = (inputs["input_ids"], inputs["answers"], inputs["documents"])
        if isinstance(self.reader, TargetEnds):
            states = inputs["states"], inputs["last_states"]
        elif "ahead" in inputs:
            states = inputs["ahead"].take(inputs["input_ids"].device)
        else:
            refuse_images(inputs["input_ids"], self._image_ids)
            states = self.reader.read(inputs["input_ids"], inputs["documents"])
        batch, num_broken = Batch(*tokens, *states, inputs.get("skips")).without_broken()
        if self.model.training:  # held-out texts are read at every evaluation
            self._figures.num_broken += num_broken
        return batch

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs, with the figures of training since the last log, see `TrainingFigures.take`, and the rate of matrices;
        at the end of a run looks for divergence."""
        if "loss" in logs:
            logs |= self._figures.take(self.accelerator)
        if "learning_rate" in logs and self.has_muon:
            logs["matrix_learning_rate"] = self._matrix_rate
        super().log(logs, start_time)
        if "loss" in logs and self.is_in_train:
            # the Trainer resets it by subtracting it from itself, and NaN less NaN stays NaN
            self._tr_loss.zero_()
        if "train_loss" in logs:  # the end, before the best checkpoint takes the place of the last weights
            check_divergence(self)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Gives each process its share of the examples; none is counted twice, and all run equally many batches."""
        examples: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        examples = self.eval_dataset[examples] if isinstance(examples, str) else examples
        if not hasattr(examples, "__len__") or not len(examples) or isinstance(examples[0], list):
            raise ValueError(
                f"eval_dataset is a {type(examples).__name__}; expected examples with a length, one at least, and not"
                " packed: each is evaluated by itself."
            )
        share = share_of(examples, self.args.process_index, self.args.world_size)
        workers = self.args.dataloader_num_workers
        return DataLoader(share, self.args.eval_batch_size, collate_fn=self.data_collator, num_workers=workers)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(
        self, dataloader: DataLoader, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Measures teacher-forced figures by depth, the accepted length by walking the answers, and what generate()
        accepts after a few prompts, unless there is no target here, or one that is spread over processes."""
        if self.is_in_train:
            check_divergence(self)
        model = self.model
        if not self.accelerator._models:
            model = self.accelerator.prepare_model(model, evaluation_mode=not self.is_fsdp_enabled)
            self.model = model if self.is_fsdp_enabled else self.model
        model.eval()
        self.settle_optimizer()
        self.objective.watches = True
        stops = stop_ids(self.reader if self.target is None else self.target, self.processing_class)
        evaluation = Evaluation(self.args.eval_settings(), self.drafter.draft_to_target_ids(), {*stops})
        with torch.no_grad():
            for inputs in dataloader:
                batch = self.batch(self._prepare_inputs(inputs))
                evaluation.add(batch, model(batch, settings=self.args.eval_settings()))
        examples = dataloader.dataset.examples  # type: ignore[attr-defined]
        found = evaluation.metrics(self.accelerator)
        cannot_serve = self.target is None or self.reader.in_lockstep or self.is_fsdp_enabled
        if self.args.eval_prompts and not cannot_serve:
            found |= served(self.target, self.drafter, examples, self.args, self.accelerator)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(examples))


def source_of_states(
    drafter: Eagle31DrafterModel, target: PreTrainedModel | None, args: Eagle31TrainingArguments, examples: Any
) -> TargetReader | TargetEnds:
    """Returns the source of the target's states and logits, or its ends alone, where the examples bring the states, and
    ties the drafter to it. The target is frozen, put into eval mode and, with `shard_target`, sharded in place. Raises
    ValueError for what the source cannot give."""
    if target is None:
        return ends_behind(drafter, examples)
    target.eval().requires_grad_(False)
    if args.shard_target:
        shard(target)
    layer_ids = drafter.config.resolve_layer_ids(len(decoder_layers(target)))
    reader = TargetReader(target, layer_ids, args.shard_target, learnt_on=args.device)
    drafter.load_target_embeddings(reader.ends)
    return reader


def as_trained(
    batch: dict[str, Tensor], all_tokens: bool, image_ids: Tensor, reach: int, draws: torch.Generator
) -> dict[str, Tensor]:
    """Returns a batch as it is trained on. `all_tokens`: all but those of images are marked as answers; `reach`: the
    farthest position that skipped positions spread a text to, 0 for none. Raises ValueError for a collator's batch that
    lacks a column."""
    missing = [name for name in COLUMNS if name not in batch]
    if missing:
        raise ValueError(
            f"a batch has {', '.join(sorted(batch)) or 'nothing'}, and no {', '.join(missing)}; expected a"
            f" data_collator that gives {', '.join(COLUMNS)}, as eagle31_hf.training.packing.Collator does."
        )
    if all_tokens:
        ids = batch["input_ids"]
        batch = batch | {"answers": (batch["documents"] > 0) & ~torch.isin(ids, image_ids.to(ids.device))}
    return batch | {"skips": position_skips(batch["documents"], reach, draws)} if reach else batch


def check_examples(dataset: Any, vocab_size: int) -> None:
    """Looks at the first examples of a dataset with a length. Raises ValueError for ids the target does not have."""
    if not hasattr(dataset, "__len__") or isinstance(dataset, dict):
        return
    for index in range(min(CHECKED, len(dataset))):
        item: Example | list[Example] = dataset[index]
        for example in item if isinstance(item, list) else [item]:
            check_ids(tokens_of(example).input_ids, vocab_size)
