"""Drift measured while a drafter serves, against the same chains computed one by one."""

import pytest
import torch
from close import FORWARD, assert_close
from conftest import build_drafter, build_target

from eagle31_hf.diagnostics.acceptance import measure_acceptance
from eagle31_hf.diagnostics.attention_mass import attention_entropy, attention_mass, mass_of_chain
from eagle31_hf.diagnostics.drift import log_growth, recorded_chains, state_norm
from eagle31_hf.targets.layers import target_states

DEPTH = 4
PROMPT = torch.tensor([[1, 2, 3, 5, 8, 2, 7]])


def test_masses_are_columns_of_the_attention_and_add_up_to_one():
    weights = torch.rand(2, 3, 5, 9, generator=torch.Generator().manual_seed(0)).softmax(-1)
    masses = mass_of_chain(weights, num_made=2)
    mean = weights.mean(1)
    columns = (mean[..., 0], mean[..., 1:6].sum(-1), mean[..., 6], mean[..., 7:].sum(-1))
    assert_close("masses", masses, torch.stack(columns, dim=-1), FORWARD)
    assert_close("sum", masses.sum(-1), torch.ones(2, 5), FORWARD)


def test_a_chain_that_begins_at_the_texts_first_key_counts_it_once():
    weights = torch.tensor([0.6, 0.3, 0.1]).view(1, 1, 1, 3)
    assert_close("masses", mass_of_chain(weights, 2)[0, 0], torch.tensor([0.6, 0.0, 0.0, 0.4]), FORWARD)
    assert_close("of parts", attention_mass(*torch.zeros(3, 1, 1, 1))[0, 0], torch.tensor([0.0, 1.0, 0.0, 0.0]))


def test_entropy_of_equal_weights_is_the_logarithm_of_their_number():
    assert_close("entropy", attention_entropy(torch.full((1, 2, 1, 8), 1 / 8)), torch.tensor([[8.0]]).log(), FORWARD)


def test_growth_is_the_logarithm_of_a_factor():
    assert_close("growth", log_growth(torch.tensor([2.0, 0.5]), torch.ones(2)), torch.tensor([2.0, 0.5]).log(), FORWARD)


@pytest.mark.parametrize("name", ["eagle31", "eagle3", "mla"])
@torch.no_grad()
def test_a_recorded_chain_is_the_chain_computed_by_itself(name):
    """The first chain of full depth begins at the prompt's last token; the reference is the drafter fed by hand."""
    target = build_target("qwen3")
    drafter = build_drafter(target, name)
    before = drafter.config._attn_implementation
    with recorded_chains(drafter) as recorder:
        measure_acceptance(target, drafter, [PROMPT], DEPTH, 9)
    assert drafter.config._attn_implementation == before
    chain = next(chain for chain in recorder.chains if len(chain.states) == DEPTH)
    states, logits = target_states(target, PROMPT, drafter.config.aux_hidden_state_layer_ids)
    tokens = torch.cat([PROMPT[:, 1:], logits[:, -1:].argmax(-1)], dim=1)
    parts = states[:, -1].split(drafter.config.target_hidden_size, dim=-1)
    inputs = [float(state_norm(part)) for part in (*parts, drafter.fuse_target_states(states[:, -1:]))]
    assert chain.inputs == pytest.approx(inputs, rel=1e-4)
    drafter.set_attn_implementation("eager")
    cache, source = None, {"target_hidden_states": states}
    for k in range(DEPTH):
        output = drafter(tokens, **source, past_key_values=cache, use_cache=True, output_attentions=True)
        weights = output.attentions[0][:, :, -1]  # (1, H, keys)
        keys = PROMPT.shape[1]
        wanted = [weights[..., 0], weights[..., 1 : keys - 1], weights[..., keys - 1 : keys], weights[..., keys:]]
        wanted = [wanted[0].mean(), *(part.sum(-1).mean() for part in wanted[1:])]
        assert_close(f"depth {k}", torch.tensor(chain.masses[k]), torch.stack(wanted), FORWARD)
        assert chain.states[k] == pytest.approx(float(state_norm(output.last_hidden_state[:, -1])), rel=1e-4)
        tokens = output.logits[:, -1:].argmax(-1)
        cache, source = output.past_key_values, {"hidden_states": output.last_hidden_state[:, -1:]}


def test_drift_is_the_mean_over_chains_of_full_depth():
    target = build_target("qwen3")
    with recorded_chains(build_drafter(target)) as recorder:
        measure_acceptance(target, build_drafter(target), [], DEPTH, 9)
    with pytest.raises(ValueError, match="none of 0 chains is 4 tokens deep"):
        recorder.drift(DEPTH)
    drafter = build_drafter(target)
    with recorded_chains(drafter) as recorder:
        stats = measure_acceptance(target, drafter, [PROMPT, PROMPT[:, :4]], DEPTH, 12)
    full = [chain for chain in recorder.chains if len(chain.states) == DEPTH]
    drift = recorder.drift(DEPTH)
    assert drift.num_chains == len(full) == stats.drafted_per_position[DEPTH - 1]
    assert drift.states[1] == pytest.approx(sum(chain.states[1] for chain in full) / len(full))
    assert [len(masses) for masses in drift.masses] == [4] * DEPTH
