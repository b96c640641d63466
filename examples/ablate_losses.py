"""Attention alignment and the drift regulariser, on and off: do they help, and do they do what they say?

    python examples/ablate_losses.py [--work FOLDER] [--seeds 3] [--output examples/results]

EAGLE 3.1 and EAGLE 3 drafters of the demo's target, trained a few minutes each on the same examples. A seed is one of
the new drafter's weights and of the order of examples; variants are compared seed by seed. What is done is kept in
FOLDER, and a rerun goes on.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from train import own_words, train

from eagle31_hf import demo
from eagle31_hf.bench import environment
from eagle31_hf.training.packing import Examples

DRAFTERS = {"EAGLE 3.1": {}, "EAGLE 3": {"fc_norm": False, "norm_output": False}}
ALIGNED, REGULARISED = {"attention_alignment": 0.1}, {"drift_regulariser": 0.1}
LOSSES = {"none": {}, "alignment 0.1": ALIGNED, "drift 0.1": REGULARISED, "both": ALIGNED | REGULARISED}
PROMPT = 96
DEPTH, EVAL_DEPTH = 4, 7
FIGURES = {
    "accepted length": lambda found: found["eval_accepted_length"],
    f"growth h{EVAL_DEPTH}/h1": lambda found: found[f"eval_state_norm_{EVAL_DEPTH}"] / found["eval_state_norm_1"],
    f"self mass at {EVAL_DEPTH}": lambda found: found[f"eval_self_mass_{EVAL_DEPTH}"],
}
T95 = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8, 6: 2.6, 7: 2.4, 8: 2.4}  # Student's t, two-sided 95%, by number of seeds


class Ablation:
    """Trains and evaluates drafters, those that a file does not know yet; `found` by drafter, losses and seed."""

    def __init__(self, work: Path, num_texts: int, num_prompts: int, new_tokens: int, steps: int, num_left: int):
        self.target, self.tokenizer = demo.load_target()
        self.work, self.num_prompts, self.new_tokens = work, num_prompts, new_tokens
        self.steps, self.num_left = steps, num_left
        self.file = work / f"ablation-{num_texts}-texts-{num_prompts}-prompts-{new_tokens}-tokens.json"
        self.found: dict[str, dict[str, float]] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.examples = own_words(self.target, self.tokenizer, work / "data", num_texts)
        self.held_out = self.continued_prompts()

    def continued_prompts(self) -> Examples:
        """Makes examples of prompts from files that neither target nor drafters were trained on, and of the target's
        continuations."""
        prompts = torch.cat(demo.prompts(self.tokenizer, self.num_prompts, PROMPT))
        texts = self.target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=self.new_tokens,
            eos_token_id=None,
        )
        return Examples.from_iterable(
            {"input_ids": text, "answers": torch.arange(len(text)) >= PROMPT} for text in texts
        )

    def name(self, drafter: str, losses: str, seed: int) -> str:
        return f"{drafter}, {losses}, seed {seed}, {self.steps} steps"

    def run(self, drafter: str, losses: str, seed: int) -> None:
        name = self.name(drafter, losses, seed)
        if name in self.found:
            return
        trainer = train(
            self.target,
            self.tokenizer,
            self.examples,
            self.work / "ablation" / name.replace(", ", "-").replace(" ", ""),
            DRAFTERS[drafter] | {"seed": seed},
            self.num_left,
            seed=seed,
            max_steps=self.steps,
            depth=DEPTH,
            eval_depth=EVAL_DEPTH,
            eval_prompts=0,
            eval_strategy="no",
            save_strategy="no",
            load_best_model_at_end=False,
            logging_steps=50,
            loss="kl",  # beside which the two are weighed
            **LOSSES[losses],
        )
        self.found[name] = {
            figure: value for figure, value in trainer.evaluate(self.held_out).items() if figure.startswith("eval_")
        }
        self.file.write_text(json.dumps(self.found, indent=1))
        print(name, {title: round(figure(self.found[name]), 3) for title, figure in FIGURES.items()}, flush=True)

    def values(self, drafter: str, losses: str, figure: str, num_seeds: int) -> torch.Tensor:
        return torch.tensor(
            [FIGURES[figure](self.found[self.name(drafter, losses, seed)]) for seed in range(num_seeds)]
        ).double()


def spread(values: torch.Tensor) -> float:
    return float(values.std()) if len(values) > 1 else float("nan")


def against_none(ablation: Ablation, drafter: str, losses: str, figure: str, num_seeds: int) -> tuple[float, float]:
    """Returns the mean paired difference to training without these losses, and its standard error."""
    differences = ablation.values(drafter, losses, figure, num_seeds) - ablation.values(
        drafter, "none", figure, num_seeds
    )
    return float(differences.mean()), spread(differences) / math.sqrt(num_seeds)


def verdict(difference: float, error: float, num_seeds: int) -> str:
    number, bar = f"{difference:+.3f} ± {error:.3f}", T95.get(num_seeds, 2.0)
    if abs(difference) < 5e-4:
        return "unchanged to three digits"
    if not abs(difference) > 2 * error:
        return f"no effect shown ({number})"
    direction = "up" if difference > 0 else "down"
    return f"{direction} ({number})" if abs(difference) > bar * error else f"perhaps {direction} ({number})"


def table(ablation: Ablation, drafter: str, num_seeds: int) -> list[str]:
    header = ["", *(f"{figure}{part}" for figure in FIGURES for part in ("", ": difference"))]
    lines = [header, ["---"] * len(header)]
    for losses in LOSSES:
        line = [losses]
        for figure in FIGURES:
            values = ablation.values(drafter, losses, figure, num_seeds)
            difference, error = against_none(ablation, drafter, losses, figure, num_seeds)
            line += [
                f"{values.mean():.3f} (sd {spread(values):.3f})",
                "" if losses == "none" else f"{difference:+.3f} ± {error:.3f}",
            ]
        lines.append(line)
    return ["| " + " | ".join(line) + " |" for line in lines]


def conclusions(ablation: Ablation, num_seeds: int) -> list[str]:
    """Returns a line for each drafter and losses; computed, so that a "no" is said as plainly as a "yes"."""
    found = []
    for drafter in DRAFTERS:
        for losses in LOSSES:
            if losses != "none":
                said = (
                    f"{figure} {verdict(*against_none(ablation, drafter, losses, figure, num_seeds), num_seeds)}"
                    for figure in FIGURES
                )
                found.append(f"- {drafter}, {losses}: " + "; ".join(said) + ".")
    return found


def report(ablation: Ablation, num_seeds: int, settings: dict[str, Any]) -> str:
    bar = T95.get(num_seeds, 2.0)
    what = (
        f"{num_seeds} seeds, {ablation.steps} steps of 8 rows, {DEPTH} deep. Accepted length (bonus included), states"
        f" and attention are of chains {EVAL_DEPTH} deep, teacher-forced, walked over {ablation.num_prompts} held-out"
        f" prompts x {ablation.new_tokens} tokens of the target's own greedy text. sd: over seeds. Difference: to none,"
        " seed by seed, ± its standard error. Up to two standard errors is no effect shown; with so few seeds chance"
        f" passes two easily, so up to {bar} (Student's t, 95%) it is no more than perhaps one."
    )
    lines = [
        "# Attention alignment and drift regulariser, on and off",
        "",
        "Written by `python examples/ablate_losses.py`. " + what,
        "",
    ]
    lines.append("Settings: " + ", ".join(f"{name} {value}" for name, value in settings.items()) + ".")
    for drafter in DRAFTERS:
        lines += ["", f"## {drafter}", "", *table(ablation, drafter, num_seeds)]
    return "\n".join([*lines, "", "## Conclusion", "", *conclusions(ablation, num_seeds)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("paper-tables"), help="where figures and data are kept")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--texts", type=int, default=1536, help="pieces of text that the drafters learn from")
    parser.add_argument("--prompts", type=int, default=96, help="held-out prompts on which they are evaluated")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="after each of these prompts")
    parser.add_argument("--left-out", type=int, default=32, help="of the examples made of the texts, not learnt from")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    ablation = Ablation(args.work, args.texts, args.prompts, args.max_new_tokens, args.steps, args.left_out)
    for seed in range(args.seeds):  # so that a run that is stopped has all variants of fewer seeds
        for drafter in DRAFTERS:
            for losses in LOSSES:
                ablation.run(drafter, losses, seed)
    settings = environment(ablation.target, prompts=args.prompts, max_new_tokens=args.max_new_tokens)
    text = report(ablation, args.seeds, settings)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "ablate_losses.md").write_text(text, encoding="utf-8")
    used = {name: ablation.found[name] for name in sorted(ablation.found) if name.endswith(f" {args.steps} steps")}
    record = {"settings": settings | {"steps": args.steps, "seeds": args.seeds}, "figures": used}
    (args.output / "ablate_losses.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
