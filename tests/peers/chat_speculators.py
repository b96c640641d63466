"""speculators' drafter for a chat model, trained at its own defaults on the rows of `eagle31 train`: to compare the
drafter in `model_cards/SmolLM2-135M-Instruct-eagle31` with.

    python tests/peers/chat_speculators.py --target HuggingFaceTB/SmolLM2-135M-Instruct --output WORK [--steps 1800]
    eagle31 bench acceptance --target HuggingFaceTB/SmolLM2-135M-Instruct --drafter WORK/drafter ...

Runs where both libraries are installed (`speculators_fixtures.py` says how; it takes this library's requirements, too).
Its drafter, first weights, loss, collator, optimizers and schedule are its own, at the defaults of 0.9.0: EAGLE 3 with
one norm before fc, unrolled three steps, KL on answers alone, the target's head frozen, Muon at 0.001 with a decay of
0.1, a linear schedule, bf16 autocast. A step has as many rows as ours has. Its Trainer needs a GPU, so that the loop
is here, and attention is `sdpa` and the loss `eager`: flex attention has no backward pass on a CPU, and `fused` is
Triton. The target is run as rows are read; each row is a batch of its own, and gradients are added.

A run that was stopped goes on from WORK/state.pt, which is written every `--save-every` steps. 1,800 steps take about
three hours of a core.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import create_transformer_layer_config
from speculators.train.config.schema import DataArgs, DraftArgs, LossArgs, OptimizerArgs
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

from eagle31_hf.training.documents import texts_of
from eagle31_hf.training.packing import Collator, Example, PackedExamples
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.recipe import ExampleReader, draft_vocabulary
from eagle31_hf.training.target import TargetReader

DATA = Path(__file__).parents[2] / "examples" / "smollm2"
LENGTH, ROWS, HELD_OUT, VOCABULARY = 1024, 2, 64, 8000  # as the drafter of model_cards/ was trained
CLIP = 1.0  # of its Trainer


def new_model(name: str, ids: Tensor, vocab_size: int) -> Eagle3DraftModel:
    """Returns the drafter that speculators' command makes for the target `name`, which proposes the target's `ids`."""
    options, losses = DraftArgs(), LossArgs()
    layer = create_transformer_layer_config(
        name, 1, "llama", options.draft_hidden_act, options.sliding_window, options.full_attention_indices
    )
    is_proposed = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return Eagle3DraftModel.from_training_args(
        layer,
        t2d=is_proposed,
        d2t=ids - torch.arange(len(ids)),
        draft_vocab_size=len(ids),
        norm_before_residual=options.norm_before_residual,
        norm_before_fc=True,  # both: what None stands for where the drafter is an EAGLE 3 one
        norm_output=True,
        fc_norm=options.fc_norm,
        embed_requires_grad=options.embed_requires_grad,
        ttt_steps=losses.ttt_steps,
        verifier_name_or_path=name,
        draft_attn_impl="sdpa",
    )


def samples_of(row: list[Example], reader: TargetReader) -> list[dict[str, Tensor]]:
    """Returns the texts of a packed row as speculators' data set hands them out."""
    batch = Collator()([row])
    found = reader.read(batch["input_ids"], batch["documents"])
    samples = []
    for text in texts_of(batch["documents"]):
        at = slice(text.start, text.end)
        states, last = (part[0, at] for part in found)
        samples.append(
            {
                "input_ids": batch["input_ids"][0, at],
                "hidden_states": states,
                "verifier_last_hidden_states": last,
                "loss_mask": batch["answers"][0, at],
                "lengths": torch.tensor([text.length]),
                "position_ids": torch.arange(text.length),
            }
        )
    return samples


class Run:
    """A training run that can be stopped: model, optimizers and schedules, and how many steps are done."""

    def __init__(self, model: Eagle3DraftModel, steps: int, folder: Path):
        self.model, self.file, self.done, self.seconds = model, folder / "state.pt", 0, 0.0
        settings = OptimizerArgs()
        self.optimizers = build_optimizers(model, settings.model_copy(update={"muon_lr": settings.lr}))
        self.schedules = [get_linear_schedule_with_warmup(each, steps // 100, steps) for each in self.optimizers]
        self.parts = [model, *self.optimizers, *self.schedules]
        if self.file.exists():
            kept = torch.load(self.file)
            self.done, self.seconds = kept["done"], kept["seconds"]
            for part, state in zip(self.parts, kept["parts"], strict=True):
                part.load_state_dict(state)

    def save(self) -> None:
        partial = self.file.with_suffix(".partial")
        states = [part.state_dict() for part in self.parts]
        torch.save({"done": self.done, "seconds": self.seconds, "parts": states}, partial)
        os.replace(partial, self.file)

    def step(self, batches: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, float]:
        """Trains on the batches of a step, and returns its mean loss and accuracies by depth."""
        figures: dict[str, float] = {}
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, loss, found = self.model(**batch, **options)
            (loss / len(batches)).backward()
            for name in ("loss", *(f"full_acc_{depth}" for depth in range(options["ttt_steps"]))):
                share = float(found[f"{name}_sum"] / found[f"{name}_total"])
                figures[name] = figures.get(name, 0.0) + share / len(batches)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for part in (*self.optimizers, *self.schedules):
            part.step()
        self.model.zero_grad()
        self.done += 1
        return figures


def train(run: Run, rows: PackedExamples, reader: TargetReader, steps: int, save_every: int) -> None:
    losses, width = LossArgs(), run.model.hidden_size
    options = {
        "ttt_steps": losses.ttt_steps,
        "ttt_step_loss_decay": losses.ttt_step_loss_decay,
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }
    collate = CollateFn(LENGTH, width, dtype=getattr(torch, DataArgs().hidden_states_dtype), preprocess=shift_batch)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    if steps * ROWS > len(order):
        raise ValueError(f"--steps {steps} needs {steps * ROWS} rows; expected at most the {len(order)} there are.")
    while run.done < steps:
        began = time.process_time()
        chosen = order[run.done * ROWS : (run.done + 1) * ROWS]
        batches = [collate(samples_of(row, reader)) for row in rows.__getitems__(chosen)]
        figures = run.step(batches, options)
        run.seconds += time.process_time() - began
        if run.done % save_every == 0 or run.done == steps:
            run.save()
        if run.done % 20 == 0:
            print(json.dumps({"step": run.done, "seconds": round(run.seconds), **figures}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", default=str(DATA))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    options = PreparationOptions(max_length=LENGTH)
    data = ExampleReader(target, tokenizer, options, print, args.output).training_data(args.data, None, HELD_OUT)
    ids, _ = draft_vocabulary(target, tokenizer, data, VOCABULARY, print)
    torch.manual_seed(0)
    model = new_model(args.target, ids, target.config.vocab_size).float().train()
    reader = TargetReader(target, model.target_layer_ids)
    norm, model.verifier_norm = model.verifier_norm, torch.nn.Identity()  # the states that are read are normed
    train(Run(model, args.steps, args.output), PackedExamples(data.train, LENGTH), reader, args.steps, args.save_every)
    model.verifier_norm = norm
    model.save_pretrained(args.output / "drafter")


if __name__ == "__main__":
    main()
