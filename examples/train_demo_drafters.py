"""Train the demo's EAGLE 3.1 and EAGLE 3 drafters side by side: same target, data, order, steps, settings and seed.

    python examples/train_demo_drafters.py --target eagle31_hf/demo/target --output first
    python examples/train_demo_drafters.py --target eagle31_hf/demo/target --start-from first --seed 1 --output eagle31_hf/demo

About 25 minutes each on 2 CPU cores. Half of the rows are the target's own greedy continuations of training text (what
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
from train import SHAPE
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf.demo.corpus import training_files
from eagle31_hf.modeling import Eagle31DrafterModel
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.objective import Batch, DraftingObjective, Settings, Sums
from eagle31_hf.training.target import TargetReader

LENGTH, PROMPT, BATCH, DEPTH = 256, 64, 8, 5
TOTALS = ("rows", "rows_continued_by_target", "steps", "tokens_trained", "minutes_both")
FLAGS = {"eagle31": {"fc_norm": True, "norm_output": True}, "eagle3": {"fc_norm": False, "norm_output": False}}


def text_rows(tokenizer, count: int) -> torch.Tensor:
    """(count, LENGTH) windows drawn at random from the training files."""
    ids = torch.tensor(
        [i for text in training_files() for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    )
    starts = torch.randint(0, len(ids) - LENGTH, (count,))
    return torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])


@torch.no_grad()
def continued_rows(target, prompts: torch.Tensor, batch: int = 128) -> torch.Tensor:
    """Prompts (N, PROMPT) -> (N, LENGTH), continued greedily by the target."""
    length = {"max_new_tokens": LENGTH - PROMPT, "eos_token_id": None, "do_sample": False}
    rows = []
    for chunk in prompts.split(batch):
        rows.append(target.generate(input_ids=chunk, attention_mask=torch.ones_like(chunk), **length))
        print(f"generated {sum(map(len, rows))} of {len(prompts)} rows", flush=True)
    return torch.cat(rows)


def learning_rate(progress: float, peak: float = 2e-3, warmup: float = 0.03) -> float:
    if progress < warmup:
        return peak * progress / warmup
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1536, help="rows of each kind")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=30, help="ends the schedule early on a slow machine")
    parser.add_argument("--seed", type=int, default=0, help="of the data and its order")
    parser.add_argument(
        "--start-from", type=Path, help="go on with the drafters of an earlier OUTPUT, on the rows of another seed"
    )
    parser.add_argument("--cache", type=Path, help="keep the continued rows in this file")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    text = text_rows(tokenizer, 2 * args.rows)
    if args.cache and args.cache.exists():
        continued = torch.load(args.cache, weights_only=True)
    else:
        continued = continued_rows(target, text[args.rows :, :PROMPT])
    if args.cache:
        torch.save(continued, args.cache)
    rows = torch.cat([text[: args.rows], continued])
    order = torch.cat([torch.randperm(len(rows)) for _ in range(args.epochs)])
    batches = order[: len(order) // BATCH * BATCH].view(-1, BATCH)

    drafters = {name: new_drafter(target, target_model="demo target", **SHAPE | flags) for name, flags in FLAGS.items()}
    earlier: dict[str, dict] = {name: {} for name in FLAGS}
    if args.start_from:
        for name, drafter in drafters.items():
            saved = Eagle31DrafterModel.from_pretrained(args.start_from / name, dtype=torch.float32)
            drafter.load_state_dict(saved.state_dict())
            earlier[name] = json.loads((args.start_from / name / "training.json").read_text())
    optimizers = {
        name: torch.optim.AdamW(drafter.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        for name, drafter in drafters.items()
    }
    reader = TargetReader(target, drafters["eagle31"].config.aux_hidden_state_layer_ids)
    settings = Settings(DEPTH, tuple(0.8**k for k in range(DEPTH)))
    objectives = {name: DraftingObjective(drafter, settings, reader.logits) for name, drafter in drafters.items()}
    start, running = time.time(), {}
    for step, indices in enumerate(batches):
        progress = max(step / len(batches), (time.time() - start) / (60 * args.minutes))
        if progress >= 1:
            break
        ids = rows[indices]
        all_of_it, one_text = torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids)
        batch = Batch(ids, all_of_it, one_text, *reader.read(ids, one_text))
        for name, drafter in drafters.items():
            optimizer = optimizers[name]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress)
            result = objectives[name](batch)
            result["loss"].backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            means = Sums.means(result["sums"])
            figures = torch.tensor([means["distance"], means["accuracy"], means["acceptance"]])
            running[name] = figures if name not in running else 0.98 * running[name] + 0.02 * figures
        if step % 25 == 0:
            accuracy = {name: [round(v, 2) for v in figures[1].tolist()] for name, figures in running.items()}
            print(f"step {step}/{len(batches)} {accuracy} {(time.time() - start) / 60:.1f} min", flush=True)

    for name, drafter in drafters.items():
        kl, accuracy, acceptance = ([round(v, 4) for v in row] for row in running[name].tolist())
        record = {
            "python": sys.version.split()[0],
            "rows": len(rows),
            "rows_continued_by_target": len(continued),
            "row_length": LENGTH,
            "steps": step + 1,
            "tokens_trained": (step + 1) * BATCH * LENGTH,
            "depth": DEPTH,
            "minutes_both": round((time.time() - start) / 60, 1),
            "kl_by_depth": kl,
            "accuracy_by_depth": accuracy,
            "acceptance_by_depth": acceptance,
        }
        record |= {key: record[key] + value for key, value in earlier[name].items() if key in TOTALS}
        drafter.to(torch.bfloat16).save_pretrained(args.output / name)
        (args.output / name / "training.json").write_text(json.dumps(record, indent=2) + "\n")
        print(name, json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
