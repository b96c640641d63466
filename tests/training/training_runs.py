"""Tiny training runs: random examples, a random target of 61 ids and a drafter of it, and the outcome of a run."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts that import this are run by themselves

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from factories import VOCAB, build, target
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.training.arguments import Eagle31TrainingArguments
from eagle31_hf.training.trainer import Eagle31Trainer

torch.set_num_threads(1)

ROWS = 12
ARGUMENTS = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "learning_rate": 0.02,
    "num_train_epochs": 1,
    "depth": 3,
    "max_length": 64,
    "packing": False,
    "eval_prompts": 0,
    "per_device_train_batch_size": 2,
    # every figure is then a function of answers and places alone
    "train_prompts": False,
    "position_reach": 0,
}
# A gradient that is off by a factor is no other step for Adam, nor for one that is clipped.
PLAIN = {"optim": "sgd", "max_grad_norm": 0.0, "matrix_learning_rate": None}
# A run with a checkpoint after each step, of which a resumed run has as much to find as it can.
MUCH_TO_RESUME = {
    "save_strategy": "steps",
    "save_steps": 1,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "lr_scheduler_type": "cosine",
    "eval_strategy": "steps",
    "eval_steps": 2,
}
CHECKPOINTING = next(
    f.name for f in fields(TrainingArguments) if f.name in ("activation_checkpointing", "gradient_checkpointing")
)


def make_examples(count: int = ROWS, seed: int = 0, empty: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Makes examples of 8 to 24 tokens, answers of 2 to all but 2 of them; those at `empty` have none."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda least, most: int(torch.randint(least, most + 1, (), generator=generator))  # noqa: E731
    examples = []
    for index in range(count):
        length = draw(8, 24)
        begin = length if index in empty else draw(2, length - 2)
        ids = torch.randint(VOCAB, (length,), generator=generator).tolist()
        examples.append({"input_ids": ids, "answers": [at >= begin for at in range(length)]})
    return examples


def make_trainer(
    folder: Any, examples: Any = None, drafter: Eagle31DrafterModel | None = None, **options: Any
) -> Eagle31Trainer:
    """Makes a trainer; of `options` those of Eagle31Trainer go by their names, all others are arguments."""
    given = {
        name: options.pop(name)
        for name in ("eval_dataset", "processing_class", "callbacks", "optimizers")
        if name in options
    }
    given |= {"target": options.pop("target") if "target" in options else target()}
    arguments = Eagle31TrainingArguments(output_dir=str(folder), **ARGUMENTS | options)
    # accelerate shards on accelerators, and on a CPU silently does not; what it calls in torch runs on both
    if arguments.fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Eagle31Trainer(drafter or build(), arguments, make_examples() if examples is None else examples, **given)


class LostMachineError(Exception):
    pass


class InterruptAfter(TrainerCallback):
    """Ends a run once the checkpoint of a step is written, as a lost machine would."""

    def __init__(self, step: int):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise LostMachineError


class Run(NamedTuple):
    """The outcome of a run; logs without what depends on the clock."""

    weights: dict[str, Tensor]
    logs: list[dict[str, float]]
    optimizer: list[Tensor]

    @property
    def losses(self) -> Tensor:
        return torch.tensor([entry["loss"] for entry in self.logs if "loss" in entry])


def run(trainer: Eagle31Trainer, resume: bool | str | None = None) -> Run:
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def outcome(trainer: Eagle31Trainer) -> Run:
    logs = [
        {
            name: value
            for name, value in entry.items()
            if not name.endswith(("_runtime", "_per_second", "total_flos", "train_loss", "waiting_for_data", "tflops"))
        }
        for entry in trainer.state.log_history
    ]
    weights = {name: value.detach().clone() for name, value in trainer.drafter.state_dict().items()}
    moments = [
        value
        for state in trainer.optimizer.state_dict()["state"].values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    return Run(weights, logs, moments)
