"""Tokens are taken back from layers that compress keys as if they had never been there."""

import copy
import random
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

sys.path.append(str(Path(__file__).parents[1] / "generation"))

from recurrent_families import COMPRESSED

from eagle31_hf.cache import adopt
from eagle31_hf.cache.compressed import METHODS, compresses, recording
from eagle31_hf.cache_names import CACHE
from eagle31_hf.checking.trial import build_drafter

if not hasattr(transformers, COMPRESSED[0]):
    pytest.skip(f"this transformers has no {COMPRESSED[0]}", allow_module_level=True)
RECORDING = ("crop", "accept", *METHODS)  # what a recorder puts into a layer
VOCAB, BATCH, MOST = 29, 2, 12  # MOST: tokens of a forward, which fill up to four windows
NUM_LAYERS = len(COMPRESSED[1]["layer_types"])


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config_class, fields = COMPRESSED
    config = getattr(transformers, config_class)(vocab_size=VOCAB, initializer_range=0.5, pad_token_id=None, **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@torch.no_grad()
def read(target, cache, ids):
    return target(input_ids=ids, past_key_values=cache, use_cache=True).logits


def assert_same(ours, plain):
    """Alike but for rounding, as the same tokens come in forwards of other lengths."""
    if isinstance(plain, dict):
        names = plain.keys() - {"record_past"}
        assert names == ours.keys() - {"record_past", *RECORDING}
        for name in names:
            assert_same(ours[name], plain[name])
    elif isinstance(plain, torch.Tensor) and plain.numel():
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-4 * float(plain.abs().max()))
    elif not isinstance(plain, torch.Tensor):
        assert ours == plain


def assert_same_layers(cache, plain, kinds=lambda layer: True):
    for ours, other in zip(filter(kinds, cache.layers), filter(kinds, plain.layers), strict=True):
        assert_same(vars(ours), vars(other))


@pytest.mark.parametrize("seed", range(6))
def test_what_is_taken_back_was_never_there(target, seed):
    """Forwards of random lengths, of which random numbers of tokens are taken back, beside forwards over the others."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    cache, plain = (DynamicCache(config=target.config) for _ in range(2))
    with adopt.slots(cache, 0) as placement:
        assert placement is None
        prompt = torch.randint(0, VOCAB, (BATCH, draw.randint(1, 9)))
        read(target, cache, prompt)
        read(target, plain, prompt)
        adopt.crop(cache, 0)
        for _ in range(8):
            ids = torch.randint(0, VOCAB, (BATCH, draw.randint(1, MOST)))
            kept = draw.randint(0, ids.shape[1])
            ours = read(target, cache, ids)
            adopt.crop(cache, ids.shape[1] - kept)
            if kept:
                alone = read(target, plain, ids[:, :kept])
                torch.testing.assert_close(ours[:, :kept], alone, rtol=0, atol=1e-4 * float(alone.std()))
    assert_same_layers(cache, plain)
    assert not any(name in vars(layer) for layer in cache.layers for name in RECORDING)


@pytest.mark.parametrize("num_layers_run", range(NUM_LAYERS))
def test_after_an_error_the_accepted_tokens_are_there(target, num_layers_run):
    """A forward fails in a layer; those before it have read its tokens."""
    cache, plain = (DynamicCache(config=target.config) for _ in range(2))
    ids = torch.arange(22).expand(BATCH, -1) % VOCAB
    read(target, plain, ids[:, :9])

    def fail(module, args):
        raise ZeroDivisionError

    def draft():
        with adopt.slots(cache, 0):
            read(target, cache, ids[:, :4])
            adopt.crop(cache, 0)
            read(target, cache, ids[:, 4:])
            adopt.crop(cache, 22 - 9)
            with target.model.layers[num_layers_run].register_forward_pre_hook(fail):
                read(target, cache, ids[:, 9:])

    with pytest.raises(ZeroDivisionError):
        draft()
    assert_same_layers(cache, plain)
    assert sum(map(compresses, cache.layers)) == NUM_LAYERS - 1


def test_a_layer_is_given_again_what_it_was_given(target, monkeypatch):
    """Keywords, too, which layers get from transformers 5.24 on."""
    cache, given = DynamicCache(config=target.config), []
    kind = next(type(layer) for layer in cache.layers if compresses(layer))
    update = kind.update
    monkeypatch.setattr(kind, "update", lambda *args, **named: given.append([*named]) or update(*args, **named))
    ids = torch.arange(9).expand(BATCH, -1) % VOCAB
    with adopt.slots(cache, 0):
        for layer in filter(compresses, cache.layers):
            own = layer.update
            layer.update = lambda *args, own=own, **named: own(*args, **named | {"kwargs": {}})
        read(target, cache, ids[:, :4])
        adopt.crop(cache, 0)
        read(target, cache, ids[:, 4:])
        before = len(given)
        adopt.crop(cache, 2)
    assert given[before:]
    assert all(names == ["kwargs"] for names in given[before:])


def test_a_copy_that_is_made_meanwhile_is_a_cache_of_its_own(target):
    """What is taken back from it is of the forward that it read last."""
    cache, plain = (DynamicCache(config=target.config) for _ in range(2))
    ids = torch.arange(22).expand(BATCH, -1) % VOCAB
    with adopt.slots(cache, 0):
        read(target, cache, ids[:, :4])
        adopt.crop(cache, 0)
        read(target, cache, ids[:, 4:9])
        copied = copy.deepcopy(cache)
        adopt.crop(cache, 5)
        read(target, copied, ids[:, 9:15])
        read(target, copied, ids[:, 15:])
        adopt.crop(copied, 3)
        read(target, cache, ids[:, 4:9])
        adopt.crop(cache, 0)
    read(target, plain, ids[:, :9])
    assert_same_layers(cache, plain)
    read(target, plain, ids[:, 9:-3])
    assert_same_layers(copied, plain, compresses)


@pytest.mark.parametrize("index", range(1, NUM_LAYERS))
@pytest.mark.parametrize("method", ["update", "update_compressor_states"])
def test_after_an_error_while_tokens_are_taken_back_the_accepted_ones_are_there(target, monkeypatch, index, method):
    cache, plain = (DynamicCache(config=target.config) for _ in range(2))
    ids = torch.arange(22).expand(BATCH, -1) % VOCAB
    read(target, plain, ids[:, :9])
    kind = type(cache.layers[index])
    of_class = getattr(kind, method)

    def fail(layer, *args, **kwargs):
        if layer is cache.layers[index]:
            raise MemoryError
        return of_class(layer, *args, **kwargs)

    def draft():
        with adopt.slots(cache, 0):
            read(target, cache, ids[:, :4])
            adopt.crop(cache, 0)
            read(target, cache, ids[:, 4:9])
            adopt.crop(cache, 0)
            read(target, cache, ids[:, 9:])
            with monkeypatch.context() as patch:
                patch.setattr(kind, method, fail)
                adopt.crop(cache, 5)

    with pytest.raises(MemoryError):
        draft()
    assert_same_layers(cache, plain, compresses)


def test_an_error_of_the_caller_s_is_not_hidden(target):
    """It read tokens of its own over the cache meanwhile, more than can be taken back."""
    cache = DynamicCache(config=target.config)
    ids = torch.arange(9).expand(BATCH, -1)

    def draft():
        with adopt.slots(cache, 0):
            read(target, cache, ids[:, :4])
            adopt.crop(cache, 0)
            read(target, cache, ids[:, 4:7])
            read(target, cache, ids[:, 7:])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draft()


def test_an_offloaded_cache_is_refused(target):
    """Between two forwards its keys are elsewhere than what is to be given again."""
    past = {CACHE: DynamicCache(config=target.config, offloading=True)}
    drafter = build_drafter(target)
    with pytest.raises(ValueError, match="is offloaded and compresses keys; expected one that stays"):
        target.generate(torch.tensor([[1, 2, 3]]), assistant_model=drafter, max_new_tokens=4, **past)


def test_more_than_the_last_forward_read_is_not_taken_back(target):
    cache = DynamicCache(config=target.config)
    ids = torch.arange(9).expand(BATCH, -1)
    layer = next(filter(compresses, cache.layers))
    with recording(cache):
        read(target, cache, ids[:, :4])
        with pytest.raises(ValueError, match="got 1 tokens to take back; expected at most"):  # of the prompt
            layer.crop(-1)
        layer.accept()
        read(target, cache, ids[:, 4:7])
        read(target, cache, ids[:, 7:])
        with pytest.raises(ValueError, match="got 3 tokens to take back"):
            layer.crop(-3)
        layer.crop(-2)
        assert layer.get_seq_length() == 7
