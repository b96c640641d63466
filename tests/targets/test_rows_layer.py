"""Layers that run few rows on a CPU compute what the target's own do: texts, masks, batches; whatever else happens to
the model, its own forwards run."""

import copy
import threading

import pytest
import torch
from close import TARGET_FORWARD, assert_close
from conftest import ROPED
from targets.llama_forms import OTHER, SAME, assert_own_forwards, build
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache, LlamaConfig, Ministral3Config, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from eagle31_hf.kernels import layer_parts
from eagle31_hf.targets import few_rows, linear_kernels, rows_layer
from eagle31_hf.targets.few_rows import in_drafted_call
from eagle31_hf.targets.fused import fused_rows, why_not_fused
from eagle31_hf.targets.layers import decoder_layers
from eagle31_hf.targets.linear_kernels import is_available, onednn_linear
from eagle31_hf.targets.rows_layer import RowsLayer
from eagle31_hf.targets.tree_attention import attention_of_rounds

pytestmark = pytest.mark.skipif(not is_available(), reason="torch has no oneDNN here")
PREFIX = 11
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)  # who sees whom


@pytest.fixture(autouse=True)
def packed(monkeypatch):
    """Whatever is fastest here, packed weights are taken, for prompts too."""
    choice = {"kernel": "onednn", "least_rows": 1, "takes_prompts": True}
    monkeypatch.setattr(linear_kernels.MEASURED, "get", lambda name: choice)
    return choice


@pytest.fixture
def tried(monkeypatch):
    """Whether rows depend on their number is tried, as in use; there are processors without such kernels."""
    monkeypatch.setattr(linear_kernels.MEASURED, "get", lambda name: None)
    monkeypatch.setattr(linear_kernels.MEASURED, "put", lambda name, figures: None)
    monkeypatch.setattr(
        linear_kernels, "_seconds_of", lambda runs, *_: float(getattr(runs[0], "func", None) is not onednn_linear)
    )


@pytest.fixture
def runs(monkeypatch) -> list:
    """The shapes of states that layers have run as few rows."""
    seen, own = list[tuple[int, ...]](), RowsLayer.__call__

    def counted(self, states, *args):
        seen.append(tuple(states.shape))
        return own(self, states, *args)

    monkeypatch.setattr(RowsLayer, "__call__", counted)
    return seen


@torch.no_grad()
def logits_of(target: PreTrainedModel, count: int, mask: Tensor | None = None, batch: int = 1) -> Tensor:
    """The logits of `count` tokens after a text of PREFIX, in a round."""
    ids = torch.randint(
        0, target.config.vocab_size, (batch, PREFIX + count), generator=torch.Generator().manual_seed(1)
    )
    cache = DynamicCache(config=target.config)
    target(ids[:, :PREFIX], past_key_values=cache)
    with in_drafted_call():
        return target(ids[:, PREFIX:], past_key_values=cache, attention_mask=mask).logits


def tree_mask(batch: int) -> dict[str, Tensor] | Tensor:
    seen = torch.cat((torch.ones(len(TREE), PREFIX, dtype=torch.bool), TREE), dim=1)
    seen = seen.expand(batch, 1, -1, -1).clone()
    seen[0, :, :, :3] = False  # as of padding
    return seen


@pytest.mark.parametrize("name", ["llama", "llama with biases", "qwen2", "qwen3", "mistral with a window"])
def test_a_round_gives_what_the_target_gives(name, runs):
    target = build(SAME[name])
    masks = [(1, None), (3, None), (4, tree_mask(2)), (4, torch.where(tree_mask(2), 0.0, -1e30))]
    if "window" in name:  # its cache keeps less
        masks = masks[:2]
    expected = [logits_of(target, count, mask, batch=2) for count, mask in masks]
    assert not runs
    with fused_rows(target) as rows:
        got = [logits_of(target, count, mask, batch=2) for count, mask in masks]
    assert rows.num_bytes > 0
    assert [shape[:2] for shape in runs[:: ROPED["num_hidden_layers"]]] == [(2, count) for count, _ in masks]
    assert_close("logits", got, expected, TARGET_FORWARD)
    assert_own_forwards(target)


@pytest.mark.parametrize(
    ("name", "length", "takes_prompts"),
    [("llama", 20, False), ("qwen3", 100, False), ("mistral with a window", 20, True), ("qwen3", 100, True)],
)
def test_a_prompt_gives_what_the_target_gives(name, length, takes_prompts, runs, packed):
    """With padding and without, whole or in pieces; of many rows only where that is faster."""
    packed["takes_prompts"] = takes_prompts
    target = build(SAME[name])
    ids = torch.randint(0, target.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def logits():
        with torch.no_grad(), in_drafted_call():
            whole = target(ids).logits
            cache, pieces = DynamicCache(config=target.config), []
            for end in (12, length):
                part = ids[:, len(pieces) and 12 : end]
                pieces.append(target(part, attention_mask=mask[:, :end], past_key_values=cache).logits)
        return [whole, pieces[0][1], pieces[1][:, -3:]]

    expected = logits()
    with fused_rows(target):
        got = logits()
    assert_close("logits", got, expected, TARGET_FORWARD)
    is_run = [takes_prompts or 2 * tokens <= few_rows.MOST_ROWS for tokens in (length, 12, length - 12)]
    assert len(runs) == sum(is_run) * ROPED["num_hidden_layers"]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_heads_of_which_a_part_is_rotated(share):
    width = 12
    draw = torch.Generator().manual_seed(0)
    heads = torch.randn(2, 3, 5, width, generator=draw)
    angles = torch.randn(1, 3, int(width * share) // 2, generator=draw).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    assert_close("heads", rows_layer._rotated(heads, cos, sin), layer_parts._rotated(heads, None, 0.0, cos, sin), 1e-6)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_a_layer_norm_of_a_row_and_its_negative_is_an_rms_norm(scale):
    norm = nn.RMSNorm(576, eps=1e-5)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    x = scale * (3 + torch.randn(2, 5, 576, generator=torch.Generator().manual_seed(0)))
    assert_close("normed", rows_layer.Norm(norm)(x), norm(x).detach(), 1e-6)


def test_in_16_bits_rounding_is_llama_s():
    """Two tokens are often equally likely there: with other roundings a text soon differs from the target's alone."""
    draw = torch.Generator().manual_seed(0)
    norm = LlamaRMSNorm(576).bfloat16()
    torch.nn.init.normal_(norm.weight, 1.0, 0.3, generator=draw)
    x = torch.randn(1, 40, 576, generator=draw).bfloat16()
    differ = (rows_layer.Norm(norm)(x) != norm(x)).float().mean()
    assert differ < 1e-3  # where a value lies between two numbers of bf16 but for the last bit of fp32
    heads = torch.randn(1, 9, 5, 64, generator=draw).bfloat16()
    angles = torch.randn(1, 9, 32, generator=draw).repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin, unsqueeze_dim=2)
    assert torch.equal(rows_layer._rotated(heads, cos, sin), expected)


@pytest.mark.parametrize("name", OTHER)
def test_a_layer_of_another_form_runs_its_own_forward(name, runs):
    target = build(OTHER[name][0])
    expected = logits_of(target, 3)
    with fused_rows(target):
        got = logits_of(target, 3)
    assert runs == []
    assert_close("logits", got, expected, TARGET_FORWARD)


def hook_a_norm(target):
    return decoder_layers(target)[1].post_attention_layernorm.register_forward_hook(lambda module, args, out: out * 2)


def hook_a_product(target):
    return decoder_layers(target)[1].self_attn.k_proj.register_forward_hook(lambda module, args, out: out * 2)


def wrap_attention(target):
    own = decoder_layers(target)[1].self_attn.forward
    decoder_layers(target)[1].self_attn.forward = lambda **kwargs: (own(**kwargs)[0] * 2, None)


@pytest.mark.parametrize("change", [hook_a_norm, hook_a_product, wrap_attention])
def test_what_is_changed_in_a_layer_counts_in_rounds(change, runs):
    """Also where the target was known before."""
    target = build(LlamaConfig(**ROPED))
    with fused_rows(target):
        before = logits_of(target, 3)
    change(target)
    expected = logits_of(target, 3)
    runs.clear()
    with fused_rows(target):
        got = logits_of(target, 3)
    assert len(runs) == ROPED["num_hidden_layers"] - 1
    assert_close("logits", got, expected, TARGET_FORWARD)
    assert not torch.allclose(got, before, atol=1e-2)


@pytest.mark.parametrize("kind", [LlamaMLP, LlamaRMSNorm])
def test_hooks_of_all_modules_are_called(kind, runs):
    target = build(LlamaConfig(**ROPED))
    with fused_rows(target):
        logits_of(target, 3)
    runs.clear()
    handle = register_module_forward_hook(lambda module, args, out: out * 0.5 if type(module) is kind else None)
    try:
        expected = logits_of(target, 3)
        with fused_rows(target):
            got = logits_of(target, 3)
    finally:
        handle.remove()
    assert runs == []
    assert_close("logits", got, expected, TARGET_FORWARD)


def test_an_attention_function_in_the_place_of_sdpa_is_called(runs, monkeypatch):
    target = build(LlamaConfig(**ROPED))
    with fused_rows(target):
        logits_of(target, 3)
    runs.clear()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *args, **kwargs: (2 * sdpa(*args, **kwargs)[0], None))
    expected = logits_of(target, 3)
    with fused_rows(target):
        assert_close("logits", logits_of(target, 3), expected, TARGET_FORWARD)
    assert runs == []


def test_norms_of_another_dtype_run_the_target_s_own_forward(runs):
    target = build(LlamaConfig(**ROPED))
    for name, weight in target.named_parameters():
        if "layernorm" in name:
            weight.data = weight.data.bfloat16()
    expected = logits_of(target, 3)
    with fused_rows(target):
        assert_close("logits", logits_of(target, 3), expected, TARGET_FORWARD)
    assert runs == []


@torch.no_grad()
def test_weights_that_change_between_calls_count(runs):
    target = build(LlamaConfig(**ROPED, attention_bias=True))
    with fused_rows(target):
        logits_of(target, 3)
    layer = decoder_layers(target)[2]
    for weight in (layer.self_attn.v_proj.weight, layer.self_attn.q_proj.bias, layer.input_layernorm.weight):
        weight.mul_(1.5)
        expected = logits_of(target, 3)
        with fused_rows(target), fused_rows(target):
            assert_close("logits", logits_of(target, 3), expected, TARGET_FORWARD)
    assert runs


def test_other_forwards_meanwhile_are_the_target_s_own(runs):
    """Those of other threads, of prompts, under autocast, and those with no cache."""
    target = build(LlamaConfig(**ROPED))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        expected = target(ids).logits
        with fused_rows(target), in_drafted_call():
            found = []
            thread = threading.Thread(target=lambda: found.append(logits_of_plain(target, ids)))
            thread.start()
            thread.join()
            found.append(target(ids, use_cache=False).logits)
        assert_close("logits", found, [expected] * 2, TARGET_FORWARD)
        assert torch.equal(found[0], expected)
        with torch.autocast("cpu", torch.bfloat16), fused_rows(target) as rows:
            logits_of(target, 3)
    assert rows.num_bytes == 0
    assert runs == []


@torch.no_grad()
def logits_of_plain(target, ids):
    return target(ids).logits


def test_a_copy_made_meanwhile_is_a_model_of_its_own(runs):
    target = build(LlamaConfig(**ROPED))
    with fused_rows(target):
        copied = copy.deepcopy(target)
        with torch.no_grad():
            for weight in decoder_layers(copied).parameters():
                weight.zero_()
        assert_close("logits", logits_of(copied, 2)[0, 0], logits_of(copied, 1)[0, 0], TARGET_FORWARD)
        assert runs == []  # of the layers that it was copied from
        assert not torch.allclose(logits_of(target, 2), logits_of(copied, 2), atol=1e-2)
    runs.clear()
    with fused_rows(copied):
        logits_of(copied, 2)
    assert len(runs) == ROPED["num_hidden_layers"]
    assert_own_forwards(copied)


def test_a_trial_of_a_target_ends_with_the_error_of_a_caller_s_hook():
    """One that comes once is not the target's: it is raised, and the target is tried again."""
    target = build(LlamaConfig(**ROPED))
    errors = [ValueError("the caller's own")]

    def fail_once(*args):
        if errors:
            raise errors.pop()

    decoder_layers(target)[1].register_forward_pre_hook(fail_once)
    with pytest.raises(ValueError, match="the caller's own"), fused_rows(target):
        pass
    assert_own_forwards(target)
    assert why_not_fused(target) == [None] * (ROPED["num_hidden_layers"] + 1)


def test_a_layer_that_scales_far_queries_is_not_fused(runs):
    """Ministral does, by positions that a trial's few tokens do not have."""
    target = build(Ministral3Config(**ROPED))
    assert set(why_not_fused(target)[:-1]) == {"it depends on positions beside the rotary embedding"}


def test_a_target_with_a_layer_of_its_own_forward_is_not_exact(tried):
    """Its queries, keys and values run one by one, by other kernels."""
    target = build(LlamaConfig(**ROPED), torch.bfloat16)
    with fused_rows(target) as rows:
        if not rows.is_exact:
            pytest.skip("this processor has no such kernels")
    handle = hook_a_norm(target)
    with fused_rows(target) as rows:
        assert not rows.is_exact
    handle.remove()


@torch.no_grad()
def test_a_mask_that_is_written_to_counts(runs):
    target, mask = build(LlamaConfig(**ROPED)), tree_mask(1)
    with fused_rows(target):
        logits_of(target, 4, mask)
        mask[..., 5] = False
        got = logits_of(target, 4, mask)
    assert runs
    assert_close("logits", got, logits_of(target, 4, mask), TARGET_FORWARD)


@pytest.mark.parametrize("count", [1, 3])
def test_in_16_bits_a_row_is_the_same_beside_others(count, runs, tried):
    """Attention then runs position by position."""
    target = build(LlamaConfig(**ROPED), torch.bfloat16)
    ids = torch.randint(0, target.config.vocab_size, (1, PREFIX + 4), generator=torch.Generator().manual_seed(1))
    found = []
    with torch.no_grad(), fused_rows(target) as rows, attention_of_rounds(target):
        cache = DynamicCache(config=target.config)
        target(ids[:, :PREFIX], past_key_values=cache)
        for size in (4, count):
            with in_drafted_call(PREFIX):
                found.append(target(ids[:, PREFIX : PREFIX + size], past_key_values=cache).logits)
            cache.crop(-size)
    if not rows.is_exact:
        pytest.skip("this processor has no such kernels")
    assert runs
    assert torch.equal(found[0][:, :count], found[1])
