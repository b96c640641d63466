"""Kernels that multiply few rows by the weights of linear layers on a CPU, which are packed for them once: oneDNN, as
inductor's freezing packs them, or FBGEMM, which keeps a weight in fp16 and multiplies in fp32. And the choice of one:
the fastest on this CPU by measurement, once for each shape, dtype and number of threads; in 16 bits with whether a
row's result depends on the other rows.

torch's own linear layer reads a weight as it lies: in fp32 two to eight rows take two to four times as long as one, and
in bf16 each row about twice as long as packed. A few rows take as long as their weight takes to be read, so a weight in
fp16 takes half as long as one in fp32; and where a processor has no instructions for bf16, oneDNN takes three times as
long in bf16 as FBGEMM does.

T rows, K width of a layer's input, N of its output.
"""

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..storage.measured import Measured, machine

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHANGE = 2**-26  # the most that fp16 may change a row, of the sum of its sizes: a quarter of fp32's rounding error
ROWS_AT_ONCE = 64  # of a weight that are looked at together: few enough to stay in a cache
TORCH = "torch"  # for its own kernel, beside the names in KERNELS
LOW = (torch.bfloat16, torch.float16)
TIMED_ROWS = (1, 3, 8)
TIMED_PROMPT = (128,)
PROMPT_GAIN = 1.3  # a prompt runs the chosen kernel if that is more than so many times as fast as torch's
TIMED_BYTES = 2**26  # of weights of one shape that kernels are timed on: more than a cache holds
TIMES = 5
# The most rows of a call for which a kernel is tried to be batch-invariant: some, as oneDNN's for AMX, add up more in
# another order.
ALIKE_ROWS = 32
COMPARED_SIZES = (1, 2, 3, 5, 8, 17, 31)
COMPARED_VALUES = 2**16  # of results: another order of a sum changes one of ten thousand
LEAST = (1, 2, None)  # what `Choice.least_rows` may be
MEASURED = Measured("linear_layers")
Run = Callable[[Tensor], Tensor]  # (..., K) -> (..., N)
Group = tuple[nn.Linear, ...]  # layers that read the same input, or one layer


class Packed(NamedTuple):
    """A copy of a weight (N, K), and of its bias, in a kernel's own layout. `run` multiplies x (..., K) by it and adds
    the bias -> (..., N); `num_bytes` is what the copy takes."""

    run: Run
    num_bytes: int


def is_available() -> bool:
    """Returns whether torch has oneDNN, and has it switched on."""
    is_on = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return is_on and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def fits_fp16(weight: Tensor) -> bool:
    """Returns whether a copy in fp16 of a weight (N, K) is as good as one in fp32: it changes each row by less than
    fp32's own rounding does. True of most weights that are stored in 16 bits, in whatever dtype they are loaded."""
    for rows in weight.detach().split(ROWS_AT_ONCE):
        values = rows.float()
        changes = (values.half().float() - values).abs().sum(1)
        if not bool((changes <= CHANGE * values.abs().sum(1)).all()):  # nor where one is too large for fp16, or NaN
            return False
    return True


def packed_by_onednn(weight: Tensor, bias: Tensor | None) -> Packed:
    """Packs a weight of any of DTYPES."""
    own = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return Packed(functools.partial(onednn_linear, weight=own, bias=bias), weight.nbytes)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def packed_by_fbgemm(weight: Tensor, bias: Tensor | None) -> Packed:
    """Packs a weight that `fits_fp16`. Raises RuntimeError where torch has no FBGEMM, as on Arm."""
    bias = None if bias is None else bias.detach().float()
    own = torch.ops.quantized.linear_prepack_fp16(weight.detach().float().contiguous(), bias)
    return Packed(functools.partial(fbgemm_linear, weight=own), 2 * weight.numel())


def fbgemm_linear(x: Tensor, weight: Any) -> Tensor:
    return torch.ops.quantized.linear_dynamic_fp16(x.float(), weight).to(x.dtype)


# By the names that a choice among them is kept under.
KERNELS: dict[str, Callable[[Tensor, Tensor | None], Packed]] = {"onednn": packed_by_onednn, "fbgemm": packed_by_fbgemm}


@dataclass(frozen=True)
class Choice:
    """A decision for all linear layers of one kind: the kernel that multiplies few rows. `kernel`: its name in KERNELS,
    over packed weights, or TORCH. `least_rows`: in 16 bits the smallest number of rows whose results do not depend on
    how many there are: 1, or 2 (a lone row is then run twice), or None (no number); in fp32 it says nothing.
    `takes_prompts`: the kernel multiplies the rows of prompts, too."""

    kernel: str
    least_rows: int | None
    takes_prompts: bool = False


def engine() -> str:
    """Returns the name of torch's engine for quantized layers: FBGEMM packs only with the usual one."""
    return str(torch.backends.quantized.engine)


def size_of(group: Group) -> int:
    """Returns the bytes of the weights of a group, as they are."""
    return sum(layer.weight.nbytes for layer in group)


def at_least(least_rows: int, run: Run, x: Tensor, num_rows: int) -> Tensor:
    """Runs rows x (..., K), a single one as often as `least_rows` says."""
    if num_rows >= least_rows:
        return run(x)
    return run(x.reshape(1, -1).expand(least_rows, -1).contiguous())[:1].view(*x.shape[:-1], -1)


def run_with(group: Group, packed: Packed | None = None) -> Run:
    """Returns what multiplies few rows by the weights of a group, packed or as torch has them."""
    if packed is not None:
        return packed.run
    runs = [functools.partial(linear, weight=layer.weight, bias=layer.bias) for layer in group]
    return runs[0] if len(runs) == 1 else lambda x: torch.cat([run(x) for run in runs], dim=-1)


def _joined(tensors: list[Tensor | None]) -> Tensor | None:
    """The weights, or the biases, of a group in one; None where its layers have none."""
    own = [tensor.detach() for tensor in tensors if tensor is not None]
    return (own[0] if len(own) == 1 else torch.cat(own)) if own else None


class Kind(NamedTuple):
    """The kind of a group of layers; groups of one kind share a choice: their weights have the same shapes (N, K) and
    dtype, and fit fp16 or do not."""

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    fits_fp16: bool

    @property
    def kernels(self) -> list[str]:
        return [name for name in KERNELS if name != "fbgemm" or self.fits_fp16]

    def __str__(self) -> str:
        heights, width = "+".join(str(shape[0]) for shape in self.shapes), self.shapes[0][1]
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {heights} x {width}{' that fp16 holds' if self.fits_fp16 else ''}"


def by_kind(groups: list[Group]) -> dict[Kind, list[Group]]:
    """Sorts groups by kind."""
    alike = dict[Kind, list[Group]]()
    for group in groups:
        weights = [layer.weight for layer in group]
        kind = Kind(tuple(weight.shape for weight in weights), weights[0].dtype, all(map(fits_fp16, weights)))
        alike.setdefault(kind, []).append(group)
    return alike


def pack(group: Group, kernel: str) -> Packed | None:
    """Packs the weights of a group for a kernel; None for torch's own. Raises RuntimeError where memory is short, or
    the kernel does not run on this processor."""
    if kernel == TORCH:
        return None
    weight = _joined([layer.weight for layer in group])
    assert weight is not None
    return KERNELS[kernel](weight, _joined([layer.bias for layer in group]))


def choice_for(groups: list[Group], kind: Kind, may_be_known: bool) -> Choice:
    """Returns the choice for groups of a kind, by what was measured on this machine, now or, if it `may_be_known`, by
    an earlier process."""
    name = f"{machine()}, {engine()}, {kind}"
    kept = MEASURED.get(name) if may_be_known else None
    if isinstance(kept, dict) and kept.keys() == {each.name for each in fields(Choice)}:
        are_of_now = kept["kernel"] in (TORCH, *KERNELS) and kept["least_rows"] in LEAST
        if are_of_now and isinstance(kept["takes_prompts"], bool):
            return Choice(**kept)
    choice = _measured(groups, kind.kernels)
    MEASURED.put(name, asdict(choice))
    return choice


def _measured(groups: list[Group], kernels: list[str]) -> Choice:
    """The choice for groups of one kind, by the times that they take with torch's own kernel and with these."""
    first, is_low = groups[0][0], groups[0][0].weight.dtype in LOW
    timed = groups[: max(1, TIMED_BYTES // size_of(groups[0]))]
    ways = {TORCH: [run_with(group) for group in timed]}
    for kernel in kernels:
        with suppress(RuntimeError, AttributeError):  # a processor that it does not know, a torch without it
            runs = [run_with(group, pack(group, kernel)) for group in timed]
            runs[0](_rows(1, first))
            ways[kernel] = runs
    seconds = dict(zip(ways, _seconds(list(ways.values()), first, TIMED_ROWS), strict=True))
    kernel = min(seconds, key=seconds.__getitem__)
    least_rows = _least_rows(ways[kernel], first) if is_low else 1
    if kernel == TORCH:
        return Choice(kernel, least_rows)
    of_prompt, of_own = _seconds((ways[kernel][:1], ways[TORCH][:1]), first, TIMED_PROMPT)
    return Choice(kernel, least_rows, PROMPT_GAIN * of_prompt < of_own)


def _rows(num: int, layer: nn.Linear) -> Tensor:
    values = torch.randn(num, layer.in_features, generator=torch.Generator().manual_seed(num), device="cpu")
    return values.to(layer.weight.dtype)


def _seconds(ways: Sequence[list[Run]], layer: nn.Linear, numbers_of_rows: tuple[int, ...]) -> list[float]:
    """The seconds that layers take one after the other, over all numbers of rows that are timed, by each of the ways to
    run them: the least of several times, as other load only ever makes them longer. The ways take turns, so that such
    load meets all of them."""
    inputs = [_rows(num, layer) for num in numbers_of_rows]
    taken = [[_seconds_of(runs, x) for runs in ways for x in inputs] for _ in range(TIMES + 1)]
    least = [min(times) for times in zip(*taken[1:], strict=True)]  # the first time is not the usual one
    return [sum(least[i : i + len(inputs)]) for i in range(0, len(least), len(inputs))]


def _seconds_of(runs: list[Run], x: Tensor) -> float:
    begin = time.perf_counter()
    for run in runs:
        run(x)
    return time.perf_counter() - begin


def _least_rows(runs: list[Run], layer: nn.Linear) -> int | None:
    """The least number of rows, 1 or 2, from which on a row's result is the same, to the last bit, whatever the other
    rows and their number, up to ALIKE_ROWS, by the numbers that are tried; None where there is none."""
    width = runs[0](_rows(1, layer)).shape[-1]
    num_tried = -(-COMPARED_VALUES // (len(runs) * ALIKE_ROWS * width))
    tried = _rows(num_tried * ALIKE_ROWS, layer).split(ALIKE_ROWS)
    for least_rows in (1, 2):  # of LEAST
        if all(_is_same(run, x, least_rows) for run in runs for x in tried):
            return least_rows
    return None


def _is_same(run: Run, x: Tensor, least_rows: int) -> bool:
    """Returns whether rows x (T, K) give the same one by one, by few sizes and all together."""
    together = run(x)
    parts = ([at_least(least_rows, run, part, len(part)) for part in x.split(size)] for size in COMPARED_SIZES)
    return all(torch.equal(torch.cat(results), together) for results in parts)
