"""Drafters whose attention and states are known beforehand: each quantity of drift against what it must be."""

import pytest
import torch
from conftest import build_drafter, build_target
from torch import nn

from eagle31_hf.diagnostics.attention_mass import KINDS
from eagle31_hf.diagnostics.drift import NUM_RECENT, drift_of, measure_drift

DEPTH = 4
PROMPT = torch.tensor([[1, 2, 3, 5, 8, 2, 7, 4, 4, 1, 0, 3]])


class FixedAttention(nn.Module):
    """Gives all attention to one key, `key_of` the number of keys there are."""

    def __init__(self, before: nn.Module, key_of):
        super().__init__()
        self.before, self.key_of = before, key_of

    def forward(self, x, cos, sin, mask, past_key_values):
        num_new = x.shape[1]
        _, keys, values = self.before.project(x, cos, sin)
        keys, _ = past_key_values.update(keys, values, self.before.layer_idx)
        num_keys = keys.shape[2]
        weights = torch.zeros(1, 2, num_new, num_keys)
        weights[..., self.key_of(num_keys)] = 1.0
        return torch.zeros_like(x[..., : x.shape[-1] // 2]), weights


class Doubling(nn.Module):
    """A decoder layer that returns twice the state it is given."""

    attention_type = "full_attention"

    def __init__(self, before: nn.Module):
        super().__init__()
        self.self_attn = before.self_attn
        self.before = before

    def forward(self, x, embeds, cos, sin, mask, past_key_values):
        self.before(x, embeds, cos, sin, mask, past_key_values)  # its keys are counted
        return 2 * x


def drift_with(change, **fields):
    """The drift of a drafter after `change`."""
    target = build_target("qwen3")
    drafter = build_drafter(target, **fields)
    change(drafter)
    return drift_of([measure_drift(target, drafter, PROMPT, DEPTH, DEPTH + 2)])


def attending_to(key_of):
    def change(drafter):
        drafter.layers[0].self_attn = FixedAttention(drafter.layers[0].self_attn, key_of)

    return change


@pytest.mark.parametrize("sink", [0, 2])
def test_a_drafter_that_attends_to_the_sink_only(sink):
    drift = drift_with(attending_to(lambda num_keys: sink))
    assert drift.sink == sink
    assert [masses[KINDS.index("sink")] for masses in drift.masses] == pytest.approx([1.0] * DEPTH, abs=1e-6)
    assert drift.entropies == pytest.approx([0.0] * DEPTH, abs=1e-6)
    assert [row[0] for row in drift.attention] == pytest.approx([1.0] * DEPTH, abs=1e-6)


def test_a_drafter_that_attends_to_itself_only():
    """At depth 1 its own key is the one at which the chain begins, later the newest that the chain made."""
    drift = drift_with(attending_to(lambda num_keys: num_keys - 1))
    own, made = (KINDS.index(kind) for kind in ("own", "self"))
    assert [masses[own] for masses in drift.masses] == pytest.approx([1.0, 0.0, 0.0, 0.0], abs=1e-6)
    assert [masses[made] for masses in drift.masses] == pytest.approx([0.0, 1.0, 1.0, 1.0], abs=1e-6)
    newest = [row[2 + NUM_RECENT + k] for k, row in enumerate(drift.attention)]
    assert newest == pytest.approx([1.0] * DEPTH, abs=1e-6)


def test_masses_add_up_to_one():
    drift = drift_with(lambda drafter: None)
    assert [sum(masses) for masses in drift.masses] == pytest.approx([1.0] * DEPTH, abs=1e-5)
    assert [sum(row) for row in drift.attention] == pytest.approx([1.0] * DEPTH, abs=1e-5)


def test_a_state_that_doubles_each_step():
    def change(drafter):
        drafter.layers[0] = Doubling(drafter.layers[0])

    drift = drift_with(change, norm_output=False)
    assert drift.states == pytest.approx([drift.inputs[-1] * 2**k for k in range(1, DEPTH + 1)], rel=1e-4)
    assert drift.growth == pytest.approx(2 ** (DEPTH - 1), rel=1e-4)
    assert drift.cosines == pytest.approx([1.0] * DEPTH, abs=1e-4)


def test_a_drafter_that_is_the_target_agrees_always():
    """A drafter whose head is overruled by the target's own choice: what is drafted is what the target says."""
    target = build_target("qwen3")
    drafter = build_drafter(target)
    token = 3
    for model in (target, drafter):
        model.register_forward_hook(lambda module, args, output: favour(output, token))
    figures = measure_drift(target, drafter, PROMPT, DEPTH, 12)
    assert drift_of([figures]).agreement == [1.0] * DEPTH
    assert figures["accepted"][0] == figures["drafted"][0]


def favour(output, token):
    if output.logits is not None:
        output.logits[..., token] = output.logits.max() + 1
    return output
