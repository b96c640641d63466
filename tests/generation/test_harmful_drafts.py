"""A draft for which the target's numbers are not finite, and which plain decoding would never run, shows in no text:
neither in the forward that refuses it nor, from the slot where it was written, in a later one."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from batches import Idle, Notebook, known_prompts, left_padded
from close import TARGET_FORWARD, assert_close
from conftest import PROMPT, build_drafter, build_target
from draftings import DRAFTINGS, steady_clock
from transformers import Cache, DynamicCache, LogitsProcessorList, PreTrainedModel, StaticCache, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from eagle31_hf import AcceptanceStats, Eagle31DrafterModel, track_acceptance
from eagle31_hf.cache.adopt import keep_paths, slots
from eagle31_hf.cache.transfer import Commit, Mirrored
from eagle31_hf.generation.rejection_sampler import LockStepSampler, RejectionSampler
from eagle31_hf.generation.sequences import Ends, Sequences, Stopping
from eagle31_hf.generation.tree import DraftTokens
from eagle31_hf.targets.fused import why_not_fused
from eagle31_hf.targets.probe import why_no_trees

HARMFUL, LENGTH = 4, 14
TAKEN_FOR = {"llama": 8, "mistral_window_8": 5}  # the token instead of which drafters propose it


class Whole(DynamicLayer):
    """No stock layer: it can only append and crop."""


class Windowed(DynamicSlidingWindowLayer):
    """The same with a window."""


def foreign_cache(target: PreTrainedModel) -> Cache:
    layers = DynamicCache(config=target.config).layers
    return Cache(layers=[Windowed(layer.sliding_window) if layer.is_sliding else Whole() for layer in layers])


def batch(target: PreTrainedModel) -> dict:
    ids, mask = left_padded(known_prompts(target, 5, 7, 9))
    return {"inputs": ids, "attention_mask": mask}


def single(target: PreTrainedModel) -> dict:
    return {"inputs": torch.tensor(PROMPT)}


COMPANY: dict[str, Callable[[PreTrainedModel], dict]] = {
    "alone": single,
    "static": lambda target: single(target) | {"past_key_values": StaticCache(config=target.config, max_cache_len=40)},
    "not_ours": lambda target: single(target) | {"past_key_values": foreign_cache(target)},
    "batch": batch,
    "static_batch": lambda target: batch(target) | {"cache_implementation": "static"},
    "in_step": lambda target: batch(target) | {"stopping_criteria": StoppingCriteriaList([Idle()])},
}


@pytest.fixture(scope="module")
def pair() -> Callable[..., tuple[PreTrainedModel, Eagle31DrafterModel]]:
    """`pair(kind, attention, value)`: a target that never says HARMFUL, whose embedding of it is that value, and a
    drafter that says it now and then."""

    def of(kind: str = "llama", attention: str = "eager", value: float = float("nan")):
        target = build_target(kind, attention)
        assert why_no_trees(target) is None  # both asked before, for they try all tokens of so few
        assert why_not_fused(target)[0] is None
        with torch.no_grad():
            target.lm_head.weight[HARMFUL] = 0
            drafter = build_drafter(target)
            drafter.lm_head.weight[HARMFUL] = 1.1 * drafter.lm_head.weight[TAKEN_FOR[kind]]
            target.get_input_embeddings().weight[HARMFUL] = value
        return target, drafter

    return cache(of)


def generate(target, drafter=None, way: str = "chain", company: str = "alone", **kwargs):
    """What generate returns, the statistics, and how many forwards the target made."""
    kwargs = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 6} | COMPANY[company](target) | kwargs
    forwards = []
    handle = target.register_forward_hook(lambda *_: forwards.append(1))
    try:
        with track_acceptance() as stats:
            if drafter is None:
                return target.generate(**kwargs), stats, len(forwards)
            with steady_clock(target, drafter):
                return target.generate(**kwargs, assistant_model=drafter, **DRAFTINGS[way]), stats, len(forwards)
    finally:
        handle.remove()


def was_harmed(stats: AcceptanceStats) -> bool:
    """Whether a sequence got, from several forwards, less than the drafts it accepted and a token more from each."""
    return any(
        sum(one.accepted_per_round) + len(one.accepted_per_round) > one.generated_tokens - one.prefills + 1
        for one in stats.sequences
    )


@pytest.mark.parametrize("company", COMPANY)
@pytest.mark.parametrize(
    ("kind", "attention", "way"), [("llama", "eager", "tree"), ("mistral_window_8", "sdpa", "chain")]
)
def test_greedy_text(pair, way, kind, attention, company):
    target, drafter = pair(kind, attention)
    text, stats, forwards = generate(target, drafter, way, company)
    assert_close("text", text, generate(target, company=company)[0])
    assert was_harmed(stats)
    assert (stats.target_forwards, stats.prefills) == (forwards - 1, len(text))


def test_infinite_values(pair):
    target, drafter = pair(value=float("inf"))
    text, stats, _ = generate(target, drafter, "tree", "batch")
    assert_close("text", text, generate(target, company="batch")[0])
    assert was_harmed(stats)


@pytest.mark.parametrize(
    ("way", "company"), [("chain", "alone"), ("tree", "alone"), ("auto", "batch"), ("chain", "in_step")]
)
def test_sampled_text(pair, way, company):
    """Whatever is drafted, noise of its own makes it the text of seed and target: that of a target which HARMFUL does
    no harm."""
    # random numbers of another order
    texts, kwargs = [], {"do_sample": True, "top_k": 1 if (way, company) == ("chain", "alone") else 3}
    for value in (float("nan"), 0.0):
        models = pair(value=value)
        torch.manual_seed(1)
        text, stats, _ = generate(*models, way, company, **kwargs)
        texts.append(text)
        assert was_harmed(stats) == (value != 0)
    assert HARMFUL not in texts[1]
    assert_close("text", *texts)


@pytest.mark.parametrize(("company", "way"), [("alone", "tree"), ("in_step", "chain")])
def test_processors_see_every_prefix_once_and_nothing_that_is_no_score(pair, way, company):
    target, drafter = pair()
    books = [Notebook(strength=0.5), Notebook(strength=0.5)]
    kwargs = {
        "remove_invalid_values": True,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected, found = (
        generate(*models, company=company, logits_processor=LogitsProcessorList([book]), **kwargs)[0]
        for book, models in zip(books, [(target,), (target, drafter, way)], strict=True)
    )
    assert_close("texts", [*found.sequences, books[1].texts], [*expected.sequences, books[0].texts])
    assert_close("scores", [found.scores, found.logits], [expected.scores, expected.logits], TARGET_FORWARD)


def test_a_cache_is_handed_back_without_them():
    """Even where attention never looks at what a mask hides, so that no score has told of it."""
    past = Cache(layers=[StaticLayer(10)])
    with slots(past, 10):
        past.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), 0)
        past.update(torch.full((2, 1, 3, 4), torch.nan), torch.full((2, 1, 3, 4), torch.inf), 0)
        keep_paths(past, Mirrored([3, 3]), Commit(torch.device("cpu"), [[], []], [[], []], [False, False]))
    held = torch.ones(2, 1, 10, 4).masked_fill(torch.arange(10)[:, None] >= 3, 0)
    assert_close("keys and values", [past.layers[0].keys, past.layers[0].values], [held, held])


@pytest.mark.parametrize("kind", [RejectionSampler, LockStepSampler])
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_round_without_drafts_may_still_see_those_of_earlier_ones(is_plain, kind):
    """Only after these have been wiped out, scores that are NaN are what plain decoding sees: its choice is the first
    of them."""
    sequences, logits = Sequences(torch.tensor([[5, 7]]), 0), torch.full((1, 1, 9), torch.nan)
    drafts = DraftTokens.none(sequences.padded(), is_plain=is_plain)
    for processors in (LogitsProcessorList(), LogitsProcessorList([Notebook(9)])):
        ends = Ends(Stopping(StoppingCriteriaList(), max_length=99), sequences)
        accepted = kind(processors, None).accept(sequences, drafts, logits, ends)
        assert accepted.tokens == ([[0]] if is_plain else [[]])
        assert accepted.is_short == (not is_plain)
