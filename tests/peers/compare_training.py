"""Our training beside that of speculators: the same target, data, batches, steps, optimizer, schedule, first weights
and parameters.

    python tests/peers/compare_training.py --speculators-python PYTHON_WITH_SPECULATORS --vllm-python PYTHON_WITH_VLLM \
        [--steps 100] [--seeds 0 1 2] [--output compare_training.json]

For installing them see `speculators_fixtures.py` and `vllm_counts.py`; both want the torch we run on. Nothing else
should be busy. Parts:

- `losses`: of equal weights on the first batch, by depth, and the gradient of every parameter, over the predictions
  both sides count. Speculators also trains the prediction of what follows a text's last token, and, packed, predictions
  at a text's end that go on with the next text's tokens.
- `speed`: seconds of a step (forward, loss, backward, clipping, AdamW) and memory above what the process held before
  its first step, in each of SETTINGS. The sides take turns in short blocks, so that whatever else the machine does
  meets all of them; the processor's seconds show it least. `by row` gives either side one sequence at a time and adds
  up gradients: less memory, and less attention for speculators, which otherwise packs a batch into one sequence and on
  a CPU computes what it then masks.
- `acceptance`: both train `--steps` steps, vLLM serves both and counts accepted drafts for the same held-out prompts;
  once for each of `--seeds`, which draw the sequences and their order.

In both, the target has run beforehand: its states lie in a file. All is fp32, full vocabulary, all tokens are answers,
embedding and head are the target's and frozen, as speculators has them.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from compare_acceptance import vllm_counts
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from eagle31_hf import demo
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.target import TargetReader

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "examples"))
from corpus import training_files  # noqa: E402 -- so is this one
from train import SHAPE  # noqa: E402 -- an example is no package

BY_SEQUENCE = ("--batching", "sequences")
SIDES = {  # name -> script and its options
    "ours": ("our_training.py", ()),
    "speculators": ("speculators_training.py", ()),
    "ours, by row": ("our_training.py", BY_SEQUENCE),
    "speculators, by row": ("speculators_training.py", BY_SEQUENCE),
}
TRAINED = ("ours", "speculators")
PARTS = ("losses", "speed", "acceptance")
OPTIMIZER = {"betas": [0.9, 0.95], "weight_decay": 0.01}
CLIP = 1.0
LENGTH, PROMPT = 256, 64  # tokens of a text, and of the part that the target goes on after


@dataclass(frozen=True)
class Setting:
    """Sequences of a batch, tokens of a sequence, and the vocabulary of a target of random weights, or None for the
    demo's."""

    num_sequences: int
    length: int
    vocab_size: int | None = None


SETTINGS = {
    "demo, 8 x 256": Setting(8, 256),
    "demo, 2 x 1024": Setting(2, 1024),
    "32,000 tokens of vocabulary, 8 x 256": Setting(8, 256, 32_000),
}
SPEED_BATCHES = 4  # taken in turn
DEMO = next(iter(SETTINGS))


# The data both sides read.


def load_target(setting: Setting):
    """Loads the demo's target, or makes one of its shape with another vocabulary."""
    if setting.vocab_size is None:
        return demo.load_target()[0]
    config = AutoConfig.from_pretrained(demo.FOLDER / "target", vocab_size=setting.vocab_size)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def draw_texts(tokenizer, count: int) -> torch.Tensor:
    """Returns windows (count, LENGTH) drawn at random from the training files."""
    ids = torch.tensor(
        [i for text in training_files() for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    )
    starts = torch.randint(0, len(ids) - LENGTH, (count,))
    return torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])


@torch.no_grad()
def continued(target, prompts: torch.Tensor, batch: int = 128) -> torch.Tensor:
    """Returns prompts (N, PROMPT) with the target's greedy continuations: (N, LENGTH)."""
    options = {"max_new_tokens": LENGTH - PROMPT, "eos_token_id": None, "do_sample": False}
    chunks = prompts.split(batch)
    return torch.cat([target.generate(chunk, attention_mask=torch.ones_like(chunk), **options) for chunk in chunks])


def learning_rate(progress: float, peak: float = 2e-3, warmup: float = 0.03) -> float:
    if progress < warmup:
        return peak * progress / warmup
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))))


def draw_sequences(target, setting: Setting, count: int) -> torch.Tensor:
    """Returns text of the demo (count, T), half of it continued by the target where it is as long as the demo's; else
    any tokens."""
    if setting.vocab_size is not None:
        return torch.randint(setting.vocab_size, (count, setting.length))
    _, tokenizer = demo.load_target()
    pieces = setting.length // LENGTH
    texts = draw_texts(tokenizer, count * pieces)
    if pieces > 1:
        return texts.view(count, setting.length)
    return torch.cat([texts[: count // 2], continued(target, texts[count // 2 :, :PROMPT])])


def read_states(target, layer_ids: list[int], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Reads the target's aux hidden states (N, T, n*h) and its last state before and after its norm (N, T, h) for
    tokens (N, T)."""
    reader = TargetReader(target, [*layer_ids, target.config.num_hidden_layers])
    parts = [reader.read(part, torch.ones_like(part)) for part in ids.split(16)]
    states, last = (torch.cat(column) for column in zip(*parts, strict=True))
    states, before_norm = states.split([len(layer_ids) * last.shape[-1], last.shape[-1]], dim=-1)
    states, before_norm = states.contiguous(), before_norm.contiguous()
    return {"input_ids": ids, "states": states, "before_norm": before_norm, "last_states": last}


def prepare(workspace: Path, setting: Setting, steps: int, args: argparse.Namespace, seed: int = 0) -> None:
    """Writes the target's parts, the data, the drafter to begin with and the plan."""
    workspace.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    target = load_target(setting)
    drafter = new_drafter(target, **SHAPE)
    drafter.save_pretrained(workspace / "initial")
    head, table = target.get_output_embeddings().weight, target.get_input_embeddings().weight
    parts = {"embedding": table, "head": head, "norm": target.model.norm.weight}
    save_file({name: part.detach().clone() for name, part in parts.items()}, workspace / "target.safetensors")
    ids = draw_sequences(target, setting, steps * setting.num_sequences)
    save_file(read_states(target, drafter.config.aux_hidden_state_layer_ids, ids), workspace / "data.safetensors")
    plan = {
        "batches": torch.randperm(len(ids)).view(steps, setting.num_sequences).tolist(),
        "learning_rates": [learning_rate(step / steps) for step in range(steps)],
        "optimizer": OPTIMIZER,
        "clip": CLIP,
        "depth": args.depth,
        "decay": args.decay,
    }
    (workspace / "plan.json").write_text(json.dumps(plan))


# The sides.


class Running:
    """A side in a process of its own."""

    def __init__(self, name: str, workspace: Path, args: argparse.Namespace):
        script, options = SIDES[name]
        python = sys.executable if script == "our_training.py" else args.speculators_python
        environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
        command = [python, HERE / script, "--workspace", workspace, *options]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, command: str, **arguments) -> dict:
        """Sends a command and returns the answer. Raises RuntimeError where the side has ended instead of answering."""
        print(json.dumps({"command": command} | arguments), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"{self.name} ended with status {self.process.wait()} when asked to {command}; its errors stand above."
            )
        return json.loads(answer)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *error) -> None:
        self.process.stdin.close()
        self.process.wait()


def print_table(head: tuple[str, ...], rows: list[tuple]) -> None:
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print(
            "| " + " | ".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row) + " |",
            flush=True,
        )


# The parts of the comparison.


def compare_losses(workspace: Path, args: argparse.Namespace) -> dict:
    """Compares losses by depth and gradients on the first batch. Raises ValueError where the sides do not train the
    same parameters."""
    found = {}
    prepare(workspace, SETTINGS[DEMO], SPEED_BATCHES, args)
    for name in TRAINED:
        with Running(name, workspace, args) as side:
            found[name] = side.ask("describe") | side.ask("first_batch")
    ours, theirs = found.values()
    if ours["parameters"] != theirs["parameters"]:
        raise ValueError(f"ours trains {ours['parameters']}, speculators {theirs['parameters']}; expected the same.")
    norms = ours["gradient_norms"], theirs["gradient_norms"]
    away = max(abs(norms[0][name] / norms[1][name] - 1) for name in norms[0])
    rows = [
        (k + 1, *pair, abs(pair[0] - pair[1]))
        for k, pair in enumerate(zip(ours["losses"], theirs["losses"], strict=True))
    ]
    print_table(("depth", "our loss", "speculators' loss", "apart"), rows)
    print(f"\nGradient norms of {len(norms[0])} parameters are at most {away:.1e} apart (relative).")
    return found | {"gradient_norms_apart": away}


def take_turns(sides: dict[str, Running], args: argparse.Namespace) -> dict[str, dict]:
    """Returns the seconds of every step and the memory of each side."""
    found: dict[str, dict] = {name: {"seconds": [], "processor": []} for name in sides}
    for block in range(args.blocks + 1):
        for name, side in sides.items():
            took = side.ask("train", count=args.block_steps if block else 1)
            for kind in ("seconds", "processor") if block else ():  # the first step warms up
                found[name][kind] += took[kind]
    return {name: figures | sides[name].ask("memory") for name, figures in found.items()}


def measure(setting: Setting, args: argparse.Namespace) -> dict:
    """Returns seconds and memory of a step on each side, and how many times ours they are."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        prepare(Path(folder), setting, SPEED_BATCHES, args)
        found = take_turns(
            {
                name: stack.enter_context(Running(name, Path(folder), args))
                for name in dict.fromkeys(("ours", *args.sides))
            },
            args,
        )
    for side in found.values():
        side |= {f"median_{kind}": statistics.median(side[kind]) for kind in ("seconds", "processor")}
    for side in found.values():
        side["times_ours"] = {
            kind: side[kind] / found["ours"][kind] for kind in ("median_seconds", "median_processor", "steps")
        }
    return found


def compare_speed(args: argparse.Namespace) -> dict:
    found = {name: measure(SETTINGS[name], args) for name in args.settings}
    rows = []
    for setting, sides in found.items():
        for name, side in sides.items():
            figures = [figure for kind, times in side["times_ours"].items() for figure in (side[kind], times)]
            rows.append((setting, name, *figures))
    print_table(
        ("setting", "side", "s/step", "times ours", "processor s/step", "times ours", "memory (MiB)", "times ours"),
        rows,
    )
    return found


def train_both(workspace: Path, args: argparse.Namespace) -> dict:
    """Trains a drafter on each side, in turn, and writes it to the workspace."""
    found = {}
    for name in TRAINED:
        with Running(name, workspace, args) as side:
            found[name] = side.ask("train", count=args.steps)
            side.ask("write", folder=str(workspace / name))
    return found


def served(workspace: Path, prompts: list[torch.Tensor], args: argparse.Namespace) -> dict:
    """Counts what vLLM accepts, each side served from the files its own library wrote."""
    found = {}
    for depth in args.served_depths:
        for name in TRAINED:
            counts = vllm_counts(args.vllm_python, workspace / name, prompts, depth, args.max_new_tokens)
            counts["accepted_length"] = 1 + sum(counts["accepted_per_position"]) / counts["drafts"]
            found[f"{name}, K={depth}"] = counts
    return found


def compare_acceptance(workspace: Path, args: argparse.Namespace) -> dict:
    """Counts accepted drafts in vLLM of what both sides trained, seed by seed, and how far ours is above, with its
    standard error."""
    prompts, found = demo.prompts(demo.load_target()[1], args.prompts), dict[str, dict]()
    for seed in args.seeds:
        folder = workspace / f"seed-{seed}"
        prepare(folder, SETTINGS[DEMO], args.steps, args, seed)
        found[f"seed {seed}"] = {"training": train_both(folder, args), "served": served(folder, prompts, args)}
        lengths = {name: counts["accepted_length"] for name, counts in found[f"seed {seed}"]["served"].items()}
        print(f"seed {seed}:", ", ".join(f"{name}: {length:.3f}" for name, length in lengths.items()), flush=True)
    rows = []
    for depth in args.served_depths:
        ours, theirs = (
            torch.tensor([one["served"][f"{name}, K={depth}"]["accepted_length"] for one in found.values()]).double()
            for name in TRAINED
        )
        above = ours - theirs
        error = float(above.std()) / len(above) ** 0.5 if len(above) > 1 else float("nan")
        rows.append((depth, float(ours.mean()), float(theirs.mean()), f"{float(above.mean()):+.3f} ± {error:.3f}"))
    print_table(("K", "ours: tokens a target forward", "speculators", "ours above"), rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators-python", required=True)
    parser.add_argument("--vllm-python", help="needed for acceptance")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=100, help="of the training whose acceptance is counted")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0,), help="of the data and its order, for acceptance")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--decay", type=float, default=1.0, help="depth k weighs decay**k; speculators' default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=tuple(SIDES), help="whose speed is measured, beside ours"
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--block-steps", type=int, default=3)
    parser.add_argument("--served-depths", nargs="+", type=int, default=(5, 7))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--workspace", type=Path, help="keep data and trained drafters in this folder")
    parser.add_argument("--output", type=Path, help="everything measured, as JSON")
    args = parser.parse_args()
    result: dict = {"arguments": {name: str(value) for name, value in vars(args).items()}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.workspace or Path(temporary)
        parts = {
            "losses": lambda: compare_losses(folder / "losses", args),
            "speed": lambda: compare_speed(args),
            "acceptance": lambda: compare_acceptance(folder, args),
        }
        for part in args.parts:
            result[part] = parts[part]()
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
