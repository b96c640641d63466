"""MLA against a plain transcription and transformers' DeepSeek layer; its two forms against each other; what its cache
holds.

B batch, T tokens, H heads, R latent, N and P the parts of a key without and with rope, V value width.
"""

import pytest
import torch
from close import FORWARD, assert_close
from factories import ATTENTIONS, MLA, WIDTH, build, inputs, rms_norm
from torch import Tensor
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle31_hf.attention import MLAttention

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
ROPES = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "kimi_yarn": {"rope_parameters": YARN},
    "yarn_two_mscales": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}},
}
QUERIES = {"query_latent": {}, "no_query_latent": {"q_lora_rank": None}, "bias": {"attention_bias": True}}


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (0, 1), (2, 3), ... of x (B, H, T, P) as complex numbers, turned; cos and sin (B, T, P) hold every angle
    twice."""
    turn = torch.complex(cos, sin)[:, None, :, : x.shape[-1] // 2]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def plain_attention(layer: MLAttention, x: Tensor, cos: Tensor, sin: Tensor, temperature: float) -> Tensor:
    """The definition, head by head, keys and values built in full: (B, T, input_size) -> (B, T, h)."""
    c = layer.config
    nope, rope, rank = c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
    q = (
        layer.q_proj(x)
        if c.q_lora_rank is None
        else layer.q_b_proj(rms_norm(layer.q_a_proj(x), layer.q_a_layernorm.weight))
    )
    q = q.unflatten(-1, (c.num_attention_heads, nope + rope)).transpose(1, 2)
    compressed = layer.kv_a_proj_with_mqa(x)
    kv = layer.kv_b_proj(rms_norm(compressed[..., :rank], layer.kv_a_layernorm.weight))
    kv = kv.unflatten(-1, (c.num_attention_heads, nope + c.v_head_dim)).transpose(1, 2)
    q_rope, k_rope = (
        rotated_pairs(q[..., nope:], cos, sin),
        rotated_pairs(compressed[:, None, :, rank:], cos, sin)[:, 0],
    )
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    heads = []
    for head in range(c.num_attention_heads):
        scores = q[:, head, :, :nope] @ kv[:, head, :, :nope].mT + q_rope[:, head] @ k_rope.mT
        scores = scores * (nope + rope) ** -0.5 * temperature
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ kv[:, head, :, nope:])
    return layer.o_proj(torch.cat(heads, dim=-1))


def layer_inputs(drafter, num_rows: int = 7) -> tuple:
    x = torch.randn(2, num_rows, 2 * WIDTH, generator=torch.Generator().manual_seed(1))
    mask = torch.full((num_rows, num_rows), torch.finfo(x.dtype).min).triu(1)[None, None]
    return x, *drafter.rotary_emb(x, torch.arange(num_rows)[None] + 3), mask


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("fields", QUERIES.values(), ids=QUERIES)
@torch.no_grad()
def test_latent_attention_is_its_definition(fields, rope, attention):
    drafter = build(attention, **MLA | fields | rope)
    layer, (x, cos, sin, mask) = drafter.layers[0].self_attn, layer_inputs(drafter)
    mscale = rope["rope_parameters"].get("mscale_all_dim")
    temperature = 1.0 if mscale is None else (0.1 * mscale * torch.log(torch.tensor(64.0)).item() + 1) ** 2
    assert_close("output", layer(x, cos, sin, mask, None)[0], plain_attention(layer, x, cos, sin, temperature), FORWARD)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@torch.no_grad()
def test_latent_attention_is_that_of_transformers_deepseek(rope):
    drafter = build("eager", **MLA | rope | {"rms_norm_eps": 1e-6})
    ours, (x, _, _, mask) = drafter.layers[0].self_attn, layer_inputs(drafter)
    names = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config = DeepseekV3Config(
        hidden_size=2 * WIDTH,
        num_key_value_heads=drafter.config.num_attention_heads,
        rope_interleave=True,
        attention_bias=False,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        **rope,
        **{name: getattr(drafter.config, name) for name in names},
    )
    config._attn_implementation = "eager"
    theirs = DeepseekV3Attention(config, 0).eval()
    theirs.o_proj = ours.o_proj
    theirs.load_state_dict(ours.state_dict())
    positions = torch.arange(7)[None] + 3
    theirs_out = theirs(x, DeepseekV3RotaryEmbedding(config)(x, positions), mask)[0]
    assert_close("output", ours(x, *drafter.rotary_emb(x, positions), mask, None)[0], theirs_out, FORWARD)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@torch.no_grad()
def test_absorbed_equals_expanded(rope, num_queries, attention):
    drafter = build(attention, **MLA | rope)
    layer, (x, cos, sin, mask) = drafter.layers[0].self_attn, layer_inputs(drafter, 17)
    q_nope, q_rope, latent, k_rope = layer.project(x, cos, sin)
    q_nope, q_rope, mask = q_nope[:, :, -num_queries:], q_rope[:, :, -num_queries:], mask[:, :, -num_queries:]
    one, other = (form(q_nope, q_rope, latent, k_rope, mask)[0] for form in (layer.absorbed, layer.expanded))
    assert_close("output", one, other, FORWARD)
    if num_queries == 1:
        assert_close("without a mask", layer.absorbed(q_nope, q_rope, latent, k_rope, None)[0], other, FORWARD)


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_each_form_is_used_where_it_costs_less(attention, monkeypatch):
    drafter, used = build(attention, **MLA), []
    layer = drafter.layers[0].self_attn
    for name in ("absorbed", "expanded"):
        form = getattr(layer, name)
        monkeypatch.setattr(layer, name, lambda *args, form=form, name=name: used.append(name) or form(*args))
    tokens, states = inputs(drafter, length=40)
    past = drafter(tokens[:, :38], target_hidden_states=states[:, :38], use_cache=True).past_key_values
    drafter(tokens[:, 38:39], target_hidden_states=states[:, 38:39], past_key_values=past)
    drafter(tokens[:, 39:], target_hidden_states=states[:, 39:], past_key_values=past)
    assert used == ["expanded", "absorbed", "absorbed"]


@torch.no_grad()
def test_the_cache_holds_one_latent_and_one_key_part_a_token():
    drafter = build(**MLA)
    tokens, states = inputs(drafter)
    cache = DynamicCache()
    drafter(tokens, target_hidden_states=states, past_key_values=cache)
    config, layer = drafter.config, cache.layers[0]
    assert layer.keys.shape == (2, 1, tokens.shape[1], config.kv_lora_rank)
    assert layer.values.shape == (2, 1, tokens.shape[1], config.qk_rope_head_dim)
