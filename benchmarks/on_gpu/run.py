"""One run of `benchmarks/gpu.py`: its device, its sizes, the models it has built, and the bandwidth it measured."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from engine import build
from torch import Tensor
from transformers import PreTrainedModel

from eagle31_hf.generation.captured.kept import release
from eagle31_hf.generation.captured.seam import Seam, Uncaptured, seam_of
from eagle31_hf.modeling import Eagle31DrafterModel

Row = dict[str, Any]
Task = tuple[str, Callable[[], Row]]  # a row's name, and what measures it
Pair = tuple[PreTrainedModel, Eagle31DrafterModel]
# A device -> the demo's target, its drafters by name, and prompts (1, L).
LoadDemo = Callable[[str], tuple[PreTrainedModel, dict[str, Eagle31DrafterModel], list[Tensor]]]

# Chances that drafts are kept to each depth: those of a published EAGLE 3 drafter, 3.58 tokens a round of seven drafts.
SURVIVAL = (0.75, 0.55, 0.42, 0.31, 0.24, 0.18, 0.13)


@dataclass(frozen=True)
class Sizes:
    """Sizes of everything that is measured, for one run: prompts, drafts, batches, matrices. The defaults are those of
    real use, for a GPU; `SMALL` has others, with which a CPU runs all of it."""

    prompts: tuple[int, ...] = (128, 2048, 8192)  # tokens
    new_tokens: int = 96
    chains: tuple[int, ...] = (3, 5, 7)
    trees: tuple[tuple[int, int], ...] = ((8, 32), (10, 60))  # children of a node, and nodes
    tree_depth: int = 7
    tree_lengths: tuple[float, ...] = (4.5, 6.1)  # tokens a round, of the papers' trees
    batches: tuple[int, ...] = (4, 16)
    batch_prompt: int = 512
    rows: tuple[int, ...] = (1, 2, 4, 6, 8, 16, 64)  # of a matmul
    nodes: tuple[int, ...] = (1, 6, 60)  # of a round, for an operation
    predictions: int = 2048  # of training, in one chunk
    positions: int = 2048  # of a text that is trained on
    copied_bytes: int = 8_000_000_000
    matmul: int = 8192
    text_targets: tuple[str, ...] = ("Llama", "Qwen3", "Mistral, window of 8", "Qwen3-Next", "LFM2")
    text_tokens: int = 20
    demo_tokens: int = 96
    demo_prompts: int = 4
    patience: int = 1  # times as long as it says a section may take


SMALL = Sizes(
    prompts=(12,),
    new_tokens=12,
    chains=(3,),
    trees=((4, 12),),
    tree_depth=4,
    tree_lengths=(2.5,),
    batches=(3,),
    batch_prompt=12,
    rows=(1, 6),
    nodes=(1, 6),
    predictions=12,
    positions=24,
    copied_bytes=32_000_000,
    matmul=256,
    text_targets=("Qwen3",),
    text_tokens=8,
    demo_tokens=6,
    demo_prompts=1,
    patience=30,
)


@dataclass
class Run:
    """State of one run of the benchmark, handed to every section: the device, the models, and what was found so far.

    `shapes`: of the targets, those of `engine.SHAPES`; the first is measured in
    every way. `found` collects figures that later sections need; `ends`: when the section under way has to end, by
    `time.perf_counter`."""

    device: torch.device
    shapes: tuple[str, ...]
    load_demo: LoadDemo | None = None
    sizes: Sizes = field(default_factory=Sizes)
    found: dict[str, float] = field(default_factory=dict)
    ends: float = float("inf")
    _built: dict[str, Pair] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def seam(self) -> Seam:
        """Returns how captured rounds run here: as CUDA graphs on a GPU, elsewhere as the functions they are."""
        return seam_of(self.device) or Uncaptured()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the shapes' weights."""
        return torch.bfloat16 if self.is_gpu else torch.float32

    def left(self) -> float:
        """Seconds that the section under way has left."""
        return self.ends - time.perf_counter()

    def pair(self, shape: str) -> Pair:
        """A target and a drafter of a shape, random; only the last ones are kept."""
        if shape not in self._built:
            self.forget()
            self._built[shape] = build(shape, self.dtype, str(self.device))
        return self._built[shape]

    @contextmanager
    def standing_in(self, shape: str, pair: Pair) -> Iterator[None]:
        """A context in which another pair is that of a shape; what is kept for it is given up at the end."""
        own = self.pair(shape)
        self._built[shape] = pair
        try:
            yield
        finally:
            self._built[shape] = own
            release(pair[1])

    def forget(self) -> None:
        """Gives up the models, and what is kept for them."""
        self._built.clear()
        release()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def ids(self, shape: str, num_sequences: int, length: int) -> Tensor:
        """Random token ids (B, L), the same in every run."""
        generator = torch.Generator().manual_seed(length)
        vocab_size = self.pair(shape)[0].config.get_text_config().vocab_size
        return torch.randint(vocab_size, (num_sequences, length), generator=generator).to(self.device)


@dataclass(frozen=True)
class Section:
    """A part of the run: `tasks` yields what it measures, row by row, within `limit` seconds."""

    name: str
    title: str
    limit: float
    tasks: Callable[[Run], Iterator[Task]]
