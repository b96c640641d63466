"""The sections of `benchmarks/gpu.py`, the most telling first: where the budget is spent, the last are left out. The
limits of those up to the rivals fit in it together."""

from collections.abc import Iterator

from .machine import machine
from .matmuls import matmuls
from .operations import speed
from .quantized import quantized
from .rivals import rivals, without_compiling
from .rounds import captured, eager, of_shape, others
from .run import Run, Section, Task
from .texts import demo, texts
from .training import training


def shapes(run: Run) -> Iterator[Task]:
    """The other shapes: captured rounds, and the target alone."""
    for shape in run.shapes[1:]:
        yield from without_compiling(run, shape)
        yield from of_shape(run, shape)


SECTIONS = (
    Section("machine", "The machine", 15, machine),
    Section("texts", "Captured rounds beside plain generate: the same text", 60, texts),
    Section("rounds", "Captured rounds", 110, captured),
    Section("rivals", "The target without a drafter", 230, rivals),
    Section("eager", "Rounds that run eagerly, and what they ask of the host", 40, eager),
    Section("speed", "Operations beside their references: milliseconds", 40, speed),
    Section("batches", "Batches, auto and sampling", 40, others),
    Section("matmuls", "torch's matmuls at the rows of a round", 30, matmuls),
    Section("quantized", "Drafter weights in 8 bits", 40, quantized),
    Section("shapes", "Other shapes", 80, shapes),
    Section("training", "Training: the distillation loss, attention of the unroll", 60, training),
    Section("demo", "The demo pair", 30, demo),
)
NAMES = tuple(section.name for section in SECTIONS)
BUDGET = 540  # seconds
