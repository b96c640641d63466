"""Drift measured while a drafter serves, against the same chains computed one by one."""

import pytest
import torch
from close import FORWARD, assert_close
from conftest import build_drafter, build_target

from eagle31_hf.diagnostics.acceptance import measure_acceptance
from eagle31_hf.diagnostics.attention_mass import attention_entropy, attention_mass, state_norm
from eagle31_hf.diagnostics.chains import Chain, recorded_chains
from eagle31_hf.diagnostics.drift import NUM_FIRST, NUM_RECENT, attention_parts, drift_of, means_of, measure_drift
from eagle31_hf.targets.layers import target_states

DEPTH = 4
PROMPT = torch.tensor([[1, 2, 3, 5, 8, 2, 7]])
OTHER = torch.tensor([[4, 4, 0, 1]])


def masses_of(chain: Chain, sink: int) -> torch.Tensor:
    """The masses (K, 4) of a chain, added up key by key."""
    rows = []
    for weights in chain.weights:
        row = dict.fromkeys(("sink", "prompt", "own", "self"), 0.0)
        for key, weight in enumerate(weights.tolist()):
            kind = "sink" if key == sink else "prompt" if key < chain.begin else "own" if key == chain.begin else "self"
            row[kind] += weight
        rows.append([*row.values()])
    return torch.tensor(rows)


def test_entropy_of_equal_weights_is_the_logarithm_of_their_number():
    assert_close("entropy", attention_entropy(torch.full((1, 2, 1, 8), 1 / 8)), torch.tensor([[8.0]]).log(), FORWARD)


def test_what_is_neither_sink_nor_own_nor_made_is_the_prompts():
    masses = attention_mass(*torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1, 1))[0, 0]
    assert_close("masses", masses, torch.tensor([0.1, 0.4, 0.2, 0.3]), FORWARD)


@pytest.mark.parametrize("name", ["eagle31", "eagle3", "mla"])
@torch.no_grad()
def test_a_recorded_chain_is_the_chain_computed_by_itself(name):
    """The first chain of full depth begins at the prompt's last token; the reference is the drafter fed by hand."""
    target = build_target("qwen3")
    drafter = build_drafter(target, name)
    before = drafter.config._attn_implementation
    with recorded_chains(target, drafter) as recorder:
        measure_acceptance(target, drafter, [PROMPT], DEPTH, 9)
    assert drafter.config._attn_implementation == before
    assert not target._forward_hooks
    chain = recorder.chains[0]
    states, logits = target_states(target, PROMPT, drafter.config.aux_hidden_state_layer_ids)
    tokens = torch.cat([PROMPT[:, 1:], logits[:, -1:].argmax(-1)], dim=1)
    fused = drafter.fuse_target_states(states[:, -1:])
    parts = states[:, -1].split(drafter.config.target_hidden_size, dim=-1)
    assert chain.begin == PROMPT.shape[1] - 1
    assert chain.inputs == pytest.approx([float(state_norm(part)) for part in (*parts, fused)], rel=1e-4)
    drafter.set_attn_implementation("eager")
    text = torch.cat([PROMPT, logits[:, -1:].argmax(-1)], dim=1)
    cache, source = None, {"target_hidden_states": states}
    for k in range(DEPTH):
        output = drafter(tokens, **source, past_key_values=cache, use_cache=True, output_attentions=True)
        state = output.last_hidden_state[:, -1:]
        weights = output.attentions[0][:, :, -1:]  # (1, H, 1, keys)
        assert_close(f"weights {k}", chain.weights[k], weights[0, :, 0].mean(0), FORWARD)
        assert chain.states[k] == pytest.approx(float(state_norm(state)), rel=1e-4)
        assert chain.cosines[k] == pytest.approx(float(torch.cosine_similarity(state, fused, dim=-1)), abs=1e-4)
        assert chain.entropies[k] == pytest.approx(float(attention_entropy(weights)), rel=1e-4)
        tokens = (
            drafter.draft_to_target_ids()[output.logits[:, -1:].argmax(-1)]
            if drafter.d2t is not None
            else output.logits[:, -1:].argmax(-1)
        )
        assert chain.agreement[k] == bool(target(text).logits[0, -1].argmax() == tokens[0, -1])
        text = torch.cat([text, tokens], dim=1)
        cache, source = output.past_key_values, {"hidden_states": state}


def test_windows_leave_weights_of_nothing_where_keys_are_out_of_sight():
    target = build_target("qwen3")
    drafter = build_drafter(target, layer_types=["sliding_attention"], sliding_window=3)
    with recorded_chains(target, drafter) as recorder:
        measure_acceptance(target, drafter, [PROMPT], DEPTH, 24)
    for chain in recorder.chains:
        for k, weights in enumerate(chain.weights):
            assert len(weights) == chain.begin + 1 + k
            assert weights[:-3].count_nonzero() == 0
            assert weights.sum() == pytest.approx(1, abs=1e-5)


def test_drift_is_the_mean_over_chains_of_full_depth_whatever_the_sink():
    target = build_target("qwen3")
    drafter = build_drafter(target)
    recorded = []
    for prompt in (PROMPT, OTHER):
        with recorded_chains(target, drafter) as recorder:
            measure_acceptance(target, drafter, [prompt], DEPTH, 14)
        recorded.append(recorder.chains)
    drift = drift_of([means_of(chains, DEPTH) for chains in recorded])
    full = [chain for chains in recorded for chain in chains if len(chain.states) == DEPTH]
    assert drift.num_chains == len(full) < sum(map(len, recorded))
    assert drift.states[1] == pytest.approx(sum(chain.states[1] for chain in full) / len(full))
    assert drift.agreement[2] == pytest.approx(sum(chain.agreement[2] for chain in full) / len(full))
    masses = torch.stack([masses_of(chain, drift.sink) for chain in full]).mean(0)
    assert_close("masses", torch.tensor(drift.masses), masses, FORWARD)
    assert_close("sum", torch.tensor(drift.masses).sum(-1), torch.ones(DEPTH), FORWARD)
    by_sink = [torch.stack([masses_of(chain, sink) for chain in full])[..., 0].mean() for sink in range(NUM_FIRST)]
    assert drift.sink == int(torch.stack(by_sink).argmax())


def test_parts_of_the_attention_of_a_text_shorter_than_the_keys_that_may_be_the_sink():
    chain = Chain(begin=1, inputs=[], weights=[torch.tensor([0.2, 0.8]), torch.tensor([0.2, 0.3, 0.5])])
    parts = {name: part[1] for name, part in attention_parts(chain).items()}
    assert_close("first", parts["first"], torch.tensor([0.2, 0.3] + [0.0] * (NUM_FIRST - 2)))
    assert_close("own, less where it is the sink", parts["own"], torch.tensor([0.3, 0.0] + [0.3] * (NUM_FIRST - 2)))
    assert_close("made", parts["made"], torch.tensor([0.5, 0.0]))
    assert parts["recent"].count_nonzero() == 0


def test_attention_key_by_key_adds_up_to_the_masses():
    """A text long enough that some of its keys are neither among the first nor among the recent ones."""
    target = build_target("qwen3")
    drafter = build_drafter(target)
    prompt = torch.randint(
        0, target.config.vocab_size, (1, NUM_FIRST + NUM_RECENT + 5), generator=torch.Generator().manual_seed(0)
    )
    with recorded_chains(target, drafter) as recorder:
        measure_acceptance(target, drafter, [prompt], DEPTH, 12)
    drift = drift_of([means_of(recorder.chains, DEPTH)])
    attention = torch.tensor(drift.attention)
    assert attention.shape == (DEPTH, 3 + NUM_RECENT + DEPTH)
    sink, prompt_keys, own, made = attention.split([1, 1 + NUM_RECENT, 1, DEPTH], dim=-1)
    masses = torch.cat([part.sum(-1, keepdim=True) for part in (sink, prompt_keys, own, made)], dim=-1)
    assert_close("masses", masses, torch.tensor(drift.masses), FORWARD)
    full = [chain for chain in recorder.chains if len(chain.states) == DEPTH]
    nearest = torch.stack([chain.weights[2][chain.begin - 1] for chain in full]).mean()
    assert_close("the nearest key", attention[2, 1 + NUM_RECENT], nearest, FORWARD)
    assert attention[0, -DEPTH:].count_nonzero() == 0  # the first token sees no key of the chain


def test_figures_of_a_prompt_count_its_rounds():
    target = build_target("qwen3")
    figures = measure_drift(target, build_drafter(target), PROMPT, DEPTH, 12)
    assert figures["rounds"] - 1 <= figures["drafted"][0] <= figures["rounds"]  # the last round may have no room
    assert figures["tokens"] == 11  # the prompt's forward gave one
    assert figures["chains"] == figures["drafted"][DEPTH - 1]


def test_no_chain_of_full_depth_is_refused():
    target = build_target("qwen3")
    figures = measure_drift(target, build_drafter(target), PROMPT, DEPTH, 2)
    with pytest.raises(ValueError, match="no chain is as deep as asked for; expected longer texts"):
        drift_of([figures])
