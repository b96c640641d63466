"""Tries of a target, on a few random tokens, once for every class and attention implementation: whether it can verify
trees."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from ..cache import adopt
from ..cache.arena import Arena, move_into
from ..cache.masks import SlotMask, ancestors_of
from ..cache.states import is_recurrent
from ..cache.transfer import Mirrored
from ..cache_names import cache_argument
from ..kernels.operation import SWITCH
from .ends import execution_device
from .layers import add_loops, rounded_anew
from .masks import MASKLESS, slot_masks, span_masks
from .recurrent import Mixers
from .tree_attention import attention_of_rounds, own_attention

logger = logging.get_logger(__name__)

PREFIX = 6
PARENTS = (-1, 0, 0, 1, 2, 3)  # two branches that go on
ARENA = 128  # slots, more than there are tokens
# Shares of the logits' spread, see `difference`. In fp32 right targets are off by 2e-5 at most, wrong ones by 0.01 and
# more. In lower precision what rounding does depends on the model and the machine's kernels: a target may be off by
# LOW_PRECISION_TOLERANCE, or by ROUNDINGS times as much as it is where a sequence is read in two forwards, as plain
# decoding does. Rounds by other kernels than its own may be off by ANEW times as much as where the same tokens are
# rounded anew: measured were .4 to 1 times as much of SmolLM2 and the demo pair, up to 3.5 of tiny random models.
TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 0.02
ROUNDINGS = 2
OUT_OF_SCALE = 1e30
ANEW = 4
OF_ONE_TOKEN = ("mlp", "moe")  # types of Nemotron-H's layers that read no other token
# types of layers that may see trees: others see differences only in texts that are longer than those tried here
TREE_LAYERS = {"full_attention", "sliding_attention", "hybrid", "hybrid_sliding", *MASKLESS, *OF_ONE_TOKEN}

HIDDEN = (
    "its forward's signature hides position_ids, or prepare_inputs_for_generation drops them (functools.wraps keeps the"
    " signature of a forward)"
)
HOOKED = "it keeps recurrent states, and its modules have hooks, which may look at the rows of what they are given"
NO_SLOTS = "its cache has layers that hold more than keys and values, or is offloaded"

# Errors with which a model's code may fail on what it is given; torch.OutOfMemoryError is a RuntimeError, but says
# nothing of the target.
FAILURES = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError)


class Refusal(str):
    """A verdict read from an error. The next call tries again: the error may have been that of a caller's hook."""


# What tries have found outlives the calls that needed it, by what `_key` says; verdicts by the question, too: why not.
# Threads that race store the same value.
_verdicts: dict[tuple, str | None] = {}
_slot_bytes: dict[tuple, int] = {}


def why_no_trees(
    target: PreTrainedModel, is_told_positions: bool = True, is_in_slots: bool = True, is_hooked: bool = False
) -> str | None:
    """Returns None where trees are verified as sequences would be, else the reason, logged the first time it is found.

    `is_told_positions`: whether `generate` hands positions to its forward; one that a user has wrapped may hide that it
    takes them. `is_in_slots`: whether its cache can keep tokens where they are written, as `cache.adopt` says.
    `is_hooked`: whether it keeps recurrent states and has hooks of others.
    """
    given = is_told_positions, is_in_slots, is_hooked

    def find() -> str | None:
        why_not = NO_SLOTS if not is_in_slots else HOOKED if is_hooked else None
        return why_not or _try_trees(target) or (None if is_told_positions else HIDDEN)

    return _verdict("chains instead of trees", target, given, find)


def _verdict(
    meaning: str, target: PreTrainedModel, given: tuple[bool, ...], find: Callable[[], str | None]
) -> str | None:
    """Returns what is known, or is now found; `given`: what else the answer depends on."""
    key = meaning, given, *_key(target)
    known = _verdicts.get(key)
    if key not in _verdicts or isinstance(known, Refusal):
        _verdicts[key] = find()
        if _verdicts[key] not in (None, known):
            logger.warning("EAGLE drafting: %s for %s: %s.", meaning, type(target).__name__, _verdicts[key])
    return _verdicts[key]


def _key(target: PreTrainedModel) -> tuple:
    """Returns what two targets have to have alike for a try of one to be one of the other."""
    config = target.config.get_text_config(decoder=True).to_json_string(use_diff=False)
    kernels = target.device.type, os.environ.get(SWITCH)
    return type(target), own_attention(target), target.dtype, kernels, config


def _try_trees(target: PreTrainedModel) -> str | None:
    implementation, config = own_attention(target), target.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    if implementation not in ("eager", "sdpa"):
        return f"attention implementation {implementation} takes no mask of a tree"
    if kinds - TREE_LAYERS:
        return f"layers of type {', '.join(sorted(kinds - TREE_LAYERS))}"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "its windows go by row of the cache, not by position"  # GPT-Neo; seen only past the window
    return _judged(
        target, _error, "its forward refuses a tree", "its logits over a tree differ from those over its paths"
    )


def why_no_spans(target: PreTrainedModel) -> str | None:
    """Returns None where the target reads a tree from an arena, by masks of spans, as it reads sequences, else the
    reason, logged the first time it is found."""

    def find() -> str | None:
        return _judged(
            target,
            lambda target: _error(target, tree_from_arena),
            "its forward refuses to read a tree from an arena",
            "its logits over a tree in an arena differ from those over its paths",
            _rounding_anew,
        )

    return _verdict("rounds are not captured", target, (), find)


def bytes_of_a_slot(target: PreTrainedModel) -> int:
    """Returns the bytes of one token's keys and values in all layers of an arena, as `why_no_spans` found them:
    of latent attention those of the latent."""
    return _slot_bytes[_key(target)]


def _judged(
    target: PreTrainedModel,
    error_of: Callable[[PreTrainedModel], float],
    refuses: str,
    differs: str,
    most: Callable[[PreTrainedModel], float] | None = None,
) -> str | None:
    """Returns None where the error is one of rounding, as `is_rounding` says, `most` being by default `_rounding`. An
    exception that comes again is a `Refusal`; one that does not was not the target's, and is raised."""
    failures = dict[tuple[type, str], Exception]()  # that have come once
    for _ in range(3):
        try:
            error = error_of(target)
            break
        except FAILURES as failure:
            if isinstance(failure, torch.OutOfMemoryError):
                raise
            kind = type(failure), str(failure)
            if failures.pop(kind, None) is not None:
                if failures:
                    break
                return Refusal(f"{refuses} ({type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:100]})")
            failures[kind] = failure
    if failures:
        raise next(iter(failures.values()))
    is_same = is_rounding(target, error, lambda: (most or _rounding)(target))
    return None if is_same else f"{differs} ({error:.1g} of their spread)"


def is_rounding(target: PreTrainedModel, error: float, most: Callable[[], float]) -> bool:
    """Returns whether an error of a target's logits, as a share of their spread, is one of rounding. `most`: gives what
    rounding may come to in lower precision than fp32, asked only where the error is not small."""
    is_low = target.dtype in (torch.bfloat16, torch.float16)
    if error <= (LOW_PRECISION_TOLERANCE if is_low else TOLERANCE):
        return True
    return is_low and math.isfinite(error) and error <= most()


def difference(got: Tensor, expected: Tensor, is_told: Tensor | None = None) -> float:
    """Returns the largest root mean square of a token's differences (..., V), as a share of the spread of all that is
    expected. Tokens (...) that are not told, and values that are expected to be out of any scale, as those of masked
    ids, are left out. The largest of single differences would grow with the vocabulary."""
    got, expected = got.float(), expected.float()
    counts = expected.abs() < OUT_OF_SCALE  # NaN is not
    spread = expected[counts].std(correction=0).clamp(min=1e-6) if bool(counts.any()) else 1.0
    squares = torch.where(counts, (got - expected).square(), 0.0).sum(-1) / counts.sum(-1).clamp(min=1)
    errors = squares.sqrt().nan_to_num(nan=float("inf"))
    return float((errors if is_told is None else torch.where(is_told, errors, 0.0)).amax() / spread)


@torch.no_grad()
def _rounding(target: PreTrainedModel) -> float:
    """Measures what rounding does to a target's logits, as a share of their spread: the difference between a sequence
    that is read at once and one that is read in two forwards, or token by token where there are recurrent states.
    Returns the most that is taken for rounding, ROUNDINGS times as much."""
    ids, cache = drawn_ids(target), empty_cache(target)
    step = 1 if is_recurrent(cache) else len(PARENTS)
    found = []
    for begin in (0, *range(PREFIX, ids.shape[1], step)):
        end = begin + step if begin else PREFIX
        out = target(
            input_ids=ids[:, begin:end],
            attention_mask=torch.ones_like(ids[:, :end]),
            use_cache=True,
            **cache_argument(target.forward, cache),
        )
        found.append(out.logits)
    whole = target(input_ids=ids, use_cache=False).logits[:, PREFIX:]
    return ROUNDINGS * difference(torch.cat(found[1:], dim=1), whole)


@torch.no_grad()
def _rounding_anew(target: PreTrainedModel) -> float:
    """Measures what other rounding of the same sums does to a target's logits, as a share of their spread. Returns the
    most that is taken for rounding where other kernels than its own read a sequence, ANEW times as much."""
    ids = drawn_ids(target)
    expected = target(input_ids=ids, use_cache=False).logits[:, PREFIX:]
    with rounded_anew(target):
        return ANEW * difference(target(input_ids=ids, use_cache=False).logits[:, PREFIX:], expected)


@dataclass
class Tree:
    """A tree of random tokens after a random text: `prefix` (1, PREFIX), `nodes` (1, N), which nodes each of them sees
    (1, N, N), and their depths (1, N)."""

    prefix: Tensor
    nodes: Tensor
    visible: Tensor
    depths: Tensor


def drawn_ids(target: PreTrainedModel) -> Tensor:
    """The ids (1, PREFIX + N) that targets are tried on, the same on every device."""
    num_ids = target.config.get_text_config(decoder=True).vocab_size
    shape = 1, PREFIX + len(PARENTS)
    drawn = torch.randint(0, num_ids, shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return drawn.to(execution_device(target.get_input_embeddings()))


def random_tree(target: PreTrainedModel) -> Tree:
    """The tree that targets are tried on."""
    draw = drawn_ids(target)
    ancestors = ancestors_of(torch.tensor([PARENTS[1:]], device=draw.device), depth=len(PARENTS))
    return Tree(draw[:, :PREFIX], draw[:, PREFIX:], ancestors, ancestors.sum(2) - 1)


def empty_cache(target: PreTrainedModel) -> DynamicCache:
    """An empty cache for a target, with the layers of later runs of a looped one."""
    config = target.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    add_loops(cache, config)
    return cache


def tree_in_slots(target: PreTrainedModel, tree: Tree) -> Tensor:
    """The target's logits (1, N, V) over a tree, by a mask of four dimensions."""
    cache = empty_cache(target)
    given = cache_argument(target.forward, cache) | {"use_cache": True}
    with Mixers(target, cache) as mixers:
        with mixers.finding():
            target(input_ids=tree.prefix, **given)
        adopt.crop(cache, 0)
        mask = SlotMask(Mirrored([PREFIX]), tree.visible, tree.depths, tree.depths)
        with mixers.verifying(1, len(PARENTS), [[*PARENTS[1:]]]):
            return target(
                input_ids=tree.nodes,
                position_ids=PREFIX + tree.depths,
                attention_mask=slot_masks(target, cache, mask),
                **given,
            ).logits


def tree_from_arena(target: PreTrainedModel, tree: Tree) -> Tensor:
    """The target's logits (1, N, V) over a tree, read from an arena by masks of spans."""
    cache = empty_cache(target)
    given = cache_argument(target.forward, cache)
    starts = torch.full_like(tree.depths[:, :1], PREFIX)
    bits = (tree.visible.long() << torch.arange(len(PARENTS), device=starts.device)).sum(2)
    with adopt.slots(cache, ARENA) as placement, Mixers(target, cache) as mixers:
        if placement is None:
            raise ValueError(f"its {type(cache).__name__} has layers that are not attention's")
        arena = Arena(ARENA)
        placement = move_into(cache, arena)
        with mixers.finding():
            target(input_ids=tree.prefix, use_cache=True, **given)
        _slot_bytes[_key(target)] = arena.num_bytes() // ARENA
        placement.on_device = starts
        places, begin = starts + tree.depths, torch.zeros_like(starts)
        with attention_of_rounds(target), mixers.verifying(1, len(PARENTS), [[*PARENTS[1:]]]):
            return target(
                input_ids=tree.nodes,
                position_ids=places,
                use_cache=True,
                attention_mask=span_masks(target, starts, begin, places, bits, mixers.is_needed),
                **given,
            ).logits


@torch.no_grad()
def _error(target: PreTrainedModel, logits_of: Callable[[PreTrainedModel, Tree], Tensor] = tree_in_slots) -> float:
    """The `difference` of logits between a tree and its paths taken one by one."""
    tree = random_tree(target)
    logits = logits_of(target, tree)[0].float()
    reference = torch.zeros_like(logits)
    for leaf in set(range(len(PARENTS))) - set(PARENTS):
        path = tree.visible[0, leaf]
        reference[path] = _read(target, tree.prefix, tree.nodes[:, path])[0].float()
    return difference(logits, reference)


def _read(target: PreTrainedModel, prefix: Tensor, new: Tensor) -> Tensor:
    """The target's logits (1, n, V) for the tokens `new` (1, n) after a prefix: one by one, as plain decoding reads
    them, where states tell it from reading all at once."""
    cache = empty_cache(target)
    if not is_recurrent(cache):
        ids = torch.cat((prefix, new), dim=1)
        return target(input_ids=ids, use_cache=False).logits[:, prefix.shape[1] :]
    given = cache_argument(target.forward, cache) | {"use_cache": True}
    target(input_ids=prefix, **given)
    here = torch.tensor([[prefix.shape[1]]], device=new.device)
    each = [target(input_ids=new[:, i : i + 1], position_ids=here + i, **given).logits for i in range(new.shape[1])]
    return torch.cat(each, dim=1)
