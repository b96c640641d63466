"""Two outcomes compared in everything a caller can see. fp32; B sequences, L tokens, V target vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from eagle31_hf.cache_names import CACHE

# of a tensor's own scale: in fp32, tokens computed together or one by one are 1e-6 apart, a wrong token is tenths
TOLERANCE = 1e-4
TIE = 1e-5  # of the scores' spread: two tokens that close are told apart by rounding alone
# wrappers that round activations to a few bits, so that a difference in the last place may grow to a step
COARSE = {"8 bit": 0.05}


@dataclass
class Difference:
    """`is_tie`: of tokens the target scores so nearly the same that rounding decides."""

    what: str
    is_tie: bool = False

    def __str__(self) -> str:
        return self.what


def differences(each, alone, ours) -> list[Difference]:
    """What of `ours` is not as `alone`, two `trial.Outcome`s of the run `each`; after the tokens differ, nothing else
    is compared."""
    tolerance = COARSE.get(each.trial.choices["wrapper"], TOLERANCE)
    is_layer = each.trial.fault is not None and each.trial.fault[0] in ("target", "drafter")
    fuse = next(iter(ours.notes.fuses.values()), None)
    # without the memory for what only saves time, a call goes on, to the same text
    went_on = fuse is not None and isinstance(fuse.error, torch.OutOfMemoryError) and ours.error is None
    if is_layer and fuse is not None and fuse.has_blown and not went_on:
        # Python itself makes another error of a StopIteration that leaves a generator
        is_it = fuse.error in (ours.error, ours.error.__cause__ if isinstance(fuse.error, StopIteration) else None)
        return [] if is_it else [Difference(f"a failure within a layer came out as {ours.error!r}")]
    if told(ours.error) != told(alone.error):
        return [Difference(f"ended with {told(ours.error)}, alone with {told(alone.error)}")]
    found: list[Difference] = []
    for turn, (mine, other) in enumerate(zip(ours.outputs, alone.outputs, strict=True)):
        found += [
            Difference(f"turn {turn}: {one}", one.is_tie)
            for one in of_outputs(each, mine, other, tolerance, ours.error is not None)
        ]
        if found:
            return found
    found += [Difference(what) for what in of_notes(ours.notes.seen, alone.notes.seen, ours.error is not None)]
    if ours.past is not None and ours.error is None:
        found += [
            Difference(what)
            for what in of_caches("the caller's cache", ours.past, alone.past, tolerance, each.padding())
        ]
    return found


def told(error: BaseException | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {error}"


def of_outputs(each, ours: Any, alone: Any, tolerance: float, failed: bool) -> list[Difference]:
    """`failed`: a later turn did, which had this one's cache: it may have got further on one side."""
    mine, other = (output if isinstance(output, Tensor) else output.sequences for output in (ours, alone))
    if mine.shape != other.shape or not torch.equal(mine, other):
        return [departure(each, mine, other)]
    if type(ours) is not type(alone):
        return [Difference(f"a {type(ours).__name__}, alone a {type(alone).__name__}")]
    if isinstance(ours, Tensor):
        return []
    if list(ours) != list(alone):
        return [Difference(f"fields {list(ours)}, alone {list(alone)}")]
    padding, names = each.padding(), [name for name in ours if not (failed and name == CACHE)]
    return [Difference(what) for name in names for what in of_values(name, ours[name], alone[name], tolerance, padding)]


def departure(each, ours: Tensor, alone: Tensor) -> Difference:
    """Where tokens differ, and by how much the target prefers its own there."""
    what = f"tokens {ours.tolist()}, alone {alone.tolist()}"
    if (
        each.trial.is_sampled
        or each.trial.num_turns > 1
        or each.trial.fault
        or each.trial.choices["extra"] == "config object"
    ):
        return Difference(what)
    again = each.converse(None, return_dict_in_generate=True, output_scores=True).outputs[0]
    scores, given = again.scores, again.sequences.shape[1] - len(again.scores)
    shared = min(ours.shape[1], alone.shape[1])
    places = (ours[:, :shared] != alone[:, :shared]).nonzero()
    if not len(places):
        return Difference(f"{what}: {ours.shape[1]} tokens a sequence instead of {alone.shape[1]}")
    b, place = min(places.tolist(), key=lambda at: at[1])
    step = scores[place - given][b]
    spread = step[step.isfinite()].std()
    margin = float((step[alone[b, place]] - step[ours[b, place]]) / spread)
    limit = COARSE.get(each.trial.choices["wrapper"], TIE)
    return Difference(
        f"{what}: sequence {b}, token {place - given}, preferred by {margin:.1e} of the scores' spread", margin <= limit
    )


def of_values(name: str, ours: Any, alone: Any, tolerance: float, padding: list[int]) -> list[str]:
    """Tensors, caches, and tuples of them however deep; the first difference. `padding`: how many tokens before each
    sequence say nothing."""
    if isinstance(alone, Cache):
        return of_caches(name, ours, alone, tolerance, padding)
    if isinstance(alone, (tuple, list)):
        if not isinstance(ours, (tuple, list)) or len(ours) != len(alone):
            return [f"{name}: {len(ours) if isinstance(ours, (tuple, list)) else ours} parts, alone {len(alone)}"]
        parts = (
            of_values(f"{name}[{i}]", a, b, tolerance, padding)
            for i, (a, b) in enumerate(zip(ours, alone, strict=True))
        )
        return next((found for found in parts if found), [])
    if not isinstance(alone, Tensor):
        return [] if ours == alone else [f"{name}: {ours!r}, alone {alone!r}"]
    if not isinstance(ours, Tensor) or ours.shape != alone.shape or ours.dtype != alone.dtype:
        kinds = [f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x) for x in (ours, alone)]
        return [f"{name}: {kinds[0]}, alone {kinds[1]}"]
    if not alone.is_floating_point():
        return [] if torch.equal(ours, alone) else [f"{name} differs"]
    finite = alone[alone.isfinite()]
    scale = max(float(finite.abs().max()) if len(finite) else 0.0, 1e-6)
    error = (ours.double() - alone.double()).abs().masked_fill(ours == alone, 0.0)
    # a prompt's: (B, L, H), (B, heads, L, keys)
    if alone.dim() > 2 and len(alone) == len(padding) and alone.shape[-2] > 1:
        for b, count in enumerate(padding):
            error[b, ..., :count, :] = 0.0
    if name.startswith("attentions") and alone.shape[-1] > 1:  # a query that sees nothing attends to all slots alike
        error[(alone == alone[..., :1]).all(-1)] = 0.0
    if bool((error <= tolerance * scale).all()):
        return []
    return [f"{name}: differs by {float(error.nan_to_num(torch.inf).max()) / scale:.1e} of its scale"]


def of_caches(name: str, ours: Cache, alone: Cache, tolerance: float, padding: list[int]) -> list[str]:
    """Kinds of layers, lengths, and the keys and values of what is in use and no padding."""
    if type(ours) is not type(alone) or [type(layer) for layer in ours.layers] != [
        type(layer) for layer in alone.layers
    ]:
        return [f"{name}: {type(ours).__name__} of {[type(x).__name__ for x in ours.layers]}"]
    for i, (mine, other) in enumerate(zip(ours.layers, alone.layers, strict=True)):
        if not isinstance(getattr(other, "keys", None), Tensor):
            continue
        lengths = int(mine.get_seq_length()), int(other.get_seq_length())
        if lengths[0] != lengths[1]:
            return [f"{name}: layer {i} holds {lengths[0]} tokens, alone {lengths[1]}"]
        used = min(lengths[1], other.keys.shape[-2])  # a static layer's first slots
        hidden = [max(0, count - (lengths[1] - used)) for count in padding]
        for part in ("keys", "values"):
            pair = [getattr(layer, part)[..., :used, :] for layer in (mine, other)]
            found = of_values(f"{name}: {part} of layer {i}", *pair, tolerance, hidden)
            if found:
                return found
    return []


def of_notes(ours: dict[str, list], alone: dict[str, list], failed: bool) -> list[str]:
    """Compares what every callback saw, in order; before a failure one side may have seen less than the other."""
    found = []
    for who in sorted({*ours, *alone}):
        mine, other = ours.get(who, []), alone.get(who, [])
        if failed:
            shorter = min(len(mine), len(other))
            mine, other = mine[:shorter], other[:shorter]
        if mine != other:
            call = next(
                (i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other))
            )
            shown = [notes[call] if call < len(notes) else "nothing" for notes in (mine, other)]
            found.append(f"{who}, call {call}: shown {shown[0]}, alone {shown[1]}")
    return found
