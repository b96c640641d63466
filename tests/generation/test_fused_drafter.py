"""Captured rounds whose layers are fused give the target's own text; and a fused drafter computes what its forward
does."""

import pytest
import torch
from close import FORWARD, assert_close
from conftest import greedy_text
from draftings import CHAIN_OR_TREE as DRAFTINGS
from factories import VARIANTS, build, inputs
from families import padded

from eagle31_hf import demo, track_acceptance
from eagle31_hf.cache import adopt
from eagle31_hf.cache.arena import Arena, move_into
from eagle31_hf.generation.captured.fused_drafter import Layout, can_fuse, run_fused
from eagle31_hf.generation.captured.seam import Uncaptured, seams
from eagle31_hf.targets.fused import why_not_fused
from eagle31_hf.targets.masks import spans_of

TARGETS = {
    "llama": ("llama", {"num_hidden_layers": 4}),
    "llama with biases": ("llama", {"num_hidden_layers": 4, "attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {}),
    "mistral_window_8": ("mistral_window_8", {}),
}
FUSED = {name: fields for name, fields in VARIANTS.items() if name != "mla"}


TEXTS = [
    ("llama", "tree", 3),
    ("llama with biases", "chain", 1),
    ("qwen3", "chain", 3),
    ("mistral_window_8", "tree", 1),
    ("mistral_window_8", "chain", 3),
]


@pytest.mark.parametrize(("name", "drafting", "num_prompts"), TEXTS)
def test_text_is_the_targets_own(make_target, make_drafter, fused_widths, name, drafting, num_prompts):
    kind, fields = TARGETS[name]
    target = make_target(kind, **fields)
    drafter = make_drafter(target)
    known = greedy_text(target)[0].tolist()
    batch = padded([known[:5], known[:8], [7, 6]][:num_prompts])
    asked = {"max_new_tokens": 16, "do_sample": False}
    with seams(lambda device: Uncaptured()), track_acceptance() as stats:
        ours = target.generate(**batch, **asked, assistant_model=drafter, **DRAFTINGS[drafting])
    assert set(stats.executions) == {"as tensors without graphs"}
    assert torch.equal(ours, target.generate(**batch, **asked))
    assert sum(stats.accepted_per_position) > 0
    assert why_not_fused(target) == [None] * 5
    assert len(fused_widths) > stats.target_forwards  # each round reads, and drafts


def test_text_of_the_demo_pair(fused_widths):
    target, tokenizer = demo.load_target()
    prompt = demo.prompts(tokenizer, 1)[0]
    asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "do_sample": False}
    with seams(lambda device: Uncaptured()), track_acceptance() as stats:
        ours = target.generate(prompt, **asked, assistant_model=demo.load_drafter("eagle31"), **DRAFTINGS["tree"])
    assert torch.equal(ours, target.generate(prompt, **asked))
    assert set(why_not_fused(target)) == {None}
    assert len(fused_widths) > stats.target_forwards
    assert stats.mean_accepted_length > 1.5


@torch.no_grad()
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_drafter_computes_what_its_forward_does(name):
    """Reading states of the target, then on its own state, two tokens of a tree that do not see each other."""
    drafter = build(**FUSED[name])
    tokens, states = inputs(drafter, length=6)
    found = []
    for is_fused in (True, False):
        cache, _ = adopt.slot_cache(drafter.config)
        placement = move_into(cache, Arena(32))
        last = torch.tensor([[5], [3]])
        read = forward(drafter, cache, placement, tokens, {"target_hidden_states": states}, (0, None), last, is_fused)
        state = read[0].expand(-1, 2, -1)
        source = {"hidden_states": state.contiguous()}
        step = forward(drafter, cache, placement, tokens[:, :2], source, (6, (1, 2)), None, is_fused)
        found.append((*read, *step, *[layer.buffers for layer in cache.layers]))
    assert can_fuse(drafter)
    assert_close("read, step, keys", found[0], found[1], 2 * FORWARD)


def forward(drafter, cache, placement, tokens, source, start_and_bits, last, is_fused):
    """States and logits of tokens (B, T) from a slot on: a chain, or with bits (T) nodes at one place."""
    start, bits = start_and_bits
    count = torch.arange(tokens.shape[1])[None].expand(len(tokens), -1)
    starts = torch.full((len(tokens), 1), start)
    places = starts + count if bits is None else starts.expand_as(count)
    seen = (2 << count) - 1 if bits is None else torch.tensor([bits]).expand_as(count)
    windows = {"full_attention": None, "sliding_attention": drafter.config.sliding_window}
    begin = torch.zeros_like(starts)
    spans = {kind: spans_of(starts, begin, places, seen, windows[kind]) for kind in drafter.config.layer_types}
    placement.on_device = starts
    rope = list(drafter.rotary_emb(drafter.like, places))
    if is_fused:
        return run_fused(drafter, tokens, source, Layout(places, {}, spans, rope), cache, last)
    out = drafter(
        tokens,
        **source,
        position_embeddings=tuple(rope),
        attention_mask=spans,
        past_key_values=cache,
        logits_to_keep=0 if last is None else last[:, 0],
    )
    state = out.last_hidden_state
    return (state if last is None else state[torch.arange(len(state)), last[:, 0]][:, None]), out.logits


def test_other_drafters_run_their_own_forward():
    class Wrapped(torch.nn.Linear):
        pass

    assert can_fuse(build())
    assert not can_fuse(build(**VARIANTS["mla"]))
    assert not can_fuse(build(hidden_act="gelu"))
    drafter = build()
    drafter.layers[0].self_attn.q_proj.__class__ = Wrapped
    assert not can_fuse(drafter)
    drafter = build()
    drafter.layers[0].mlp.forward = lambda x: x
    assert not can_fuse(drafter)


def test_a_drafter_that_is_not_fused_gives_the_same_text(make_target, make_drafter, fused_widths, prompt):
    target = make_target()
    drafter = make_drafter(target, "mla")
    asked = {"max_new_tokens": 12, "do_sample": False}
    with seams(lambda device: Uncaptured()), track_acceptance() as stats:
        ours = target.generate(prompt, **asked, assistant_model=drafter, **DRAFTINGS["tree"])
    assert torch.equal(ours, target.generate(prompt, **asked))
    assert set(stats.executions) == {"as tensors without graphs"}
    assert fused_widths == []
