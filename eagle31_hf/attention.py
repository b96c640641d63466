"""A drafter layer's attention, grouped-query or latent (MLA), run through transformers' attention interface.

B batch, T query tokens, S key tokens, H heads, D head_dim. MLA: R width of the cached latent, N and P the parts of a
query and key without and with rope, V value width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from .configuration import Eagle31Config
from .kernels.tree_attention import is_spans, tree_attention


class Norm(nn.RMSNorm):
    """An RMSNorm that takes states of any dtype: under autocast they may be of 16 bits and its weight is not, which
    torch's fused one refuses."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def rounded_once(x: Tensor) -> Tensor:
    """Returns x as autocast would round it for the linear layers that read it: each of these would round it anew, and
    keep a copy of its own for the backward pass."""
    kind = x.device.type
    if x.dtype != torch.float32 or not (is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return x
    return x.to(torch.get_autocast_dtype(kind))


class GQAttention(nn.Module):
    """Attention whose input may be wider than the drafter: layer 0 reads [embedding, state], so its `input_size` is
    2h."""

    is_causal = True

    def __init__(self, config: Eagle31Config, layer_idx: int, input_size: int):
        super().__init__()
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        head_dim = config.head_dim
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = head_dim
        self.num_key_value_groups = heads // kv_heads
        self.scaling = head_dim**-0.5
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        self.q_proj = nn.Linear(input_size, heads * head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, kv_heads * head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, kv_heads * head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Norm(head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = Norm(head_dim, eps=config.rms_norm_eps) if config.qk_norm else None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, input_size) -> queries (B, H, T, D), keys and values (B, Hkv, T, D), rotated."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_proj(x).view(shape)
        k = self.k_proj(x).view(shape)
        v = self.v_proj(x).view(shape)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q, k, v.transpose(1, 2)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past_key_values: Cache | None
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, input_size) -> (B, T, h) and attention weights, see `attend`; keys and values of `x` are appended to
        `past_key_values`."""
        q, k, v = self.project(x, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        out, weights = attend(self, q, k, v, mask)
        return self.o_proj(out.flatten(2)), weights


class MLAttention(nn.Module):
    """Multi-head latent attention: the cache holds one latent (R wide) and one rotated key part (P wide) a token, for
    all heads.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. Few queries are attended in the latent space (absorbed), which
    never builds the keys and values of all heads; many queries, a prompt's, with keys and values expanded from it,
    which costs less a query.
    """

    is_causal = True

    def __init__(self, config: Eagle31Config, layer_idx: int, input_size: int):
        super().__init__()
        heads = config.num_attention_heads
        nope = config.qk_nope_head_dim
        rope = config.qk_rope_head_dim
        bias = config.attention_bias
        eps = config.rms_norm_eps
        rank = config.kv_lora_rank
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = heads
        self.num_key_value_groups = 1
        self.sizes = {"rank": rank, "nope": nope, "rope": rope, "value": config.v_head_dim}
        self.scaling = (nope + rope) ** -0.5 * yarn_temperature(config.rope_parameters)
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(input_size, heads * (nope + rope), bias=False)
        else:
            self.q_a_proj = nn.Linear(input_size, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = Norm(config.q_lora_rank, eps=eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, rank + rope, bias=bias)
        self.kv_a_layernorm = Norm(rank, eps=eps)
        self.kv_b_proj = nn.Linear(rank, heads * (nope + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=bias)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(B, T, input_size) -> queries (B, H, T, N) and (B, H, T, P), latent (B, 1, T, R), shared key part (B, 1, T,
        P)."""
        q = self.q_proj(x) if self.config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split((self.sizes["nope"], self.sizes["rope"]), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x)[:, None].split((self.sizes["rank"], self.sizes["rope"]), dim=-1)
        return q_nope, rotate_pairs(q_rope, cos, sin), self.kv_a_layernorm(latent), rotate_pairs(k_rope, cos, sin)

    def expanded(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention with the keys (B, H, S, N + P) and values (B, H, S, V) of every head -> (B, T, H, V) and
        weights."""
        kv = self.kv_b_proj(latent[:, 0]).view(*k_rope.shape[::2], self.num_heads, -1).transpose(1, 2)
        k_nope, v = kv.split((self.sizes["nope"], self.sizes["value"]), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, self.num_heads, -1, -1)), dim=-1)
        return attend(self, torch.cat((q_nope, q_rope), dim=-1), k, v, mask)

    def absorbed(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention in the latent space: `kv_b_proj` is applied to the queries and the output, so that all heads
        share the latent as key and value. Takes and returns the same as `expanded`.

        The heads become rows of one head, (B, 1, H T, R + P), so that nothing repeats the latent for each of them.
        """
        up = self.kv_b_proj.weight.view(self.num_heads, -1, self.sizes["rank"])
        up_k, up_v = up.split((self.sizes["nope"], self.sizes["value"]), dim=1)
        q = torch.cat((torch.matmul(q_nope, up_k), q_rope), dim=-1)
        if mask is not None:
            mask = mask.expand(-1, self.num_heads, -1, -1).flatten(1, 2)[:, None]  # (B, 1, H T, S)
        k = torch.cat((latent, k_rope), dim=-1)
        # (B, H T, 1, R), (B, 1, H T, S)
        out, weights = attend(self, q.flatten(1, 2)[:, None], k, latent, mask, is_causal=False)
        out = torch.matmul(out[:, :, 0].view(*q.shape[:3], -1), up_v.mT).transpose(1, 2)
        return out, None if weights is None else weights.view(*q.shape[:3], -1)

    def absorbs(self, num_queries: int, mask: Any) -> bool:
        """Returns whether the absorbed form is possible, and multiplies less: a query costs it 2 R - N - V more a
        head and key, while expanding a key costs R (N + V) once a head. It needs a mask it can repeat, and the
        weight itself, not a quantized one.
        """
        repeatable = (isinstance(mask, Tensor) and mask.dim() == 4) or (mask is None and num_queries == 1)
        rank, out = self.sizes["rank"], self.sizes["nope"] + self.sizes["value"]
        return repeatable and self.kv_b_proj.weight.is_floating_point() and num_queries * (2 * rank - out) <= rank * out

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past_key_values: Cache | None
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, input_size) -> (B, T, h) and attention weights, see `attend`; latent and key part of `x` are appended
        to `past_key_values`."""
        q_nope, q_rope, latent, k_rope = self.project(x, cos, sin)
        if past_key_values is not None:
            latent, k_rope = past_key_values.update(latent, k_rope, self.layer_idx)
        form = self.absorbed if self.absorbs(x.shape[1], mask) else self.expanded
        out, weights = form(q_nope, q_rope, latent, k_rope, mask)
        return self.o_proj(out.flatten(2)), weights


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Queries (B, H, T, D) over keys (B, Hkv, S, D) and values (B, Hkv, S, V) -> (B, T, H, V), with the configured
    implementation, by what stands in the mask's place, or, by a mask of spans, over an arena; and the attention weights
    (B, H, T, S) where the implementation has them (eager), else None."""
    if callable(mask):
        return mask(module, q, k, v), None
    if is_spans(mask):
        return tree_attention(q, k, v, mask, module.scaling), None
    config: Any = module.config
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)
    dropout = config.attention_dropout if module.training else 0.0
    if module.sliding_window is not None:
        options["sliding_window"] = module.sliding_window
    return attention(module, q, k, v, mask, dropout=dropout, scaling=module.scaling, **options)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on the pairs (0, 1), (2, 3), ... of x (B, H, T, P); `cos`, `sin` (B, T, P) hold each angle twice. Even
    entries come first."""
    cos, sin = (half[:, None, :, : half.shape[-1] // 2] for half in (cos, sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def yarn_temperature(rope: Any) -> float:
    """Returns what YaRN multiplies MLA's softmax scale with: (0.1 mscale_all_dim ln factor + 1)^2. Source:
    DeepSeek-V2's released code."""
    scale, mscale = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0.0)
    if rope["rope_type"] == "default" or not mscale or scale <= 1:
        return 1.0
    return (0.1 * mscale * math.log(scale) + 1.0) ** 2
