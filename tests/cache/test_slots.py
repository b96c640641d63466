"""A cache within `slots` holds what the stock layers would hold, at less copying, and gives it back as stock layers.
What calls of `generate` leave in it is compared in `generation/test_cases.py`.

B sequences, R tokens written at once, H heads, D head size.
"""

import random
from contextlib import nullcontext

import pytest
import torch
from close import assert_close
from committed import commit_of, keep
from draftings import DRAFTINGS, steady_clock
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    QuantizedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from eagle31_hf import track_acceptance
from eagle31_hf.cache.adopt import is_adoptable, key_span, settle, slot_cache, slots
from eagle31_hf.cache.arena import Arena
from eagle31_hf.cache.layer import BLOCK, HEADROOM, Placement, SlotLayer
from eagle31_hf.cache.states import HAS_METHODS, holds_states
from eagle31_hf.cache.transfer import Mirrored

CPU = torch.device("cpu")
HEADS, KEY_SIZE, VALUE_SIZE = 2, 3, 5
WINDOW, LIMIT = 6, 67
LAYERS = {
    "dynamic": DynamicLayer,
    "sliding": lambda: DynamicSlidingWindowLayer(WINDOW),
    "static": lambda: StaticLayer(LIMIT),
    "static_sliding": lambda: StaticSlidingWindowLayer(LIMIT, WINDOW),
}


def states(num_sequences: int, count: int) -> tuple[Tensor, Tensor]:
    """New keys and values (B, H, R, D)."""
    shape = num_sequences, HEADS, count
    return torch.randn(*shape, KEY_SIZE), torch.randn(*shape, VALUE_SIZE)


def one(pair: tuple[Tensor, Tensor], b: int, places) -> tuple[Tensor, Tensor]:
    return pair[0][b : b + 1, :, places], pair[1][b : b + 1, :, places]


def joined(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([part[0] for part in parts], dim=2), torch.cat([part[1] for part in parts], dim=2)


def stock_layer(kind: str, text: tuple[Tensor, Tensor]):
    """A layer of that kind that got the tokens of one sequence one at a time."""
    layer = LAYERS[kind]()
    for i in range(text[0].shape[2]):
        layer.update(*one(text, 0, slice(i, i + 1)))
    return layer


def random_path(draw: random.Random, count: int) -> list[int]:
    """Some nodes of a forward, the root first."""
    return [0, *sorted(draw.sample(range(1, count), draw.randint(0, count - 1)))]


# --- against stock layers ---


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["dynamic", "sliding"])
def test_rounds_of_equally_long_sequences_equal_those_of_a_stock_layer(kind, seed):
    """Appending and taking back: the same keys are seen, and the model is told the same sizes to build its mask by."""
    draw, stock, cache = random.Random(seed), LAYERS[kind](), Cache(layers=[LAYERS[kind]()])
    torch.manual_seed(seed)
    stock.record_past = True
    with slots(cache, 400):
        for _ in range(40):
            count = draw.choice([1, 1, 2, 5, 7, 12])
            kept, new, length = draw.randint(1, count), states(2, count), stock.get_seq_length()
            assert cache.get_seq_length() == length
            assert cache.get_mask_sizes(count, 0) == stock.get_mask_sizes(count)
            assert_close("keys and values seen", cache.update(*new, 0), stock.update(*new))
            keep(cache, [length] * 2, [list(range(kept))] * 2)
            stock.crop(kept - count)
    assert_close("keys at the end", cache.layers[0].keys, stock.keys)
    assert_close("values at the end", cache.layers[0].values, stock.values)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", LAYERS)
def test_sequences_at_their_own_pace(kind, seed):
    """Every sequence sees its own text and the new tokens, however far the others are, and whatever is kept of what was
    written before."""
    draw, cache, texts = random.Random(seed), Cache(layers=[LAYERS[kind]()]), []
    torch.manual_seed(seed)
    window = WINDOW if "sliding" in kind else None
    with slots(cache, LIMIT) as placement:
        prompt, ended = states(3, draw.choice([1, 4, 11])), [False] * 3
        placement.is_final = True
        cache.update(*prompt, 0)
        placement.is_final = False
        texts = [one(prompt, b, slice(None)) for b in range(3)]
        while not all(ended):
            starts, count = [text[0].shape[2] for text in texts], draw.choice([1, 2, 4, 9])
            going = [start for start, end in zip(starts, ended, strict=True) if not end]
            if max(going) + count > LIMIT:
                break
            new = states(3, count)
            paths = [[] if end else random_path(draw, count) for end in ended]
            placement.place(Mirrored(starts), count, CPU, commit_of(paths))
            seen, (first, end) = cache.update(*new, 0), key_span(cache, going, count, window)
            placement.clear()
            assert seen[0].shape[2] == seen[1].shape[2] == end - first
            for b in (b for b in range(3) if not ended[b]):
                nearest = max(0, starts[b] + 1 - window) if window else 0
                whole, places = joined(texts[b], one(new, b, slice(None))), slice(nearest, starts[b] + count)
                assert_close(
                    f"sequence {b} of {starts}",
                    one(seen, b, slice(nearest - first, places.stop - first)),
                    one(whole, 0, places),
                )
            keep(cache, starts, paths)
            texts = [joined(text, one(new, b, path)) for b, (text, path) in enumerate(zip(texts, paths, strict=True))]
            ended = [end or draw.random() < 0.04 for end in ended]
    (layer,), longest = cache.layers, max(text[0].shape[2] for text in texts)
    assert type(layer) is type(LAYERS[kind]())
    assert int(layer.get_seq_length()) == longest
    for b, text in enumerate(texts):
        if text[0].shape[2] == longest and not ended[b]:  # of the others a stock layer knows nothing
            stock = stock_layer(kind, text)
            held = slice(0, longest if kind == "static" else None)
            assert_close("keys given back", layer.keys[b : b + 1, :, held], stock.keys[:, :, held])
            assert_close("values given back", layer.values[b : b + 1, :, held], stock.values[:, :, held])


def write_round(cache: Cache, placement: Placement, starts: list[int], path: list[int]) -> tuple[Tensor, Tensor]:
    """Four tokens of two sequences, of which the first has ended and the second keeps `path`; returns what was kept."""
    new = states(2, 4)
    placement.place(Mirrored(starts), 4, CPU, commit_of([[], path]))
    cache.update(*new, 0)
    placement.clear()
    keep(cache, starts, [[], path])
    return one(new, 1, path)


@pytest.mark.parametrize("kind", ["dynamic", "sliding"])
def test_a_sequence_that_ended_long_ago_is_in_nobodys_way(kind):
    """A window moves on from it, and no more memory is held than without it."""
    cache = Cache(layers=[LAYERS[kind]()])
    with slots(cache, 2000) as placement:
        cache.update(*(prompt := states(2, 3)), 0)
        keep(cache, [0, 0], [[0, 1, 2]] * 2)
        text = one(prompt, 1, slice(None))
        for _ in range(200):
            text = joined(text, write_round(cache, placement, [3, text[0].shape[2]], [0, 2, 3]))
        (layer,) = cache.layers
        assert kind == "dynamic" or layer.buffers[0].shape[2] <= WINDOW + 4 + HEADROOM
    (layer,) = cache.layers
    count = layer.keys.shape[2]
    assert int(layer.get_seq_length()) == text[0].shape[2]
    assert_close("keys and values", one((layer.keys, layer.values), 1, slice(None)), one(text, 0, slice(-count, None)))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_sequence_that_ended_at_the_last_slot_is_in_nobodys_way(kind):
    """The others go on in the slots before it."""
    cache = Cache(layers=[LAYERS[kind]()])
    with slots(cache, LIMIT) as placement:
        cache.update(*(prompt := states(2, LIMIT)), 0)
        keep(cache, [0, 0], [list(range(LIMIT)), list(range(50))])
        kept = write_round(cache, placement, [LIMIT, 50], [0, 2])
        keep(cache, [LIMIT, 52], [[], []])
        (layer,) = cache.layers
        assert cache.get_seq_length() == LIMIT
        assert_close(
            "kept", tuple(buffer[1:, :, 50 - layer.first : 52 - layer.first] for buffer in layer.buffers), kept
        )
        ended = tuple(buffer[:1, :, : LIMIT - layer.first] for buffer in layer.buffers)
        assert_close("of the ended one", ended, one(prompt, 0, slice(layer.first, None)))


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("seed", range(2))
def test_what_a_drafter_writes_on_is_forgotten(seed, window):
    """Levels of a tree stand side by side in the text but one after the other in the cache; after it only what was read
    is left."""
    draw, placement = random.Random(seed), Placement()
    torch.manual_seed(seed)
    layer = SlotLayer(placement, window=window)
    texts = [(torch.empty(1, HEADS, 0, KEY_SIZE), torch.empty(1, HEADS, 0, VALUE_SIZE))] * 2
    for _ in range(12):
        counts, new = [draw.randint(0, 5), draw.randint(1, 5)], states(2, 5)
        lengths = [text[0].shape[2] for text in texts]
        placement.place(Mirrored(lengths), 5, CPU)
        layer.update(*new)
        texts = [joined(text, one(new, b, slice(0, counts[b]))) for b, text in enumerate(texts)]
        lengths = [text[0].shape[2] for text in texts]
        layer.settle(max(lengths))
        tree, width = [], draw.randint(1, 4)
        for level in range(draw.randint(0, 4)):
            tree.append(states(2, width))
            starts = [length + level * width for length in lengths]
            placement.place(Mirrored(starts), width, CPU)
            placement.low = min(lengths)
            seen = layer.update(*tree[-1])
            first = 0 if window is None else max(0, min(lengths) - window + 1)
            for b, text in enumerate(texts):
                whole = joined(text, *(one(part, b, slice(None)) for part in tree))
                nearest = 0 if window is None else max(0, lengths[b] - window + 1)
                got = one(seen, b, slice(nearest - first, starts[b] + width - first))
                assert_close(f"sequence {b} at level {level}", got, one(whole, 0, slice(nearest, None)))
        layer.settle(max(lengths))
        assert layer.get_seq_length() == max(lengths)


def test_layers_of_a_drafter_have_the_windows_of_its_config(make_target, make_drafter):
    cache, placement = slot_cache(make_drafter(make_target(), "window_4").config)
    assert [(layer.window, layer.fixed, layer.placement is placement) for layer in cache.layers] == [(4, False, True)]


# --- memory ---


class FreshTensors(TorchDispatchMode):
    """Notes how many numbers each operation writes to memory of its own: views and writes in place count nothing."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage().data_ptr()
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        fresh = [x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, Tensor)]
        self.sizes += [x.numel() for x in fresh if x.untyped_storage().data_ptr() not in given]
        return output


def address(layer: SlotLayer) -> tuple[int, ...]:
    return tuple(buffer.data_ptr() for buffer in layer.buffers)


@pytest.mark.parametrize("ragged", [False, True])
def test_within_its_capacity_a_buffer_stays_and_nothing_of_it_is_copied(ragged):
    """A cache that is rebuilt every step costs as much as the text is long, every step."""
    layer, length = SlotLayer(Placement()), 300
    cache = Cache(layers=[layer])
    cache.update(*states(2, length), 0)
    home, few = address(layer), 2 * HEADS * VALUE_SIZE * 16
    with FreshTensors() as fresh:
        for _ in range(HEADROOM // 4):
            starts = [length, length - ragged]
            layer.placement.place(Mirrored(starts), 3, CPU)
            cache.update(*states(2, 3), 0)
            layer.placement.clear()
            keep(cache, starts, [[0, 2]] * 2)
            length += 2
    assert address(layer) == home
    assert max(fresh.sizes) <= few, "something as large as the text was copied"


def test_a_long_text_is_moved_a_number_of_times_that_grows_with_its_logarithm():
    layer, capacities = SlotLayer(Placement()), []
    for _ in range(4000):
        layer.update(*states(1, 2))
        capacities.append(layer.buffers[0].shape[2])
    assert len(set(capacities)) <= 16
    assert len(set(capacities[2000:])) <= 5, (
        "twice the text took more than the four moves of buffers that grow by a quarter"
    )


def test_where_the_end_is_known_memory_is_taken_once():
    """Nor more of it than will be used, in whole blocks."""
    layer = SlotLayer(Placement(), limit=200)
    layer.update(*states(1, 3))
    home = address(layer)
    for _ in range(197):
        layer.update(*states(1, 1))
    assert address(layer) == home
    assert layer.buffers[0].shape[2] == 200 + -200 % BLOCK


@pytest.mark.parametrize("count", [1, 3, 10], ids="{}_at_once".format)
def test_a_window_bounds_the_memory_of_a_long_text(count):
    """Old slots are given up, and their place is used again, however much is written at once."""
    layer, homes, text = SlotLayer(Placement(), limit=10**6, window=WINDOW), set(), states(1, 0)
    for step in range(1500):
        text = joined(text, states(1, count))
        seen = layer.update(*one(text, 0, slice(text[0].shape[2] - count, None)))
        assert_close("keys and values seen", seen, one(text, 0, slice(-(WINDOW - 1 + count), None)))
        layer.settle(layer.end - count // 2)
        text = one(text, 0, slice(-2 * WINDOW - count, text[0].shape[2] - count // 2))
        if step > 100:
            homes.add(address(layer))
        assert layer.buffers[0].shape[2] <= WINDOW + count + HEADROOM
    assert len(homes) == 1, "the buffer of a window is still being moved"


def test_of_a_prompt_longer_than_the_window_the_end_is_kept():
    """And all of it is seen once: its tokens attend to each other. What came before it is seen as far as the window
    reaches."""
    layer = SlotLayer(Placement(is_final=True), window=WINDOW)
    first, second = states(2, 4), states(2, 500)
    layer.update(*first)
    assert_close("seen", layer.update(*second), joined(first, second))
    assert layer.buffers[0].shape[2] == WINDOW - 1
    assert_close("kept", tuple(layer.held(WINDOW - 1)), tuple(new[:, :, 1 - WINDOW :] for new in second))
    assert layer.end == 504


def test_a_fixed_buffer_is_the_callers_and_never_moves():
    cache = Cache(layers=[StaticLayer(LIMIT)])
    (stock,) = cache.layers
    stock.update(*states(2, 5))
    home = stock.keys.data_ptr(), stock.values.data_ptr()
    with slots(cache, LIMIT):
        for end in range(6, LIMIT + 1):
            seen = cache.update(*states(2, 1), 0)
            assert (seen[0].data_ptr(), seen[1].data_ptr()) == home
            assert seen[0].shape[2] == cache.get_mask_sizes(1, 0)[0] == LIMIT
            assert cache.get_seq_length() == end
    assert (stock.keys.data_ptr(), stock.values.data_ptr()) == home
    assert int(stock.get_seq_length()) == LIMIT


# --- given back ---


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("filled", [0, 9], ids=["empty", "filled"])
def test_layers_come_back_also_on_error(kind, filled):
    """With what was accepted before it, as a stock layer would have it."""
    layer, new = LAYERS[kind](), states(1, 12)
    cache = Cache(layers=[layer])

    def write() -> None:
        for i in range(filled, 12):
            cache.update(*one(new, 0, slice(i, i + 1)), 0)
            keep(cache, [i], [[0]])

    if filled:
        cache.update(*one(new, 0, slice(0, filled)), 0)
    with pytest.raises(KeyError), slots(cache, LIMIT):
        raise_after(write)
    assert cache.layers == [layer]
    assert_holds(layer, kind, new)


@pytest.mark.parametrize("kind", LAYERS)
def test_an_error_takes_back_what_was_not_accepted(kind):
    """A caller who catches it and goes on with his text and his cache would be answered as if he had said the
    drafts."""
    layer, new = LAYERS[kind](), states(1, 12)
    cache = Cache(layers=[layer])

    def write() -> None:
        cache.update(*one(new, 0, slice(0, 9)), 0)
        keep(cache, [0], [list(range(9))])
        cache.update(*one(new, 0, slice(9, 12)), 0)

    with pytest.raises(KeyError), slots(cache, LIMIT):
        raise_after(write)
    assert_holds(layer, kind, one(new, 0, slice(0, 9)))


def raise_after(function) -> None:
    function()
    raise KeyError


def assert_holds(layer, kind: str, text: tuple[Tensor, Tensor]) -> None:
    """A stock layer with what it holds of one sequence's text."""
    stock, length = stock_layer(kind, text), text[0].shape[2]
    held = slice(0, length if kind == "static" else None)
    assert int(layer.get_seq_length()) == int(stock.get_seq_length()) == length
    assert_close("keys", layer.keys[:, :, held], stock.keys[:, :, held])
    assert_close("values", layer.values[:, :, held], stock.values[:, :, held])


def test_layers_made_on_the_way_are_stock_layers(make_target, make_drafter, prompt):
    """A `DynamicCache()` makes its layers when a forward asks for them, during the call and after it."""
    target = make_target()
    past = DynamicCache()
    knobs = {"assistant_model": make_drafter(target), "max_new_tokens": 17, **DRAFTINGS["chain"]}
    target.generate(prompt, past_key_values=past, do_sample=False, **knobs)
    assert {type(layer) for layer in past.layers} == {DynamicLayer}
    assert past.layer_class_to_replicate is DynamicLayer
    assert len(past.layers) == target.config.num_hidden_layers


class Rounded(QuantizedLayer):
    """A quantized layer whose grid is fine enough to lose nothing."""

    def _quantize(self, tensor, *_):
        return tensor

    def _dequantize(self, tensor):
        return tensor


NOT_ADOPTED = {
    "quantized": lambda: Cache(layers=[DynamicLayer(), Rounded()]),
    "indexed": lambda: Cache(layers=[DynamicIndexedLayer()]),
    "offloaded": lambda: Cache(layers=[DynamicLayer(), DynamicLayer()], offloading=True),
    "offloaded_later": lambda: Cache(layer_class_to_replicate=DynamicLayer, offloading=True),
    "indexed_later": lambda: Cache(layer_class_to_replicate=DynamicIndexedLayer),
}


@pytest.mark.parametrize("name", NOT_ADOPTED)
def test_layers_of_other_kinds_are_left_alone(name):
    """They keep more than keys, or keep them elsewhere; what derives from a stock layer is not one."""
    cache = NOT_ADOPTED[name]()
    layers, found, replicated = cache.layers, list(cache.layers), cache.layer_class_to_replicate
    assert not is_adoptable(cache)
    with slots(cache, LIMIT) as placement:
        assert placement is None
        assert cache.layers is layers
        assert cache.layers == found
        assert cache.layer_class_to_replicate is replicated
    assert cache.layers is layers
    assert cache.layers == found


@pytest.mark.skipif(not HAS_METHODS, reason="transformers before 5.21 reads states in another way")
@pytest.mark.parametrize("has_failed", [False, True])
def test_states_stay_with_their_layers(has_failed):
    """Beside layers with keys, and in them; after an error before a token is accepted they are what they were."""
    hybrid = cache_utils.LinearAttentionAndFullAttentionLayer()
    cache = Cache(layers=[hybrid, LinearAttentionLayer(), DynamicLayer()])
    stock, before, after = list(cache.layers), torch.ones(1, 2, 3), torch.full((1, 2, 3), 2.0)
    for index in (0, 1):
        cache.update_recurrent_state(before, index)
        cache.update_conv_state(before, index)
    with nullcontext() if not has_failed else pytest.raises(KeyError), slots(cache, LIMIT) as placement:
        assert placement is not None
        assert holds_states(cache.layers[0])
        for index in (0, 1):
            assert_close("state", cache.get_recurrent_state(index), before)
            cache.update_recurrent_state(after, index)
        for index in (0, 2):
            cache.update(*states(1, 4), index)
        if has_failed:
            raise KeyError
        settle(cache, 4)
    assert cache.layers == stock
    for index in (0, 1):
        assert_close("state", cache.get_recurrent_state(index), before if has_failed else after)
    assert cache.get_seq_length() == cache.layers[2].get_seq_length() == (0 if has_failed else 4)


def test_windowed_layers_beside_them_keep_what_may_have_to_come_back():
    cache = Cache(layers=[DynamicSlidingWindowLayer(WINDOW), DynamicIndexedLayer()])
    cache.layers[0].update(*states(1, 9))
    with slots(cache, LIMIT):
        cache.layers[0].update(*(kept := states(1, 4)))
        cache.layers[0].crop(-3)
    assert cache.layers[0].get_seq_length() == 10
    assert_close("last key", cache.layers[0].keys[:, :, -1:], kept[0][:, :, :1])
    assert not cache.layers[0].record_past


def test_layers_of_an_arena_lie_in_the_stacks_of_their_window():
    """A layer of other heads than those of its window has its own."""
    arena = Arena(16, num_rows=2)
    arena.windows = {0: None, 1: 8, 2: None, 3: None}
    found = {
        i: arena.of_layer(i, (torch.ones(1, heads, 3, 4), torch.ones(1, heads, 3, 5)))
        for i, heads in ((0, 2), (3, 1), (1, 2), (2, 2))
    }
    assert [tuple(stack.shape[:3]) for stack in arena.stacks] == 2 * [(3, 2, 2)] + 2 * [(1, 2, 1)] + 2 * [(1, 2, 2)]
    for i, buffers in found.items():
        assert arena.of_layer(i, buffers) is buffers
        assert all(buffer.is_contiguous() and not buffer.any() for buffer in buffers)
        for buffer in buffers:
            buffer.fill_(1.0)
    assert sum(int(stack.sum()) for stack in arena.stacks) == sum(
        each.numel() for two in found.values() for each in two
    )


def test_auto_drafts_trees_by_the_steady_clock(target, drafter, prompt):
    """Else a good part of these tests would not test what they are for."""
    with steady_clock(target, drafter), track_acceptance() as stats:
        target.generate(prompt, assistant_model=drafter, max_new_tokens=25, do_sample=False, **DRAFTINGS["auto"])
    assert stats.choices["plain"] > 0
    assert stats.choices["of chains"] > 0
    assert stats.choices["of trees"] > 0
