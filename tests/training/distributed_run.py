"""The runs of test_distributed.py, which two processes do one after the other."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import PartialState
from packaging.version import Version
from torch.distributed.tensor import DTensor
from training_runs import (
    CHECKPOINTING,
    PLAIN,
    VOCAB,
    InterruptAfter,
    LostMachineError,
    make_examples,
    make_trainer,
    outcome,
    target,
)
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from eagle31_hf.targets.layers import decoder_layers
from eagle31_hf.training.output import check_output, once
from eagle31_hf.training.saving import TrainingDivergedError

# an odd number: with an example a process, in some step one process has no answers and the other has
EMPTY = (0, 2, 3, 7, 11)
EVALUATED = {
    "eval_rows": 5,
    "eval_strategy": "epoch",
    "per_device_eval_batch_size": 2,
    "eval_prompts": 3,
    "eval_max_new_tokens": 6,
}
ADAM = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "cosine", "load_best_model_at_end": True}
ADAM |= EVALUATED | {"eval_strategy": "steps", "eval_steps": 1, "eval_prompts": 0}
MUON = ADAM | {"matrix_learning_rate": 0.02}
ADAM |= {"matrix_learning_rate": None}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2}}
SHARDS = {"fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
RUNS: dict[str, dict[str, Any]] = {
    "token": PLAIN | EVALUATED,
    "sequence": PLAIN | {"normalisation": "sequence", "gradient_accumulation_steps": 2, "num_train_epochs": 2},
    "packed": PLAIN | {"packing": True, "per_device_train_batch_size": 1, "max_length": 24},
    "one_empty": PLAIN | {"empty": EMPTY, "per_device_train_batch_size": 1},
    "one_empty_by_sequence": PLAIN | {"empty": EMPTY, "per_device_train_batch_size": 1, "normalisation": "sequence"},
    "sharded_target": (
        PLAIN | EVALUATED | {"shard_target": True, "packing": True, "max_length": 40, "per_device_train_batch_size": 1}
    ),
    "target_loaded_in_parts": (
        PLAIN | EVALUATED | {"in_parts": True, "shard_target": True, "gradient_accumulation_steps": 2}
    ),
    "tensor_parallel_target": (PLAIN | EVALUATED | {"tensor_parallel": True, "gradient_accumulation_steps": 2}),
    "fsdp": FSDP | PLAIN | EVALUATED | {"gradient_accumulation_steps": 2},
    "fsdp_sharded_target": FSDP | PLAIN | {"shard_target": True},
    "fsdp_recomputed": FSDP | PLAIN | {CHECKPOINTING: True},
    "fsdp_bf16": FSDP | PLAIN | {"bf16": True},
    "fsdp_adam": FSDP | ADAM,
    "muon": MUON,
    "fsdp_muon_shards": FSDP | SHARDS | MUON,
}
# 5.17 cannot read an optimizer's state onto "cpu:0", as DDP on CPUs asks it to
OLD = Version(transformers.__version__) < Version("5.23")
RESUMED = [
    name
    for name in RUNS
    if name.rpartition("fsdp_")[2].startswith(("adam", "muon")) and not (OLD and "fsdp" not in name)
]
EVEN = {"vocab_size": VOCAB + 1}  # 5.17 splits nothing else
STOPPED_AT = 2  # of three steps


def trainer_of(folder: Path, name: str, processes: int = 2, **others: Any):
    """Returns the trainer of a run of RUNS; one process alone has the batch of both, and nothing sharded."""
    options = dict(RUNS[name])
    examples, count = make_examples(empty=options.pop("empty", ())), options.pop("eval_rows", 0)
    options |= others
    if options.pop("tensor_parallel", False):
        options["target"] = tensor_parallel_target(folder) if processes > 1 else target(**EVEN)
    if options.pop("in_parts", False) and processes > 1:
        options["target"] = spread_target(folder / "in-parts", target(), DistributedConfig(fsdp_size=processes))
    if processes == 1:
        options = {k: v for k, v in options.items() if k not in (*FSDP, "shard_target", CHECKPOINTING, "bf16")}
        options["per_device_train_batch_size"] = 2 * options.get("per_device_train_batch_size", 2)
    options |= {"eval_dataset": make_examples(count, seed=1)} if count else {}
    return make_trainer(folder, examples, **options)


def spread_target(folder: Path, whole, config: DistributedConfig):
    """A target, a part of every weight in each process."""
    if PartialState().is_main_process:
        whole.save_pretrained(folder)
    PartialState().wait_for_everyone()
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32).eval()


def tensor_parallel_target(folder: Path):
    return spread_target(folder / "target", target(**EVEN), DistributedConfig(tp_plan="auto"))


def begin(folder: Path, name: str) -> None:
    trainer_of(folder, name).train()


def main(folder: Path) -> None:
    for name in RUNS:
        trainer = trainer_of(folder / name, name)
        trainer.train()
        finish(trainer, folder / name)
    said = refused(folder / "refused") | stopped(folder / "stopped")
    (folder / f"refused-{PartialState().process_index}.json").write_text(json.dumps(said))
    for name in RESUMED:
        with suppress(LostMachineError):
            trainer_of(folder / f"{name}_resumed", name, callbacks=[InterruptAfter(STOPPED_AT)]).train()
        trainer = trainer_of(folder / f"{name}_resumed", name)
        trainer.train(resume_from_checkpoint=True)
        finish(trainer, folder / f"{name}_resumed")


def refused(folder: Path) -> dict[str, str]:
    """Returns the messages with which things are refused that cannot be done with a tensor-parallel target."""
    spread, said = tensor_parallel_target(folder), {}
    asked = {"shard_target": lambda: make_trainer(folder, target=spread, shard_target=True)}
    for name, ask in asked.items():
        try:
            ask()
        except ValueError as error:
            said[name] = str(error)
    return said


def stopped(folder: Path) -> dict[str, str]:
    """Returns the messages of errors that end a run in all processes at once."""
    said = {}
    for name in ("token", "fsdp"):
        try:
            trainer_of(folder / name, name, learning_rate=3e38, num_train_epochs=20, eval_strategy="no").train()
        except TrainingDivergedError as error:
            said[f"diverged_{name}"] = str(error)
    mine = folder / f"of-process-{PartialState().process_index}"  # only the first has a folder that is not empty
    if PartialState().is_main_process:
        (mine / "somebody").mkdir(parents=True)
    try:
        once(lambda: check_output(mine))
    except ValueError as error:
        said["output"] = str(error)
    return said


def finish(trainer, folder: Path) -> None:
    """Writes the model, and what every process saw."""
    if trainer.reader.in_lockstep:
        weights = [
            weight for layer in decoder_layers(trainer.target) for weight in layer.parameters() if weight.dim() > 1
        ]
        assert all(isinstance(weight, DTensor) for weight in weights), "the target stayed gathered"
    trainer.save_model(str(folder / "final"))
    torch.save(outcome(trainer).logs, folder / f"logs-{PartialState().process_index}.pt")
    PartialState().wait_for_everyone()
