"""`return_dict_in_generate` gives one entry a token, of the shapes and values plain generate gives."""

import pytest
import torch
from close import TARGET_FORWARD, assert_close
from conftest import REREADS_IN_CHUNKS, TARGETS, greedy_text
from draftings import TREE
from families import build_drafter, build_target
from observers import Countdown, speculate
from transformers import LogitsProcessor, StaticCache, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from eagle31_hf.acceptance import TREES

FIELDS = ("scores", "logits", "hidden_states")  # beside which drafts are made
ATTENTIONS = {"return_dict_in_generate": True, "output_attentions": True}
LENGTH = 17


CHAIN = {"num_assistant_tokens": 5}
DRAFTED = {  # how drafts are asked for, and which fields; those of a tree's nodes are not the sequence's
    "chain": (CHAIN, FIELDS),
    "tree": (TREE, ("scores", "logits")),
    "chain_for_a_tree": (TREE, FIELDS),
}


CASES = [  # the tokens after which it stops, inside a burst
    *((kind, "chain", None) for kind in TARGETS),
    ("llama", "chain", 7),
    ("gemma3_window_8", "tree", None),
    ("llama", "tree", 7),
    ("gemma3_window_8", "chain_for_a_tree", 7),
]


@pytest.mark.parametrize(("kind", "drafting", "stop"), CASES)
def test_greedy_outputs_equal_those_of_plain_generate(make_target, make_drafter, prompt, kind, drafting, stop):
    (drafting, fields), target = DRAFTED[drafting], make_target(kind, "eager")  # which returns attentions
    kwargs = {"max_new_tokens": LENGTH, "do_sample": False, "repetition_penalty": 1.1, "return_dict_in_generate": True}
    kwargs |= {f"output_{name}": True for name in fields}
    ours, alone = (
        {} if stop is None else {"stopping_criteria": StoppingCriteriaList([Countdown(stop)])} for _ in range(2)
    )
    output, stats = speculate(target, make_drafter(target, "eagle31", "eager"), prompt, **drafting, **kwargs, **ours)
    expected = target.generate(prompt, **kwargs, **alone)
    assert max(stats.accepted_per_round) >= 1
    assert bool(stats.kinds[TREES]) == (fields != FIELDS)
    assert type(output) is type(expected) is GenerateDecoderOnlyOutput
    assert_close("sequences", output.sequences, expected.sequences)
    for name in FIELDS:
        assert_close(name, getattr(output, name), getattr(expected, name), TARGET_FORWARD)


@pytest.mark.parametrize("kind", TARGETS)
def test_attentions_are_those_of_plain_generate_and_nothing_is_drafted(make_target, make_drafter, prompt, kind):
    target = make_target(kind, "eager")  # which returns attentions
    kwargs = {"max_new_tokens": LENGTH, "do_sample": False, **ATTENTIONS}
    output, stats = speculate(target, make_drafter(target, "eagle31", "eager"), prompt, **CHAIN, **kwargs)
    assert sum(stats.drafted_per_position) == 0
    assert_close("attentions", output.attentions, target.generate(prompt, **kwargs).attentions, TARGET_FORWARD)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("tokens", [5, 9])
@pytest.mark.parametrize("kind", ["qwen3", "mistral_window_8"])
def test_attentions_over_a_static_cache(make_target, make_drafter, kind, tokens, chunk):
    """Over all its slots, used or not; windowed layers have as many as the window, and show a longer prompt whole."""
    target = make_target(kind, "eager")
    text = greedy_text(target)
    pasts = [StaticCache(config=target.config, max_cache_len=40) for _ in range(2)]
    kwargs = {"max_new_tokens": 7, "do_sample": False, "prefill_chunk_size": chunk, **ATTENTIONS}
    turns = (tokens,) if chunk and REREADS_IN_CHUNKS else (tokens, tokens + 11)  # a turn, and another one
    for length in turns:
        output, _ = speculate(
            target, make_drafter(target), text[:, :length], num_assistant_tokens=4, past_key_values=pasts[0], **kwargs
        )
        expected = target.generate(text[:, :length], past_key_values=pasts[1], **kwargs)
        assert_close("attentions", output.attentions, expected.attentions, TARGET_FORWARD)


def test_attentions_where_some_layers_have_none(prompt):
    """Of convolutions there are none."""
    target = build_target("LFM2", "eager")
    kwargs = {"max_new_tokens": 7, "do_sample": False, **ATTENTIONS}
    output, _ = speculate(target, build_drafter("LFM2"), prompt, num_assistant_tokens=4, **kwargs)
    assert_close("attentions", output.attentions, target.generate(prompt, **kwargs).attentions, TARGET_FORWARD)


class Forbids(LogitsProcessor):
    """The last token again, by writing to the scores."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_(1, input_ids[:, -1:], float("-inf"))


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_processor_that_writes_to_the_scores(target, drafter, prompt, num_sequences):
    """Plain generate hands it the tensor that is the step's logits."""
    kwargs = {
        "max_new_tokens": LENGTH,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_scores": True,
    }
    output, _ = speculate(
        target, drafter, prompt.repeat(num_sequences, 1), logits_processor=[Forbids()], num_assistant_tokens=5, **kwargs
    )
    expected = target.generate(prompt.repeat(num_sequences, 1), logits_processor=[Forbids()], **kwargs)
    for name in ("sequences", "scores", "logits"):
        assert_close(name, output[name], expected[name], TARGET_FORWARD)


def shapes(value):
    return tuple(shapes(part) for part in value) if isinstance(value, tuple) else tuple(value.shape)


@pytest.mark.parametrize("name", [*FIELDS, "attentions"])
def test_sampled_outputs_have_the_shapes_of_plain_generate(make_target, make_drafter, prompt, name):
    target = make_target("llama", "eager")
    kwargs = {
        "max_new_tokens": LENGTH,
        "do_sample": True,
        "top_k": 4,
        "return_dict_in_generate": True,
        f"output_{name}": True,
    }
    torch.manual_seed(0)
    output, _ = speculate(target, make_drafter(target, "eagle31", "eager"), prompt, **kwargs, num_assistant_tokens=5)
    assert shapes(getattr(output, name)) == shapes(getattr(target.generate(prompt, **kwargs), name))
    others = {*FIELDS, "attentions"} - {name}
    assert all(getattr(output, other) is None for other in others), "what nobody asked for"


def test_attentions_that_sdpa_does_not_return(target, drafter, prompt):
    """Plain generate warns and leaves them out."""
    kwargs = {"max_new_tokens": LENGTH, "do_sample": False, **ATTENTIONS}
    output, _ = speculate(target, drafter, prompt, **kwargs, num_assistant_tokens=5)
    assert_close("attentions", output.attentions, target.generate(prompt, **kwargs).attentions)


def test_a_tensor_unless_a_dict_is_asked_for(target, drafter, prompt):
    output, _ = speculate(
        target, drafter, prompt, max_new_tokens=LENGTH, do_sample=False, output_scores=True, num_assistant_tokens=5
    )
    assert isinstance(output, torch.Tensor)


def test_memory_of_rejected_drafts_is_not_kept(target, drafter, prompt):
    """Whoever keeps the outputs keeps what they are views of: at most the logits of one round."""
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output, _ = speculate(target, drafter, prompt, max_new_tokens=LENGTH, do_sample=False, **TREE, **asked)
    kept = [*output.scores, *output.logits]
    assert all(each.untyped_storage().nbytes() <= 4 * 4 * each.numel() for each in kept)


@pytest.mark.parametrize("name", ["Gemma4 text, shared keys", "Gemma3n text"])
def test_attentions_of_layers_that_read_others_keys(name):
    target, drafter = build_target(name, "eager"), build_drafter(name)
    options = {"max_new_tokens": LENGTH, "do_sample": False, **ATTENTIONS}
    ids = torch.tensor([[1, 2, 3, 5, 8]])
    output, _ = speculate(target, drafter, ids, **CHAIN, **options)
    expected = target.generate(ids, **options)
    assert_close("sequences", output.sequences, expected.sequences)
    assert_close("attentions", output.attentions, expected.attentions, TARGET_FORWARD)
