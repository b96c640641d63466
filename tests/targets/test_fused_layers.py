"""Fused layers compute what the target's own do, or are not fused; and nothing is left behind."""

import gc
import threading

import pytest
import torch
from close import TARGET_FORWARD, assert_close
from conftest import ROPED
from targets.llama_forms import ALL_FUSED, LAYERS, OTHER, SAME, assert_own_forwards, build
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GraniteConfig, LlamaConfig, PreTrainedModel, SmolLM3Config
from transformers.models.llama.modeling_llama import LlamaMLP

from eagle31_hf.targets import fused
from eagle31_hf.targets.fused import fused_layers, why_not_fused
from eagle31_hf.targets.layers import capture_states, decoder_layers
from eagle31_hf.targets.probe import random_tree, tree_from_arena


@torch.no_grad()
def logits_and_states(target: PreTrainedModel, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Runs a tree over an arena; returns logits, and the states that hooks see."""
    with capture_states(target, list(layer_ids)) as captured:
        logits = tree_from_arena(target, random_tree(target))
        return logits, captured.take()


@pytest.mark.parametrize("name", SAME)
def test_fused_layers_compute_what_the_targets_own_do(name):
    target = build(SAME[name])
    expected = logits_and_states(target, (0, 2, LAYERS))
    with fused_layers(target, why_not_fused(target)):
        got = logits_and_states(target, (0, 2, LAYERS))
    assert why_not_fused(target) == ALL_FUSED
    assert_close("logits, states", got, expected, TARGET_FORWARD)
    assert_own_forwards(target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_differs_by_rounding(dtype):
    target = build(LlamaConfig(**ROPED), dtype)
    expected, _ = logits_and_states(target, (1,))
    with fused_layers(target, why_not_fused(target)):
        got, _ = logits_and_states(target, (1,))
    assert why_not_fused(target) == ALL_FUSED
    assert_close("logits", got, expected, 16 * torch.finfo(dtype).eps)
    assert not torch.equal(got, expected)  # they were fused


@pytest.mark.parametrize("name", OTHER)
def test_a_layer_of_another_form_is_not_fused(name):
    config, reason = OTHER[name]
    target = build(config)
    assert why_not_fused(target) == [reason] * LAYERS + ["it follows none that is fused"]
    with fused_layers(target, why_not_fused(target)):
        assert_own_forwards(target)


def test_one_layer_of_four_without_rope():
    """SmolLM3 rotates nothing in every fourth layer."""
    target = build(SmolLM3Config(**ROPED))
    expected = logits_and_states(target, (1, 3))
    with fused_layers(target, why_not_fused(target)):
        got = logits_and_states(target, (1, 3))
    assert why_not_fused(target) == [None, None, None, "its states differ", "it follows none that is fused"]
    assert_close("logits, states", got, expected, TARGET_FORWARD)


class ScaledMLP(LlamaMLP):
    """Looks like a gated MLP by all its parts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.01


def scale_the_mlp(target: PreTrainedModel, layer: nn.Module) -> None:
    layer.mlp.__class__ = ScaledMLP


def wrap_a_projection(target: PreTrainedModel, layer: nn.Module) -> None:
    class Wrapped(nn.Linear):
        pass

    layer.self_attn.q_proj.__class__ = Wrapped


def hook_a_projection(target: PreTrainedModel, layer: nn.Module) -> None:
    layer.mlp.up_proj.register_forward_hook(lambda module, args, output: output * 2)


def replace_a_forward(target: PreTrainedModel, layer: nn.Module) -> None:
    layer.mlp.forward = lambda x: x * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scale_the_mlp, "its states differ"),
        (wrap_a_projection, "its projections are not plain linear layers"),
        (hook_a_projection, "mlp.up_proj has hooks"),
        (replace_a_forward, "the forward of mlp has been replaced"),
    ],
)
def test_a_layer_that_was_changed_runs_its_own_forward_among_fused_ones(change, reason):
    target = build(LlamaConfig(**ROPED))
    assert why_not_fused(target) == ALL_FUSED
    change(target, decoder_layers(target)[1])
    fused._verdicts.pop(target)  # hooks and forwards are no modules, by which a verdict is known to be stale
    expected = logits_and_states(target, (1, 2))
    with fused_layers(target, why_not_fused(target)):
        got = logits_and_states(target, (1, 2))
    assert why_not_fused(target) == [None, reason, None, None, None]
    assert_close("logits, states", got, expected, TARGET_FORWARD)


def test_a_target_without_a_final_norm_is_tried_once(monkeypatch):
    config = GPTNeoXConfig(
        hidden_size=36, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, vocab_size=11
    )
    target, trials, trial = GPTNeoXForCausalLM(config).eval(), [], fused._trial
    monkeypatch.setattr(fused, "_trial", lambda *args: trials.append(1) or trial(*args))
    assert [why_not_fused(target) for _ in range(4)][1:] == 3 * [why_not_fused(target)]
    assert len(trials) == 1


def test_another_module_in_a_layer_is_tried_anew():
    target = build(LlamaConfig(**ROPED))
    assert why_not_fused(target) == ALL_FUSED
    scale_the_mlp(target, decoder_layers(target)[3])
    assert why_not_fused(target) == [None, None, None, "its states differ", "it follows none that is fused"]


def test_a_number_that_is_changed_in_a_layer_is_tried_anew():
    target = build(GraniteConfig(**ROPED))
    assert why_not_fused(target) == ALL_FUSED
    decoder_layers(target)[3].residual_multiplier = 0.3
    assert why_not_fused(target) == [None, None, None, "its states differ", "it follows none that is fused"]


class Doubled:
    def __init__(self, layer: nn.Module):
        self.layer = layer

    def __call__(self, states: Tensor, **kwargs) -> Tensor:
        return self.layer(states * 2, **kwargs)


class Doubling(nn.ModuleList):
    """Layers between which their model does something."""

    def __getitem__(self, index):
        chosen = super().__getitem__(index)
        return [Doubled(layer) for layer in chosen] if isinstance(index, slice) else chosen


def test_a_model_that_changes_states_between_layers_is_not_fused():
    """A pair has no operators: what a model does between layers fails on it, and is found in the trial."""
    target = build(LlamaConfig(**ROPED))
    target.model.layers = Doubling(target.model.layers)
    assert all(reason.startswith("its forward refuses it (TypeError: ") for reason in why_not_fused(target))
    assert_own_forwards(target)


def test_a_hook_before_a_layer_gets_states():
    target = build(LlamaConfig(**ROPED))
    decoder_layers(target)[2].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    expected = logits_and_states(target, (1,))
    with fused_layers(target, why_not_fused(target)):
        got = logits_and_states(target, (1,))
    assert why_not_fused(target) == ALL_FUSED
    assert_close("logits, states", got, expected, TARGET_FORWARD)


def test_after_an_error_every_forward_is_its_own():
    target = build(LlamaConfig(**ROPED))
    assert why_not_fused(target) == ALL_FUSED
    seen = []

    def fail(module, args):
        seen.append(type(args[0]))
        raise KeyError("in the midst of a layer")

    handle = decoder_layers(target)[2].mlp.down_proj.register_forward_pre_hook(fail)
    with pytest.raises(KeyError), fused_layers(target, why_not_fused(target)):
        logits_and_states(target, (1,))
    assert len(seen) == 1
    assert_own_forwards(target)
    handle.remove()
    with fused_layers(target, why_not_fused(target)):
        assert "forward" in vars(decoder_layers(target)[0])
    assert_own_forwards(target)


def test_forwards_without_spans_are_the_targets_own(prompt):
    """Those of another thread, say, while layers are fused."""
    target = build(LlamaConfig(**ROPED))
    with torch.no_grad():
        expected = target(input_ids=prompt).logits
        with fused_layers(target, why_not_fused(target)):
            found = []
            thread = threading.Thread(target=lambda: found.append(target(input_ids=prompt).logits))
            thread.start()
            thread.join()
    assert why_not_fused(target) == ALL_FUSED
    assert_close("logits", found[0], expected)


def test_the_last_of_two_threads_restores_the_forwards():
    target = build(LlamaConfig(**ROPED))
    with fused_layers(target, why_not_fused(target)):
        with fused_layers(target, why_not_fused(target)):
            pass
        assert "forward" in vars(decoder_layers(target)[0])
    assert_own_forwards(target)


def test_a_target_is_not_kept_alive():
    target = build(LlamaConfig(**ROPED))
    with fused_layers(target, why_not_fused(target)):
        logits_and_states(target, (1,))
    assert target in fused._verdicts
    before = len(fused._verdicts)
    del target
    gc.collect()
    assert len(fused._verdicts) == before - 1
