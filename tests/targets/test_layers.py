"""Captured states are the target's own hidden states, whatever else goes on in the target.

B batch, T tokens, L layers, n captured states, ht target width.
"""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from close import FORWARD, assert_close
from conftest import build_target
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

sys.path.append(str(Path(__file__).parents[1] / "generation"))


sys.path.append(str(Path(__file__).parents[1] / "generation"))

from families import NotThereError
from families import build_target as build_family

from eagle31_hf.targets.layers import (
    CapturedStates,
    capture_states,
    decoder_layers,
    has_hooks,
    rounded_anew,
    target_states,
)
from eagle31_hf.targets.probe import difference

VOCAB, WIDTH, NUM_LAYERS = 61, 20, 5
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 2}
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Config and where the final norm is.
TARGETS = {
    "llama": (LlamaConfig(**SIZES, intermediate_size=28), "model.norm"),
    "qwen3": (Qwen3Config(**SIZES, intermediate_size=28, num_key_value_heads=1, head_dim=6), "model.norm"),
    "gpt2": (GPT2Config(**SIZES, **NO_SPECIAL_TOKENS), "transformer.ln_f"),
    "opt": (OPTConfig(**SIZES, ffn_dim=28, word_embed_proj_dim=WIDTH), "model.decoder.final_layer_norm"),
    "gpt_neox": (GPTNeoXConfig(**SIZES, intermediate_size=28, **NO_SPECIAL_TOKENS), "gpt_neox.final_layer_norm"),
}
ids_by_kind = pytest.mark.parametrize("kind", TARGETS)


def build(kind: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(TARGETS[kind][0]).eval()


def tokens(length: int = 9) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


def num_hooks(target: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


@ids_by_kind
@torch.no_grad()
def test_states_are_the_targets_hidden_states(kind):
    target, layer_ids = build(kind), [0, 1, NUM_LAYERS - 1, NUM_LAYERS]
    expected = target(tokens(), output_hidden_states=True).hidden_states
    with capture_states(target, layer_ids) as captured:
        target(tokens())
    states = captured.take()
    assert states.shape == (2, 9, 4 * WIDTH)
    *inner, last = states.split(WIDTH, dim=-1)
    assert_close("states", tuple(inner), tuple(expected[i] for i in layer_ids[:-1]))
    assert_close("last state, normed", target.get_submodule(TARGETS[kind][1])(last), expected[-1])


@pytest.mark.parametrize("name", ["GLM5-Next", "Qwen4-Exp"])
def test_states_of_hyper_connections_are_the_mean_of_their_streams(name):
    """The one passes them on as (B, T, streams, ht), the other as (B, T, streams*ht)."""
    try:
        target = build_family(name, "eager")
    except NotThereError as reason:
        pytest.skip(str(reason))
    config, streams, given = target.config.get_text_config(), 2, []
    assert streams in (getattr(config, "hc_mult", None), getattr(config, "hc_count", None))
    with decoder_layers(target)[1].register_forward_hook(lambda module, args, output: given.append(output)):
        states, _ = target_states(target, tokens() % config.vocab_size, [2])
    parts = (given[0][0] if isinstance(given[0], tuple) else given[0]).flatten(2).chunk(streams, dim=2)
    assert_close("states", states, sum(parts) / streams, FORWARD)
    assert not torch.equal(*parts)


@ids_by_kind
@torch.no_grad()
def test_the_users_own_hidden_states_are_unaffected(kind):
    target = build(kind)
    expected = target(tokens(), output_hidden_states=True)
    with capture_states(target, [1, 3]) as captured:
        out = target(tokens(), output_hidden_states=True)
        target(tokens()[:, :4], output_hidden_states=True)
    assert_close("hidden states", tuple(out.hidden_states), tuple(expected.hidden_states))
    assert_close("logits", out.logits, expected.logits)
    assert captured.take().shape == (2, 9 + 4, 2 * WIDTH)  # once per forward


@ids_by_kind
def test_target_states(kind):
    target = build(kind)
    states, logits = target_states(target, tokens(), [0, 2, 5])
    assert (states.shape, logits.shape) == ((2, 9, 3 * WIDTH), (2, 9, VOCAB))
    assert not states.requires_grad
    assert not logits.requires_grad
    with torch.no_grad():
        assert_close("logits", logits, target(tokens()).logits)


@ids_by_kind
@torch.no_grad()
def test_chunks_of_several_forwards_are_concatenated(kind):
    target, cache = build(kind), DynamicCache()
    expected, _ = target_states(target, tokens(), [0, 3, 5])
    with capture_states(target, [0, 3, 5]) as captured:
        for chunk in tokens()[:, :7].split((4, 1, 2), dim=1):
            target(chunk, past_key_values=cache)
        assert_close("first 7 tokens", captured.take(), expected[:, :7], FORWARD)
        target(tokens()[:, 7:], past_key_values=cache)
        assert_close("the rest", captured.take(), expected[:, 7:], FORWARD)


@pytest.mark.parametrize("size", [1, 4, 9, 100])
@torch.no_grad()
def test_pieces_are_what_take_gives_cut_up(size):
    target = build()
    expected, _ = target_states(target, tokens(), [0, 3, 5])
    with capture_states(target, [0, 3, 5]) as captured:
        target(tokens())
        pieces = list(captured.pieces(size))
        assert_close("pieces", pieces, list(expected.split(size, dim=1)))
        target(tokens()[:, :2])
        assert captured.take().shape[1] == 2, "a piece was taken twice"


class Interrupt(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("ending", ["exit", "exception", "no_such_layer"])
def test_hooks_are_removed_on(ending):
    target = build()
    error = {"exit": None, "exception": Interrupt, "no_such_layer": IndexError}[ending]
    caught = None
    try:
        with capture_states(target, [0, 1, NUM_LAYERS + 1 if ending == "no_such_layer" else 2]):
            assert num_hooks(target) == 3
            if ending == "exception":
                raise Interrupt
    except (Interrupt, IndexError) as raised:
        caught = type(raised)
    assert caught is error
    assert num_hooks(target) == 0


def test_hooks_of_others_stay():
    target = build()
    target.model.layers[1].register_forward_hook(lambda *_: None)
    with capture_states(target, [1, 2]):
        pass
    assert num_hooks(target) == 1


def test_forwards_of_another_thread_are_not_captured():
    target, seen = build(), {}

    def other_thread():
        with capture_states(target, [2]) as captured:
            target(tokens(5))
        seen["other"] = captured.take()

    with torch.no_grad(), capture_states(target, [2]) as captured:
        target(tokens())
        thread = Thread(target=other_thread)
        thread.start()
        thread.join()
        target(tokens(3))
    assert captured.take().shape == (2, 9 + 3, WIDTH)
    assert_close("the other thread's", seen["other"].detach(), target_states(target, tokens(5), [2])[0])


def test_layers_are_the_decoders_own():
    target = build()
    target.config.num_layers = 2  # a field that its class does not know, as a config.json may have any
    assert decoder_layers(target) is target.model.layers


def test_the_decoder_is_not_the_head_that_goes_by_its_name():
    """As of ModernBERT, an adapter's around it too."""
    try:
        target = copy.deepcopy(build_family("ModernBERT decoder", "eager"))
    except NotThereError as reason:
        pytest.skip(str(reason))
    assert decoder_layers(target) is target.model.layers
    target.decoder = nn.Sequential(target.decoder)
    assert decoder_layers(target) is target.model.layers


def test_states_of_another_shape_are_refused_with_theirs():
    """A config that tells of hyper-connections is not all that there may be."""
    captured = CapturedStates(1, config=SimpleNamespace(hidden_size=4, hc_mult=2))
    with pytest.raises(ValueError, match=r"states of shape \(1, 3, 16\) on; expected \(batch, tokens, 4\)"):
        captured.append(0, torch.zeros(1, 3, 16))


def test_a_model_without_such_layers_is_refused():
    encoder_decoder = T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=4, num_decoder_layers=2, num_heads=2)
    )
    with pytest.raises(
        ValueError,
        match=r"T5ForConditionalGeneration has no list of 4 decoder layers.*expected a decoder-only causal LM",
    ):
        decoder_layers(encoder_decoder)


def test_a_layer_that_did_not_run_is_said():
    """Of targets whose layers that look at an image are skipped without one."""
    target = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    with (
        capture_states(target, [1, 2]) as captured,
        pytest.raises(ValueError, match="skipped a layer that the drafter reads"),
    ):
        captured.take()


def test_layers_that_return_lists():
    target = AutoModelForCausalLM.from_config(
        OpenAIGPTConfig(vocab_size=VOCAB, n_embd=WIDTH, n_layer=NUM_LAYERS, n_head=2)
    ).eval()
    ids = torch.arange(7)[None]
    hidden_states = target(input_ids=ids, output_hidden_states=True).hidden_states
    states, _ = target_states(target, ids, [1, 3])
    assert torch.equal(states, torch.cat([hidden_states[1], hidden_states[3]], dim=-1))


def test_rounding_anew_is_of_one_thread_and_leaves_no_trace():
    """It moves logits by what rounding does, draws nothing from the caller's random numbers, and is the same again."""
    target = build_target("llama").bfloat16()
    ids = torch.tensor([[1, 5, 2, 7, 3]])

    @torch.no_grad()
    def logits() -> torch.Tensor:
        return target(ids, use_cache=False).logits

    expected, state = logits(), torch.get_rng_state()
    with ThreadPoolExecutor(1) as others, rounded_anew(target):
        first, second, elsewhere = logits(), logits(), others.submit(logits).result()
    assert torch.equal(elsewhere, expected)
    assert torch.equal(first, second)
    assert 0 < difference(first, expected) < 1
    assert torch.equal(logits(), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_rounding_anew_ends_with_an_error():
    target = build_target("llama")
    with rounded_anew(target):
        assert not any(map(has_hooks, target.modules())), "another call's rounds go on as captured"
    with suppress(KeyboardInterrupt), rounded_anew(target):
        raise KeyboardInterrupt
    assert not any(module._forward_hooks for module in target.modules())


def test_rounding_anew_keeps_the_form_of_what_a_layer_returns():
    class Pair(NamedTuple):
        states: torch.Tensor
        weights: None

    target = build_target("llama")
    layer = target.model.layers[0]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: Pair(own(*args, **kwargs), None)
    states = torch.randn(1, 3, target.config.hidden_size)
    rope = target.model.rotary_emb(states, torch.arange(3)[None])
    with rounded_anew(target):
        out = layer(states, position_embeddings=rope)
    assert isinstance(out, Pair)
