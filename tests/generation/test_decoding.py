"""Greedy decoding gives, token for token, what the target alone gives."""

import copy
import functools

import pytest
import torch
from close import assert_close
from conftest import DRAFTERS, KNOWN_TOKENS, TARGETS, VOCAB, build_drafter, greedy_text
from observers import Diary, InterruptError, Puts, num_hooks, raise_at, speculate
from transformers import LogitsProcessorList, StoppingCriteriaList

import eagle31_hf
from eagle31_hf.generation import hook

LENGTH = 24
GREEDY = {"max_new_tokens": LENGTH, "do_sample": False}
DRAFTED = GREEDY | {"num_assistant_tokens": 5}
PAIRS = [(kind, name, "sdpa", [4]) for kind in TARGETS for name in DRAFTERS]
PAIRS += [(kind, name, "eager", [7]) for kind in TARGETS for name in ("eagle31", "window_4")]
PAIRS += [("llama", name, "sdpa", [1, 3, 7]) for name in DRAFTERS]


@pytest.mark.parametrize(
    ("kind", "name", "attention", "depths"), PAIRS, ids=[f"{k}-{n}-{a}-{d}" for k, n, a, d in PAIRS]
)
def test_greedy_equals_the_target_alone(make_target, make_drafter, prompt, kind, name, attention, depths):
    target = make_target(kind, attention)
    drafter, expected = make_drafter(target, name, attention), greedy_text(target)[:, : prompt.shape[1] + LENGTH]
    accepted, rejected = [], 0
    for depth in depths:
        output, stats = speculate(target, drafter, prompt, num_assistant_tokens=depth, **GREEDY)
        assert_close(f"text at depth {depth}", output, expected)
        assert stats.generated_tokens == LENGTH
        accepted += stats.accepted_per_round
        rejected += sum(stats.drafted_per_position) - sum(stats.accepted_per_position)
    if not drafter.config.share_target_head:  # such a drafter cannot be fitted, and is right by chance only
        assert rejected > 0, "nothing was ever rejected"
        assert max(accepted) >= 1, "no burst was ever committed"


@pytest.mark.parametrize("vocab_size", [VOCAB + 5, VOCAB - 2], ids=["target_padded", "drafter_padded"])
def test_vocabularies_a_padding_apart(make_target, make_drafter, prompt, vocab_size):
    target, other = make_target(vocab_size=vocab_size), make_target()
    drafter = make_drafter(other)  # of VOCAB ids, with the wrong target's text in its head
    prompt = prompt % vocab_size
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        output, _ = speculate(target, drafter, prompt, max_new_tokens=LENGTH, **sampling, num_assistant_tokens=5)
        assert int(output.max()) < vocab_size
        if not sampling["do_sample"]:
            assert_close("text", output, target.generate(prompt, **GREEDY))


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[10], [2, 7], [8, 8]]},
    "min_new_tokens": {"eos_token_id": 10, "min_new_tokens": 9},
    "forced_eos": {"forced_eos_token_id": 3},
    "suppress": {"suppress_tokens": [2]},
    "sequence_bias": {"sequence_bias": [[[2], -1.5], [[7, 10], 4.0]]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "exponential_decay_to_eos": {"eos_token_id": 9, "exponential_decay_length_penalty": (6, 1.2)},
    "classifier_free_guidance": {"guidance_scale": 1.7},  # runs the target itself, and keeps a cache of its own
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda batch, ids: [int(ids[-1] + len(ids)) % VOCAB, 2, 8]},
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[7]],
        "eos_token_id": 4,
        "min_new_tokens": 12,
    },
}


@pytest.mark.parametrize("name", ["eagle31", "pruned"])
@pytest.mark.parametrize("kwargs", PROCESSORS.values(), ids=PROCESSORS)
def test_processors(target, make_drafter, prompt, kwargs, name):
    output, _ = speculate(target, make_drafter(target, name), prompt, num_assistant_tokens=4, **GREEDY, **kwargs)
    assert_close("text", output, target.generate(prompt, **GREEDY, **kwargs))


@pytest.mark.parametrize("stop", [{}, {"eos_token_id": 10}], ids=["length", "eos"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_processor_sees_every_committed_prefix_once(target, drafter, prompt, do_sample, stop):
    diary = Diary(VOCAB)
    kwargs = {"max_new_tokens": LENGTH, "do_sample": do_sample} | stop
    torch.manual_seed(0)
    output, stats = speculate(
        target, drafter, prompt, logits_processor=LogitsProcessorList([diary]), **kwargs, num_assistant_tokens=5
    )
    text = output[0].tolist()
    assert diary.prefixes == [text[:i] for i in range(prompt.shape[1], len(text))]
    assert max(stats.accepted_per_round) >= 1
    if not do_sample:
        alone = target.generate(prompt, logits_processor=LogitsProcessorList([Diary(VOCAB)]), **kwargs)
        assert_close("text", output, alone)


@pytest.mark.parametrize("count", range(1, 14))
@pytest.mark.parametrize("limit", ["max_new_tokens", "max_length"])
def test_every_length(target, drafter, prompt, limit, count):
    length = prompt.shape[1] + count
    kwargs = {limit: count if limit == "max_new_tokens" else length}
    output, stats = speculate(target, drafter, prompt, num_assistant_tokens=5, do_sample=False, **kwargs)
    assert_close("text", output, greedy_text(target)[:, :length])
    assert stats.generated_tokens == count


@pytest.mark.parametrize("kind", TARGETS)
def test_left_padding(make_target, make_drafter, prompt, kind):
    target = make_target(kind)
    drafter = make_drafter(target)
    padded = torch.nn.functional.pad(prompt, (4, 0), value=6)
    mask = (torch.arange(padded.shape[1]) >= 4).long()[None]
    output, stats = speculate(target, drafter, padded, attention_mask=mask, pad_token_id=6, **DRAFTED)
    assert_close("text", output, target.generate(padded, attention_mask=mask, pad_token_id=6, **GREEDY))
    _, unpadded = speculate(target, drafter, prompt, **DRAFTED)
    assert stats.accepted_per_round == unpadded.accepted_per_round, "padding changed what is drafted"


@pytest.mark.parametrize(
    "kwargs",
    [{"token_type_ids": [[0, 0, 0, 3, 1]]}, {"position_ids": [[2, 3, 4, 5, 6]]}],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_inputs_that_grow_with_the_text(make_target, make_drafter, prompt, kwargs):
    """Every new token is of the last one's type and at the next position."""
    target = make_target("gpt2")
    kwargs = {name: torch.tensor(value) for name, value in kwargs.items()}
    output, _ = speculate(target, make_drafter(target), prompt, num_assistant_tokens=7, **kwargs, **GREEDY)
    assert_close("text", output, target.generate(prompt, **kwargs, **GREEDY))


@pytest.mark.parametrize("kind", ["llama", "mistral_window_8"])
def test_a_prefill_in_chunks(make_target, make_drafter, prompt, kind):
    target = make_target(kind)
    output, stats = speculate(target, make_drafter(target), prompt, prefill_chunk_size=2, **DRAFTED)
    assert_close("text", output, greedy_text(target)[:, : output.shape[1]])
    assert stats.accepted_per_round == speculate(target, make_drafter(target), prompt, **DRAFTED)[1].accepted_per_round


OFFLOADED = pytest.param("offloaded", marks=pytest.mark.gpu)  # it needs CUDA streams


@pytest.mark.parametrize("implementation", ["dynamic", OFFLOADED])
def test_cache_implementations(target, drafter, prompt, implementation):
    device = "cuda" if implementation == "offloaded" else "cpu"
    models = [copy.deepcopy(model).to(device) for model in (target, drafter)]
    output, _ = speculate(*models, prompt.to(device), cache_implementation=implementation, **DRAFTED)
    assert_close("text", output.cpu(), greedy_text(target)[:, : output.shape[1]])


@pytest.mark.parametrize("name", ["eagle31", "target_head"])
def test_a_drafter_of_another_type(target, prompt, name):
    drafter = build_drafter(target, name).bfloat16()
    for do_sample in (False, True):
        output, _ = speculate(
            target, drafter, prompt, max_new_tokens=LENGTH, do_sample=do_sample, num_assistant_tokens=5
        )
        assert do_sample or output.equal(greedy_text(target)[:, : output.shape[1]])


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("ids", [[4], [9, 9]], ids=["1_token", "2_tokens"])
def test_short_prompts(make_target, make_drafter, kind, ids):
    target, prompt = make_target(kind), torch.tensor([ids])
    output, _ = speculate(target, make_drafter(target), prompt, **DRAFTED)
    assert_close("text", output, target.generate(prompt, **GREEDY))


def test_confidence_threshold_shortens_chains_only(target, drafter, prompt):
    drafted = []
    for threshold in (0.0, 0.3, 0.99):
        output, stats = speculate(
            target, drafter, prompt, num_assistant_tokens=6, assistant_confidence_threshold=threshold, **GREEDY
        )
        assert_close(f"text at threshold {threshold}", output, greedy_text(target)[:, : output.shape[1]])
        drafted.append(stats.drafted_per_position)
    shares = [sum(positions[1:]) / positions[0] for positions in drafted]
    assert shares[0] > shares[1] > shares[2], f"drafts per chain after the first: {shares}"


def test_the_same_drafter_prompt_after_prompt(target, make_drafter, prompt):
    drafter, prompts = make_drafter(target), [prompt, torch.tensor([[4, 4]]), prompt.flip(1), prompt]
    rounds = []
    for ids in prompts:
        output, stats = speculate(target, drafter, ids, **DRAFTED)
        assert_close(f"text after {ids.tolist()}", output, target.generate(ids, **GREEDY))
        rounds.append(stats.accepted_per_round)
    assert rounds[0] == rounds[-1], "an earlier prompt changed what is drafted"


@pytest.mark.parametrize("name", ["eagle31", "target_head"])
def test_two_targets_by_turns(make_target, make_drafter, prompt, name):
    targets = make_target("llama"), make_target("llama", rms_norm_eps=1e-3)  # the same shapes and seed, other texts
    drafter = make_drafter(targets[0], name)
    expected = [speculate(target, make_drafter(target, name), prompt, **DRAFTED) for target in targets]
    for i in (0, 1, 0):
        output, stats = speculate(targets[i], drafter, prompt, **DRAFTED)
        assert_close(f"text of target {i}", output, expected[i][0])
        assert drafter.get_input_embeddings() is targets[i].get_input_embeddings()
        if i == 0:
            assert stats.accepted_per_round == expected[0][1].accepted_per_round


def test_custom_generate_is_the_same(target, drafter, prompt):
    expected, expected_stats = speculate(target, drafter, prompt, **DRAFTED)
    for installed in (True, False):
        if not installed:
            hook.uninstall()
        try:
            with eagle31_hf.track_acceptance() as stats:
                output = target.generate(prompt, custom_generate=drafter.decode, **DRAFTED)
        finally:
            hook.install()
        assert_close(f"text, installed {installed}", output, expected)
        assert stats.accepted_per_round == expected_stats.accepted_per_round


def test_custom_generate_takes_knobs_and_a_streamer(target, drafter, prompt):
    streamer, alone = Puts(), Puts()
    bound = functools.partial(drafter.decode, streamer=streamer)
    with eagle31_hf.track_acceptance() as stats:
        target.generate(
            prompt, custom_generate=bound, num_assistant_tokens=20, assistant_confidence_threshold=0.01, **GREEDY
        )
    target.generate(prompt, streamer=alone, **GREEDY)
    assert streamer.calls == alone.calls
    assert len(stats.drafted_per_position) > 5, "num_assistant_tokens was not heard"


def failing(place: str, call: int):
    """Keyword arguments of a generate that fails in the user's own code, at its `call`-th call."""
    if place == "processor":
        return {"logits_processor": LogitsProcessorList([raise_at(call, lambda ids, scores: scores)])}
    if place == "criterion":
        return {
            "stopping_criteria": StoppingCriteriaList(
                [raise_at(call, lambda ids, scores: torch.zeros(1, dtype=torch.bool))]
            )
        }
    streamer = Puts()
    streamer.put = raise_at(call)
    return {"streamer": streamer}


@pytest.mark.parametrize("call", [1, 2, 6])
@pytest.mark.parametrize("place", ["processor", "criterion", "streamer"])
def test_an_exception_leaves_nothing_behind(make_target, make_drafter, prompt, place, call):
    target = make_target("mistral_window_8")
    drafter, past = make_drafter(target), target(prompt[:, :3]).past_key_values
    found = [(type(layer), layer.record_past) for layer in past.layers]
    with pytest.raises(InterruptError):
        target.generate(prompt, assistant_model=drafter, past_key_values=past, **DRAFTED, **failing(place, call))
    assert num_hooks(target) == 0
    assert [(type(layer), layer.record_past) for layer in past.layers] == found, "the cache is not as it was handed in"
    output, _ = speculate(target, drafter, prompt, **DRAFTED)
    assert_close("text of the next call", output, greedy_text(target)[:, : output.shape[1]])


def test_leaves_the_models_as_they_were(target, drafter, prompt):
    before = [model.generation_config.to_dict() for model in (target, drafter)]
    speculate(target, drafter, prompt, num_assistant_tokens=3, assistant_confidence_threshold=0.1, **GREEDY)
    assert [model.generation_config.to_dict() for model in (target, drafter)] == before
    assert num_hooks(target) == 0
    assert not any("embed" in name for name, _ in drafter.named_parameters()), (
        "the target's embedding became the drafter's"
    )


def test_the_text_a_drafter_knows_is_long_enough():
    assert KNOWN_TOKENS >= LENGTH
