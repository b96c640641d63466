"""Grouped-query attention of a drafter layer, run through transformers' attention interface.

B batch, T query tokens, S key tokens, H heads, D head_dim.
"""

from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from .configuration import Eagle31Config


class GQAttention(nn.Module):
    """Attention whose input may be wider than the drafter: layer 0 reads [embedding, state], so its `input_size` is 2h."""

    is_causal = True

    def __init__(self, config: Eagle31Config, layer_idx: int, input_size: int):
        super().__init__()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.config, self.layer_idx, self.head_dim = config, layer_idx, head_dim
        self.num_key_value_groups = heads // kv_heads
        self.scaling = head_dim**-0.5
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        self.q_proj = nn.Linear(input_size, heads * head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, kv_heads * head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, kv_heads * head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps) if config.qk_norm else None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, input_size) -> queries (B, H, T, D), keys and values (B, Hkv, T, D), rotated."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q, k, v.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Queries over keys and values under a mask of the configured implementation -> (B, T, h)."""
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        window = {} if self.sliding_window is None else {"sliding_window": self.sliding_window}
        out, _ = attention(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **window)
        return self.o_proj(out.reshape(*out.shape[:2], -1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past_key_values: Cache | None) -> Tensor:
        """(B, T, input_size) -> (B, T, h); the keys and values of `x` are appended to `past_key_values`."""
        q, k, v = self.project(x, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return self.attend(q, k, v, mask)
