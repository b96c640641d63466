"""`Eagle31Trainer`: transformers' Trainer for a drafter beside its frozen target. K depths."""

import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import EvalLoopOutput

from .. import vocab
from ..features import decoder_layers
from ..hub import CARD, render_card
from ..modeling import Eagle31DrafterModel
from .alignment import AlignmentReader
from .arguments import Eagle31TrainingArguments
from .evaluation import Evaluation, EvalShare, served
from .identity import digest
from .objective import Batch, DraftingObjective, Sums
from .packing import Collator, PackedRows
from .rows import total_shares
from .store import HiddenStateStore, load_target_parts
from .target import Scoring, StoredTarget, TargetReader, shard

logger = logging.getLogger(__name__)
RECORD = "training.json"


class Eagle31Trainer(Trainer):
    """Trains an `Eagle31DrafterModel`. Everything of `transformers.Trainer` works as there, but for what a target and its drafter change.

    `target`: the frozen model, any dtype, quantized or spread over devices; None where `train_dataset` is a `HiddenStateStore` with states.
    Datasets hold rows {"input_ids", "answers"}, see `packing`. Loss and figures are of all processes and accumulated batches together.
    Raises ValueError for a drafter, a target and data that do not belong together.
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
            raise ValueError(f"model is a {type(model).__name__}; expected the Eagle31DrafterModel to train, and the target as target=.")
        args._n_gpu = min(args.n_gpu, 1)  # several devices without a launcher are the target's
        self.target, self.reader = target, self._reader(model, target, args, train_dataset)
        freeze(model, args)
        if args.packing and train_dataset is not None and not isinstance(train_dataset, PackedRows):
            train_dataset = PackedRows(train_dataset, args.max_length)
        objective = DraftingObjective(model, args.settings(), self.reader.logits)
        super().__init__(
            model=objective, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, processing_class=processing_class,
            data_collator=data_collator or Collator(), **kwargs,
        )  # fmt: skip
        if isinstance(self.reader, StoredTarget):
            self.reader.to(args.device)
        self.facts: dict[str, Any] = {}  # about the data, written with every checkpoint
        self._sums: Tensor | None = None

    @staticmethod
    def _reader(drafter: Eagle31DrafterModel, target: PreTrainedModel | None, args: Eagle31TrainingArguments, rows: Any):
        """What says what the target would: the target itself, or what a store has kept of it."""
        if target is None:
            return stored_target(drafter, rows, args)
        target.eval().requires_grad_(False)
        drafter.load_target_embeddings(target)
        if args.shard_target:
            shard(target)
        return TargetReader(target, drafter.config.resolve_layer_ids(len(decoder_layers(target))), args.shard_target)

    @property
    def drafter(self) -> Eagle31DrafterModel:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False).drafter

    # Training.

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """The batches of one optimizer step, and how many shares their losses are divided by at each depth (K,), over all processes."""
        samples = list(islice(epoch_iterator, num_batches))
        settings = self.args.settings()
        shares = [
            total_shares(batch["answers"], batch["documents"], settings.depth, settings.convention, settings.normalisation)
            for batch in samples
        ]
        totals = torch.stack(shares).sum(0) if shares else torch.zeros(settings.depth, dtype=torch.long)
        return samples, self.accelerator.reduce(totals.to(device), "sum")

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch: Tensor | None = None):
        """Of one batch; gradients of processes are averaged, so the sum over all of them is scaled by their number."""
        is_logged = (self.state.global_step + 1) % max(1, int(self.state.logging_steps or self.args.logging_steps)) == 0
        self.accelerator.unwrap_model(model, keep_torch_compile=False).watches = is_logged
        outputs = model(self.batch(inputs, aligns=self.args.attention_alignment > 0), totals=num_items_in_batch)
        self._sums = outputs["sums"] if self._sums is None else self._sums + outputs["sums"]
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def batch(self, inputs: dict[str, Tensor], aligns: bool = False) -> Batch:
        """A collated batch with the target's states: those of the store, or read now."""
        ids, answers, documents = inputs["input_ids"], inputs["answers"], inputs["documents"]
        if isinstance(self.reader, StoredTarget):
            return Batch(ids, answers, documents, inputs["states"], inputs["last_states"])
        alignment = watch = None
        if aligns:
            reader = AlignmentReader(self.reader.target, self.reader.layer_ids, self.args.depth, self.args.alignment_slots)
            alignment, watch = reader.choose(answers, documents, self.args.loss_mask), reader.watch
        states, last = self.reader.read(ids, documents, watch)
        return Batch(ids, answers, documents, states, last, alignment)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the figures of training since the last time, by depth: `accuracy_1` is of the first drafted token."""
        if "loss" in logs and self._sums is not None:
            stacked = self.accelerator.reduce(self._sums, "sum")
            logs |= by_depth(Sums.means(stacked.cpu()))
            self._sums = None
        super().log(logs, start_time)

    # Evaluation.

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Each process its share of the rows; none is counted twice, and all run equally many batches."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.eval_dataset[rows] if isinstance(rows, str) else rows
        if rows is None or not hasattr(rows, "__len__"):
            raise ValueError(f"eval_dataset is a {type(rows).__name__}; expected rows with a length.")
        share: Dataset = EvalShare(rows, self.args.process_index, self.args.world_size)
        return DataLoader(share, self.args.eval_batch_size, collate_fn=self.data_collator, num_workers=self.args.dataloader_num_workers)

    def evaluation_loop(
        self, dataloader: DataLoader, description: str, prediction_loss_only=None, ignore_keys=None, metric_key_prefix: str = "eval"
    ) -> EvalLoopOutput:
        """Teacher-forced figures by depth, accepted length by walking the answers, and what generate() accepts after a few prompts."""
        model = self.model
        if not self.accelerator._models:
            model = self.accelerator.prepare_model(model, evaluation_mode=not self.is_fsdp_enabled)
            self.model = model if self.is_fsdp_enabled else self.model
        model.eval()
        self.accelerator.unwrap_model(model, keep_torch_compile=False).watches = True
        evaluation = Evaluation(self.args.eval_settings(), self.drafter.draft_to_target_ids(), self.stop_ids())
        with torch.no_grad():
            for inputs in dataloader:
                batch = self.batch(self._prepare_inputs(inputs))
                evaluation.add(batch, model(batch, settings=self.args.eval_settings()))
        metrics = evaluation.metrics(self.accelerator)
        rows = dataloader.dataset.rows
        if self.target is not None and not self.args.shard_target and not self.is_fsdp_enabled and self.args.eval_prompts:
            metrics |= served(
                self.target, self.drafter, rows, self.args.eval_prompts, evaluation.settings.depth, self.args.eval_max_new_tokens,
                self.accelerator,
            )  # fmt: skip
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(rows))

    def stop_ids(self) -> set[int]:
        """What ends a text of the target's."""
        owner: Any = self.target.generation_config if self.target is not None else self.processing_class
        ids = getattr(owner, "eos_token_id", None)
        return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)

    # Saving and loading.

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """As `Trainer.train`; `resume_from_checkpoint=True` takes the newest checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"{self.args.output_dir}: holds no complete checkpoint to resume from; train without resuming.")
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

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
        if state_dict is not None:
            state_dict = {name.removeprefix("drafter."): value for name, value in state_dict.items()}
        self._note_training()
        self.drafter.save_pretrained(folder, state_dict=state_dict)
        self._write_card(folder)
        record = {"draft_vocabulary": vocabulary_digest(self.drafter.d2t), "settings": self.args.settings().__dict__, **self.facts}
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            self._write_card(Path(self.args.output_dir))

    def _write_card(self, folder: Path) -> None:
        card = render_card(self.drafter.config, self.drafter.card_facts, self.hub_model_id or folder.name)
        (folder / CARD).write_text(card, encoding="utf-8")

    def _note_training(self) -> None:
        """What the card will say."""
        args, facts = self.args, self.drafter.card_facts
        steps, batch = self.state.global_step, self._train_batch_size * args.gradient_accumulation_steps * args.world_size
        facts.training |= {
            "Steps": f"{steps:,} of {batch} rows of up to {args.max_length:,} tokens",
            "Loss": f"{args.loss}, {args.depth} deep, normalised by {args.normalisation}, rows: {args.loss_mask}",
            "Optimizer": f"learning rate {args.learning_rate:g}, {args.lr_scheduler_type.value}",
        }
        evaluated = next((entry for entry in reversed(self.state.log_history) if "eval_accepted_length" in entry), None)
        if evaluated is not None:
            facts.training["Accepted length"] = (
                f"{evaluated['eval_accepted_length']:.2f} a target forward, walking the answers held out, {args.eval_settings().depth} deep"
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


def stored_target(drafter: Eagle31DrafterModel, rows: Any, args: Eagle31TrainingArguments) -> StoredTarget:
    """The head and embedding kept beside stored states. Raises ValueError where there are none, or they are not what the drafter reads."""
    store = rows.rows if isinstance(rows, PackedRows) else rows
    if not isinstance(store, HiddenStateStore) or store.manifest.layer_ids is None:
        raise ValueError(
            "there is neither a target nor a store with its states; pass target=, or data that prepare-data wrote with --states."
        )
    if args.attention_alignment:
        raise ValueError("attention_alignment reads the target's attention, which a store does not hold; pass target=, or leave it at 0.")
    store.check(layer_ids=drafter.config.aux_hidden_state_layer_ids)
    parts, scoring = load_target_parts(store.folder)
    kept = StoredTarget(parts, Scoring(**scoring))
    drafter._target_modules = (kept.embedding, kept.head)
    return kept


def by_depth(figures: dict[str, list[float]]) -> dict[str, float]:
    return {f"{name}_{k + 1}": round(value, 5) for name, values in figures.items() for k, value in enumerate(values)}


def vocabulary_digest(d2t: Tensor | None) -> str | None:
    return None if d2t is None else digest(repr(vocab.target_ids(d2t.cpu()).tolist()))


def check_vocabulary(drafter: Eagle31DrafterModel, checkpoint: str) -> None:
    """Raises ValueError where a checkpoint's head stands for other tokens than the drafter's: trained weights would be taken for others."""
    weights = Path(checkpoint, "model.safetensors")
    if not weights.exists():
        return
    with safe_open(weights, framework="pt") as file:
        theirs = file.get_tensor("d2t") if "d2t" in file.keys() else None  # noqa: SIM118 -- no mapping
    mine = None if drafter.d2t is None else vocab.target_ids(drafter.d2t.cpu())
    same = theirs is None if mine is None else theirs is not None and torch.equal(vocab.target_ids(theirs), mine)
    if not same:
        raise ValueError(
            f"{checkpoint}: its draft vocabulary ({vocabulary_digest(theirs)}) is not the drafter's ({vocabulary_digest(drafter.d2t)}); "
            "expected the same. Build the drafter with the vocabulary of the checkpoint to resume."
        )


def last_checkpoint(folder: str | Path) -> str | None:
    """The newest checkpoint that was written to its end: the Trainer's state, which is written last, can be read, and so can the weights."""

    def is_complete(path: Path) -> bool:
        try:
            json.loads((path / "trainer_state.json").read_text())
            load_file(path / "model.safetensors")
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("%s is left out: it was not written to its end (%s)", path, error)
            return False
        return True

    found = sorted(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    return next((str(path) for path in found if is_complete(path)), None)
