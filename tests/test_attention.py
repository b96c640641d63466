"""Attention against a plain transcription, windows, every rope type, padding, and the two implementations against each
other.

B batch, T tokens, H heads, D head_dim.
"""

import pytest
import torch
from close import FORWARD, assert_close
from factories import ATTENTIONS, VARIANTS, WIDTH, build, chain, inputs, rms_norm
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle31_hf.attention import GQAttention, Norm

HEADS = {
    "plain": {"num_key_value_heads": 4, "head_dim": 10},
    "gqa_4_heads_2_kv": {},
    "gqa_6_heads_2_kv": {"num_attention_heads": 6},
    "one_kv_head": {"num_key_value_heads": 1},
    "qk_norm": {"qk_norm": True},
    "bias": {"attention_bias": True},
    "head_dim_14": {"head_dim": 14},
    "partial_rotary": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "all": {"num_attention_heads": 6, "qk_norm": True, "attention_bias": True, "head_dim": 14},
}
WINDOW = 4
WINDOWED = {"layer_types": ["sliding_attention"], "sliding_window": WINDOW}
ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": ORIGINAL,
    "longrope": ORIGINAL | {"short_factor": [1.0, 1.25, 1.5], "long_factor": [2.0, 4.0, 8.0]},
    "llama3": ORIGINAL | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {},
}
ROPE_IDS = sorted({"default", *ROPE_INIT_FUNCTIONS})  # a type new to transformers fails here until it has a row above


def rope(kind: str, **extra) -> dict:
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": 100.0} | ROPES[kind] | extra,
        "max_position_embeddings": 64,
    }


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """(B, H, T, D) turned, as complex numbers of the two halves of its rotated part, by angles (T, R / 2)."""
    half = angles.shape[-1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


def plain_attention(layer: GQAttention, x: Tensor, angles: Tensor) -> Tensor:
    """The definition, head by head: (B, T, input_size) -> (B, T, h)."""
    B, T, D = *x.shape[:2], layer.head_dim  # noqa: N806
    q, k, v = (p(x).view(B, T, -1, D).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if layer.q_norm is not None:
        q, k = rms_norm(q, layer.q_norm.weight), rms_norm(k, layer.k_norm.weight)
    q, k = rotate(q, angles), rotate(k, angles)
    group = q.shape[1] // k.shape[1]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].transpose(1, 2) / D**0.5
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, head // group])
    return layer.o_proj(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("fields", HEADS.values(), ids=HEADS)
@torch.no_grad()
def test_attention_is_its_definition(fields, attention):
    drafter = build(attention, **fields)
    layer, positions = drafter.layers[0].self_attn, torch.arange(7) + 3
    x = torch.randn(2, 7, 2 * WIDTH, generator=torch.Generator().manual_seed(1))
    cos, sin = drafter.rotary_emb(x, positions[None])
    mask = torch.full((7, 7), torch.finfo(x.dtype).min).triu(1)[None, None]
    theta, rotated = drafter.config.rope_parameters["rope_theta"], cos.shape[-1]
    angles = positions[:, None] / theta ** (torch.arange(0, rotated, 2) / rotated)
    assert_close("output", layer(x, cos, sin, mask, None)[0], plain_attention(layer, x, angles), FORWARD)


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_eager_equals_sdpa(fields):
    eager, sdpa = (build(attention, **fields) for attention in ATTENTIONS)
    tokens, states = inputs(sdpa)
    one, other = eager(tokens, target_hidden_states=states), sdpa(tokens, target_hidden_states=states)
    assert_close("logits", one.logits, other.logits, FORWARD)
    assert_close("state", one.last_hidden_state, other.last_hidden_state, FORWARD)
    assert_close("chain", chain(eager, tokens, states, 6, 4), chain(sdpa, tokens, states, 6, 4), FORWARD)


@pytest.mark.parametrize("cached", [0, 9], ids=["one_forward", "9_rows_cached"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_window_hides_what_lies_beyond_it(attention, cached):
    drafter = build(attention, **WINDOWED)
    tokens, states = inputs(drafter, length=11)

    def last_logits(changed: int | None = None) -> Tensor:
        rows, given, past = tokens.clone(), states.clone(), None
        if changed is not None:
            rows[:, changed], given[:, changed] = 0, 1.0
        if cached:
            past = drafter(rows[:, :cached], target_hidden_states=given[:, :cached], use_cache=True).past_key_values
        return drafter(rows[:, cached:], target_hidden_states=given[:, cached:], past_key_values=past).logits[:, -1]

    unchanged = last_logits()
    for row in range(11):
        if row <= 10 - WINDOW:
            assert_close(f"row {row} changed", last_logits(row), unchanged)
        else:
            assert (last_logits(row) - unchanged).abs().max() > 0.01, f"row {row} changed"


@pytest.mark.parametrize("kind", ROPE_IDS)
@torch.no_grad()
def test_rope(kind):
    drafter = build(**rope(kind))
    tokens, states = inputs(drafter, length=40)
    out = drafter(tokens, target_hidden_states=states)
    cos_sin = drafter.rotary_emb(states, torch.arange(40)[None])
    assert_close("cos and sin", cos_sin, LlamaRotaryEmbedding(drafter.config)(states, torch.arange(40)[None]), FORWARD)
    assert out.logits.isfinite().all()
    moved = drafter(tokens, target_hidden_states=states, position_ids=torch.arange(40)[None] * 2).logits
    assert (moved - out.logits).abs().max() > 0.01


@pytest.mark.parametrize("kind", ROPE_IDS)
@torch.no_grad()
def test_rope_survives_saving(kind, tmp_path):
    drafter = build(**rope(kind))
    tokens, states = inputs(drafter, length=40)
    drafter.save_pretrained(tmp_path)
    loaded = type(drafter).from_pretrained(tmp_path)
    assert_close("frequencies", loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)
    assert_close(
        "logits",
        loaded(tokens, target_hidden_states=states).logits,
        drafter(tokens, target_hidden_states=states).logits,
    )


@pytest.mark.parametrize("kind", ["default", "yarn"])
@torch.no_grad()
def test_partial_rope_leaves_the_rest_in_place(kind):
    drafter = build(head_dim=12, **rope(kind, partial_rotary_factor=0.5))
    x = torch.randn(1, 5, 2 * WIDTH, generator=torch.Generator().manual_seed(1))
    layer = drafter.layers[0].self_attn
    here = layer.project(x, *drafter.rotary_emb(x, torch.arange(5)[None]))
    there = layer.project(x, *drafter.rotary_emb(x, 7 + torch.arange(5)[None]))
    for name, one, other in zip(("queries", "keys"), here, there, strict=False):
        assert_close(f"{name}, not rotated", one[..., 6:], other[..., 6:])
        assert ((one - other)[..., :6].abs().amax((0, 1, 2)) > 0.001).all(), f"{name}, rotated"
    tokens, states = inputs(drafter, length=40)
    assert drafter(tokens, target_hidden_states=states).logits.isfinite().all()


@pytest.mark.parametrize("fields", [{}, WINDOWED], ids=["full", "window"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_padding_mask_equals_leaving_the_padding_out(attention, fields):
    drafter, padding = build(attention, **fields), 5
    tokens, states = inputs(drafter, length=12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = drafter(tokens, target_hidden_states=states, attention_mask=mask, position_ids=positions).logits
    alone = drafter(tokens[1:, padding:], target_hidden_states=states[1:, padding:]).logits
    first = drafter(tokens[:1], target_hidden_states=states[:1]).logits
    assert_close("padded row", whole[1:, padding:], alone, FORWARD)
    assert_close("full row", whole[:1], first, FORWARD)
    assert whole.isfinite().all()
    past = drafter(
        tokens[:, :8],
        target_hidden_states=states[:, :8],
        attention_mask=mask[:, :8],
        position_ids=positions[:, :8],
        use_cache=True,
    ).past_key_values
    rest = drafter(
        tokens[:, 8:],
        target_hidden_states=states[:, 8:],
        attention_mask=mask,
        position_ids=positions[:, 8:],
        past_key_values=past,
    )
    assert_close("after 8 cached rows", rest.logits, whole[:, 8:], FORWARD)


def test_a_norm_takes_states_of_16_bits_beside_a_weight_of_32_without_a_warning(recwarn):
    norm = Norm(8, eps=1e-6)
    x = torch.randn(3, 8).bfloat16()
    got = norm(x)
    assert got.dtype == torch.float32
    assert_close("norm", got, norm(x.float()), 1e-6)
    assert not [warning for warning in recwarn if "fused" in str(warning.message)]
    assert norm.bfloat16()(x).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["eagle31", "mla", "two_layers"])
def test_under_autocast_an_input_is_rounded_once_for_all_layers_that_read_it(kind, dtype, monkeypatch):
    """Outputs are those of layers that round for themselves, to the bit; fewer states are kept for going back."""
    drafter = build(**VARIANTS[kind])
    tokens, states = inputs(drafter, 12)

    def run():
        kept = {}

        def keep(x):
            kept[x.untyped_storage().data_ptr()] = x  # which keeps the storage from being used again
            return x

        with torch.autocast("cpu", dtype), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = drafter(tokens, target_hidden_states=states).last_hidden_state
        return out, sum(x.untyped_storage().nbytes() for x in kept.values())

    out, size = run()
    for module in ("attention", "modeling"):
        monkeypatch.setattr(f"eagle31_hf.{module}.rounded_once", lambda x: x)
    expected, larger = run()
    assert out.equal(expected)
    assert size < larger
