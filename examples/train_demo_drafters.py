"""Train the demo's EAGLE 3.1 and EAGLE 3 drafters side by side: same target, data, order, steps, settings and seed.

    python examples/train_demo_drafters.py --target eagle31_hf/demo/target --output first
    python examples/train_demo_drafters.py --target eagle31_hf/demo/target --output eagle31_hf/demo \
        --start-from first --seed 1

About 25 minutes each on 2 CPU cores. Half of the texts are the target's own greedy continuations of training text (what
it will be asked to speed up), half are the training text itself. Writes OUTPUT/eagle31 and OUTPUT/eagle3 (bfloat16),
each with a `training.json`.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from train import SHAPE
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf.demo.corpus import training_files
from eagle31_hf.modeling import Eagle31DrafterModel
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.objective import Batch, DraftingObjective, Settings, Sums
from eagle31_hf.training.target import TargetReader

LENGTH = 256
PROMPT = 64
BATCH = 8
DEPTH = 5
TOTALS = ("rows", "rows_continued_by_target", "steps", "tokens_trained", "minutes_both")  # of training.json
FLAGS = {"eagle31": {"fc_norm": True, "norm_output": True}, "eagle3": {"fc_norm": False, "norm_output": False}}


def draw_texts(tokenizer, count: int) -> Tensor:
    """Returns windows (count, LENGTH) drawn at random from the training files."""
    ids = torch.tensor(
        [i for text in training_files() for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    )
    starts = torch.randint(0, len(ids) - LENGTH, (count,))
    return torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])


@torch.no_grad()
def continued(target, prompts: Tensor, batch: int = 128) -> Tensor:
    """Returns prompts (N, PROMPT) with the target's greedy continuations: (N, LENGTH)."""
    length = {"max_new_tokens": LENGTH - PROMPT, "eos_token_id": None, "do_sample": False}
    texts = []
    for chunk in prompts.split(batch):
        texts.append(target.generate(input_ids=chunk, attention_mask=torch.ones_like(chunk), **length))
        print(f"generated {sum(map(len, texts))} of {len(prompts)} texts", flush=True)
    return torch.cat(texts)


def learning_rate(progress: float, peak: float = 2e-3, warmup: float = 0.03) -> float:
    if progress < warmup:
        return peak * progress / warmup
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))))


def training_texts(target, tokenizer, count: int, cache: Path | None) -> Tensor:
    """Returns texts (2 * count, LENGTH): as many of the files as continued by the target, which `cache` keeps."""
    texts = draw_texts(tokenizer, 2 * count)
    if cache and cache.exists():
        answers = torch.load(cache, weights_only=True)
    else:
        answers = continued(target, texts[count:, :PROMPT])
    if cache:
        torch.save(answers, cache)
    return torch.cat([texts[:count], answers])


class Run:
    """One drafter in training. `figures` (3, DEPTH): running means of KL, accuracy and acceptance."""

    def __init__(self, drafter: Eagle31DrafterModel, reader: TargetReader):
        self.drafter = drafter
        settings = Settings(DEPTH, tuple(0.8**k for k in range(DEPTH)))
        self.objective = DraftingObjective(drafter, settings, reader.logits)
        self.optimizer = torch.optim.AdamW(drafter.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        self.figures: Tensor | None = None

    def step(self, batch: Batch, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        result = self.objective(batch)
        result["loss"].backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        means = Sums.means(result["sums"])
        figures = torch.tensor([means["distance"], means["accuracy"], means["acceptance"]])
        self.figures = figures if self.figures is None else 0.98 * self.figures + 0.02 * figures


def start(target, start_from: Path | None) -> tuple[dict[str, Eagle31DrafterModel], dict[str, dict]]:
    """Returns the drafters to train, new or as an earlier run left them, and what that run wrote down of each."""
    drafters = {name: new_drafter(target, target_model="demo target", **SHAPE | flags) for name, flags in FLAGS.items()}
    earlier: dict[str, dict] = {name: {} for name in FLAGS}
    for name, drafter in drafters.items() if start_from else ():
        saved = Eagle31DrafterModel.from_pretrained(start_from / name, dtype=torch.float32)
        drafter.load_state_dict(saved.state_dict())
        earlier[name] = json.loads((start_from / name / "training.json").read_text())
    return drafters, earlier


def draw_batches(num_texts: int, epochs: int) -> Tensor:
    """Returns the indices of the texts of every batch, (steps, BATCH)."""
    order = torch.cat([torch.randperm(num_texts) for _ in range(epochs)])
    return order[: len(order) // BATCH * BATCH].view(-1, BATCH)


def train(runs: dict[str, Run], reader: TargetReader, texts: Tensor, batches: Tensor, minutes: float) -> dict:
    """Trains all drafters on the same batches, for at most so many minutes; returns what is worth writing down."""
    began, num_steps = time.time(), 0
    for step, indices in enumerate(batches):
        progress = max(step / len(batches), (time.time() - began) / (60 * minutes))
        if progress >= 1:
            break
        ids = texts[indices]
        all_of_it, one_text = torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids)
        batch = Batch(ids, all_of_it, one_text, *reader.read(ids, one_text))
        for run in runs.values():
            run.step(batch, learning_rate(progress))
        num_steps = step + 1
        if step % 25 == 0:
            accuracy = {name: [round(v, 2) for v in run.figures[1].tolist()] for name, run in runs.items()}
            print(f"step {step}/{len(batches)} {accuracy} {(time.time() - began) / 60:.1f} min", flush=True)
    return {
        "python": sys.version.split()[0],
        "rows": len(texts),
        "rows_continued_by_target": len(texts) // 2,
        "row_length": LENGTH,
        "steps": num_steps,
        "tokens_trained": num_steps * BATCH * LENGTH,
        "depth": DEPTH,
        "minutes_both": round((time.time() - began) / 60, 1),
    }


def save(folder: Path, run: Run, facts: dict, earlier: dict) -> None:
    """Writes a drafter and its `training.json`; totals count the earlier run, too."""
    names = ("kl_by_depth", "accuracy_by_depth", "acceptance_by_depth")
    figures = {name: [round(v, 4) for v in values] for name, values in zip(names, run.figures.tolist(), strict=True)}
    record = facts | figures
    record |= {key: record[key] + value for key, value in earlier.items() if key in TOTALS}
    run.drafter.to(torch.bfloat16).save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(folder.name, json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1536, help="texts of each kind")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=30, help="ends the schedule early on a slow machine")
    parser.add_argument("--seed", type=int, default=0, help="of the data and its order")
    parser.add_argument(
        "--start-from", type=Path, help="go on with the drafters of an earlier OUTPUT, on the texts of another seed"
    )
    parser.add_argument("--cache", type=Path, help="keep the continued texts in this file")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    texts = training_texts(target, AutoTokenizer.from_pretrained(args.target), args.rows, args.cache)
    batches = draw_batches(len(texts), args.epochs)
    drafters, earlier = start(target, args.start_from)
    reader = TargetReader(target, drafters["eagle31"].config.aux_hidden_state_layer_ids)
    runs = {name: Run(drafter, reader) for name, drafter in drafters.items()}
    facts = train(runs, reader, texts, batches, args.minutes)
    for name, run in runs.items():
        save(args.output / name, run, facts, earlier[name])


if __name__ == "__main__":
    main()
