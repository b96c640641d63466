"""Decodes in bf16 with and without a drafter, and asks of every text that is not the target's own whether rounding
explains it.

    python tests/generation/bf16.py [--prompts 24] [--max-new-tokens 32] [--initializer-range 0.02] [family ...]

A verification of several tokens rounds otherwise than single steps do. Where a text first departs, the *margin* is what
the target's own logits prefer its token by to ours, in ulps of bf16 at the preferred one, from plain generate's raw
logits. (Ours being nearly always the second best, it is the target's top-2 margin; it is never less.) A margin of 2 ulp
or more is a failure: exit status 1.

That is fair where the target itself moves no more between two ways of computing the same. "alone" is how far its top-2
margins move when its own text is run in one forward instead of single steps, without any drafter: the median, the 99th
percentile and the most. It grows with `initializer_range`: random weights as large as those of `families.py` amplify a
rounding to 9 ulp. A failure is printed with its margin in fp32, of the same weights: a small one says that plain
decoding's own rounding made the margin, a large one that verification is wrong.
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # of conftest.py

import torch
import transformers
from conftest import PROMPT, greedy_text
from families import DRAFTINGS, VOCAB, build_drafter, build_target, padded
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from eagle31_hf import Eagle31DrafterModel, track_acceptance
from eagle31_hf.checking.trial import departures

LIMIT = 2.0  # ulp: two logits, each rounded the other way, are that far apart
MANTISSA_BITS = 7
BATCH = 4
FAMILIES = (
    "Llama",
    "Qwen3",
    "Phi",
    "GPT-2",
    "GPT-NeoX",
    "OPT",
    "Mistral, window",
    "Gemma3 text, window",
    "Mixtral",
    "DeepSeek-V3 (MLA)",
    "Falcon, alibi",
)
# Grouped matrix products take rows of whole 16 bytes.
ALIGNED = {name: {"hidden_size": 48, "moe_intermediate_size": 24} for name in ("Mixtral", "DeepSeek-V3 (MLA)")}


@dataclass
class Tally:
    """Texts compared, those that are the same, the margins in ulp where others depart, and which of them rounding does
    not explain."""

    texts: int = 0
    same: int = 0
    accepted: int = 0
    margins: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    shifts: list[float] = field(default_factory=list)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __str__(self) -> str:
        shifts, largest = torch.tensor(self.shifts), max(self.margins, default=0.0)
        return (
            f"{self.texts} texts, {self.same} the same, {len(self.margins)} depart, largest margin {largest:.2f} ulp,"
            f" {len(self.failures)} failures ({self.accepted} drafts accepted; alone {shifts.median():.1f},"
            f" {shifts.quantile(0.99):.1f}, {shifts.max():.1f} ulp)"
        )


def check_family(name: str, num_prompts: int, max_new_tokens: int, initializer_range: float) -> Tally:
    """Every prompt by itself and in a batch, in chains and in trees. Raises NotThereError."""
    overrides = {"initializer_range": initializer_range, **ALIGNED.get(name, {})}
    exact = build_target(name, "sdpa", **overrides)
    target, drafter = copy.deepcopy(exact).bfloat16(), copy.deepcopy(build_drafter(name, **overrides)).bfloat16()
    tally = Tally()
    for texts in calls(greedy_text(exact)[0].tolist(), num_prompts):
        alone = target.generate(
            **padded(texts),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        if len(texts) == 1:
            tally.shifts += shifts(target, alone)
        for drafting in DRAFTINGS:
            check_call(tally, target, drafter, padded(texts), alone, drafting)
    return tally


def calls(known: list[int], num_prompts: int) -> Iterator[list[list[int]]]:
    """Prompts one by one, then in batches: in turn a beginning of the text the drafter knows, and one nobody knows."""
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for i in range(num_prompts):
        length = int(torch.randint(2, 14, (), generator=generator))
        stranger = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        prompts.append(known[: len(PROMPT[0]) + i // 2] if i % 2 == 0 else stranger)
    yield from ([prompt] for prompt in prompts)
    yield from (prompts[i : i + BATCH] for i in range(0, num_prompts, BATCH))


def check_call(
    tally: Tally,
    target: PreTrainedModel,
    drafter: Eagle31DrafterModel,
    prompts: dict[str, Tensor],
    alone: ModelOutput,
    drafting: str,
) -> None:
    with track_acceptance() as stats:
        sequences = target.generate(
            **prompts, assistant_model=drafter, max_new_tokens=len(alone.logits), do_sample=False, **DRAFTINGS[drafting]
        )
    departed = list(departures(sequences, alone))
    tally.texts += len(sequences)
    tally.same += len(sequences) - len(departed)
    tally.accepted += sum(stats.accepted_per_position)
    for b, step, difference in departed:
        unit = float(ulp(alone.logits[step][b].max()))
        tally.margins.append(difference / unit)
        if difference >= LIMIT * unit:
            exact = exact_difference(target, prompts, alone, sequences, b, step) / unit
            tally.failures.append(
                f"{drafting}, sequence {b} of {len(sequences)}, token {step}: {difference / unit:.2f} ulp, in fp32"
                f" {exact:.2f}"
            )


@torch.no_grad()
def exact_difference(
    target: PreTrainedModel, prompts: dict[str, Tensor], alone: ModelOutput, sequences: Tensor, b: int, step: int
) -> float:
    """By how much the same weights in fp32 prefer the target's own token to ours."""
    num_padding, place = int((prompts["attention_mask"][b] == 0).sum()), prompts["input_ids"].shape[1] + step
    logits = copy.deepcopy(target).float()(alone.sequences[b : b + 1, num_padding:place]).logits[0, -1]
    return float(logits[alone.sequences[b, place]] - logits[sequences[b, place]])


def ulp(x: Tensor) -> Tensor:
    """The distance of neighbouring bf16 numbers around x."""
    return torch.exp2(x.float().abs().log2().floor() - MANTISSA_BITS)


@torch.no_grad()
def shifts(target: PreTrainedModel, alone: ModelOutput) -> list[float]:
    """By token of one text, how many ulps its top-2 margin in single steps is from that in one forward over the whole
    text."""
    steps = torch.cat(alone.logits).float()
    whole = target(alone.sequences[:, :-1]).logits[0, -len(steps) :].float()
    best = steps.topk(2, dim=-1)
    margins = [logits.gather(1, best.indices).diff(dim=-1)[:, 0] for logits in (steps, whole)]
    return ((margins[0] - margins[1]).abs() / ulp(best.values[:, 0])).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES, metavar="family", help="names of families.FAMILIES")
    parser.add_argument("--prompts", type=int, default=24, help="prompts a family (default: 24)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="tokens a text (default: 32)")
    parser.add_argument(
        "--initializer-range", type=float, default=0.02, help="size of the targets' random weights (default: 0.02)"
    )
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, bf16, greedy")
    total = Tally()
    for name in arguments.families:
        tally = check_family(name, arguments.prompts, arguments.max_new_tokens, arguments.initializer_range)
        print("\n  ".join([f"{name}: {tally}", *tally.failures]), flush=True)
        total += tally
    print(f"total: {total}")
    sys.exit(1 if total.failures else 0)


if __name__ == "__main__":
    main()
