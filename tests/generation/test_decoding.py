"""Greedy decoding gives, token for token, what the target alone gives, by chains and by trees."""

import copy
import functools

import pytest
import torch
from close import assert_close
from conftest import DRAFTERS, KNOWN_TOKENS, TARGETS, VOCAB, build_drafter, greedy_text
from draftings import CHAIN, CHAIN_OR_TREE, PER_SEQUENCE, TOGETHER, TREE, tree_of
from observers import Diary, Puts, num_hooks, speculate
from torch.nn.functional import pad
from transformers import LogitsProcessorList

import eagle31_hf
from eagle31_hf.generation import hook
from eagle31_hf.generation.proposer import Proposer
from eagle31_hf.generation.tree import DraftTokens

LENGTH = 24
GREEDY = {"max_new_tokens": LENGTH, "do_sample": False}
DRAFTED = GREEDY | {"num_assistant_tokens": 5}
each_drafting = pytest.mark.parametrize("drafting", CHAIN_OR_TREE.values(), ids=CHAIN_OR_TREE)


@pytest.fixture
def drafted(monkeypatch) -> list[DraftTokens]:
    """Everything that is drafted: a test of trees must not pass on chains."""
    drafts, original = [], Proposer.propose

    def propose(self, unread, prefixes, plan):
        drafts.append(original(self, unread, prefixes, plan))
        assert drafts[-1].is_chain == (plan.top_k == 1)
        return drafts[-1]

    monkeypatch.setattr(Proposer, "propose", propose)
    return drafts


def branches(drafted: list[DraftTokens]) -> bool:
    return any(len(children) > 1 for drafts in drafted for children in drafts.on_host()[0].children[0])


# --- targets and drafters ---


def chains(*depths: int) -> list[dict[str, int]]:
    return [{"num_assistant_tokens": depth} for depth in depths]


TREES = [tree_of(3, 16, 4), tree_of(10, 60, 8), tree_of(2, 5, 3), tree_of(11, 12, 1), tree_of(4, 2, 6)]
PAIRS = [("llama", name, "sdpa", chains(4)) for name in DRAFTERS] + [("llama", "eagle31", "sdpa", chains(1, 7))]
PAIRS += [(kind, "window_4", "eager", chains(7)) for kind in TARGETS]
PAIRS += [(kind, "pruned", "eager", TREES[:1]) for kind in TARGETS]
PAIRS += [(kind, "eagle31", "sdpa", TREES[i % 3 : i % 3 + 2]) for i, kind in enumerate(TARGETS)]
PAIRS += [
    ("llama", name, "sdpa", TREES[:1])
    for name in ("eagle3", "two_layers", "window_4", "own_embedding", "mla", "padded_vocabulary", "target_head")
]


def name_of(knobs: list[dict[str, int]]) -> str:
    return " ".join("-".join(map(str, each.values())) for each in knobs)


@pytest.mark.parametrize(
    ("kind", "name", "attention", "knobs"), PAIRS, ids=[f"{k}-{n}-{a}-{name_of(s)}" for k, n, a, s in PAIRS]
)
def test_greedy_equals_the_target_alone(make_target, make_drafter, drafted, prompt, kind, name, attention, knobs):
    target = make_target(kind, attention)
    drafter, expected = make_drafter(target, name, attention), greedy_text(target)[:, : prompt.shape[1] + LENGTH]
    accepted, rejected = [], 0
    for drafting in knobs:
        drafted.clear()
        output, stats = speculate(target, drafter, prompt, **drafting, **GREEDY)
        assert_close(f"text with {drafting}", output, expected)
        assert stats.generated_tokens == LENGTH
        accepted += stats.accepted_per_round
        rejected += sum(stats.drafted_per_position) - sum(stats.accepted_per_position)
        assert len(drafted) >= stats.target_forwards - 1  # nothing is left to draft for the last token
        assert max(drafts.depth for drafts in drafted) <= drafting["num_assistant_tokens"]
        assert max(drafts.num_nodes for drafts in drafted) <= drafting.get("draft_tree_total_tokens", 8)
        assert branches(drafted) == (drafting.get("draft_tree_total_tokens", 2) > 2)
    if not drafter.config.share_target_head:  # such a drafter cannot be fitted, and is right by chance only
        assert rejected > 0 or branches(drafted), "nothing was ever rejected"
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


@pytest.mark.parametrize("name", ["eagle31", "target_head"])
def test_a_drafter_of_another_type(target, prompt, name):
    drafter = build_drafter(target, name).bfloat16()
    for do_sample in (False, True):
        output, _ = speculate(
            target, drafter, prompt, max_new_tokens=LENGTH, do_sample=do_sample, num_assistant_tokens=5
        )
        assert do_sample or output.equal(greedy_text(target)[:, : output.shape[1]])


def test_a_tree_of_everything_is_always_right(target, drafter, prompt):
    """Every token, and every pair of tokens, is among the drafts."""
    for depth in (1, 2):
        output, stats = speculate(target, drafter, prompt, **tree_of(VOCAB, 1 + VOCAB + VOCAB**2, depth), **GREEDY)
        assert_close("text", output, greedy_text(target)[:, : output.shape[1]])
        assert set(stats.accepted_per_round[:-1]) == {depth}


def test_a_cold_tree_is_the_greedy_one(target, drafter, drafted, prompt):
    """The colder the draw, the less its noise may shape what is drafted."""
    greedy, _ = speculate(target, drafter, prompt, **TREES[0], **GREEDY)
    expected = list(drafted)
    drafted.clear()
    output, _ = speculate(target, drafter, prompt, **TREES[0], **GREEDY | {"do_sample": True, "temperature": 1e-5})
    assert_close("text", output, greedy)
    assert_close("drafts", [tree.ids for tree in drafted], [tree.ids for tree in expected])
    assert_close("log-probabilities", [tree.log_probs for tree in drafted], [tree.log_probs for tree in expected], 1e-3)


# --- prompts and lengths ---


@pytest.mark.parametrize(
    ("kind", "drafting"), [("llama", CHAIN), ("gpt2", CHAIN), ("qwen3", TREE), ("gemma3_window_8", TREE)]
)
def test_left_padding(make_target, make_drafter, drafted, prompt, kind, drafting):
    target = make_target(kind)
    drafter, padded = make_drafter(target), pad(prompt, (4, 0), value=6)
    mask = pad(torch.ones_like(prompt), (4, 0))
    output, stats = speculate(target, drafter, padded, attention_mask=mask, pad_token_id=6, **drafting, **GREEDY)
    assert_close("text", output, target.generate(padded, attention_mask=mask, pad_token_id=6, **GREEDY))
    of_padded = [drafts.on_host() for drafts in drafted]
    drafted.clear()
    _, unpadded = speculate(target, drafter, prompt, **drafting, **GREEDY)
    for (ours, _), theirs in zip(of_padded, drafted, strict=True):
        expected, _ = theirs.on_host()
        assert (ours.ids, ours.parents) == (expected.ids, expected.parents), "padding changed what is drafted"
    assert stats.accepted_per_round == unpadded.accepted_per_round


@pytest.mark.parametrize(("num_sequences", "drafting"), [(1, TREE), (2, TREE), (2, CHAIN)])
@pytest.mark.parametrize(
    "kwargs",
    [{"token_type_ids": [[0, 0, 0, 3, 1], [2, 2, 1, 1, 4]]}, {"position_ids": [[2, 3, 4, 5, 6], [0, 1, 2, 9, 10]]}],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_inputs_that_grow_with_the_text(make_target, make_drafter, prompt, kwargs, num_sequences, drafting):
    """Every new token of a sequence is of the type of its last one, at the next position."""
    target = make_target("gpt2")
    kwargs = {name: torch.tensor(value[:num_sequences]) for name, value in kwargs.items()}
    ids = torch.cat((prompt, torch.tensor([[7, 7, 1, 2, 9]])))[:num_sequences]
    output, _ = speculate(target, make_drafter(target), ids, **drafting, **kwargs, **GREEDY)
    assert_close("text", output, target.generate(ids, **kwargs, **GREEDY))


@pytest.mark.parametrize(("limit", "drafting"), [("max_new_tokens", CHAIN), ("max_length", TREE)])
def test_every_length(target, drafter, drafted, prompt, limit, drafting):
    for count in range(1, 11):
        drafted.clear()
        length = prompt.shape[1] + count
        kwargs = {limit: count if limit == "max_new_tokens" else length}
        output, stats = speculate(target, drafter, prompt, do_sample=False, **drafting, **kwargs)
        assert_close("text", output, greedy_text(target)[:, :length])
        assert stats.generated_tokens == count
        assert all(drafts.depth <= count - 2 for drafts in drafted), "drafted past the end"


# --- processors ---


@pytest.mark.parametrize(("name", "drafting"), [("eagle31", CHAIN), ("pruned", TREE)])
@pytest.mark.parametrize("kwargs", (PER_SEQUENCE | TOGETHER).values(), ids=PER_SEQUENCE | TOGETHER)
def test_processors(target, make_drafter, drafted, prompt, kwargs, name, drafting):
    output, _ = speculate(target, make_drafter(target, name), prompt, **drafting, **GREEDY, **kwargs)
    assert_close("text", output, target.generate(prompt, **GREEDY, **kwargs))
    assert branches(drafted) == ("draft_tree_top_k" in drafting)


@each_drafting
@pytest.mark.parametrize(
    ("sampling", "stop"), [({"do_sample": False}, {"eos_token_id": 10}), ({"do_sample": True, "top_k": 2}, {})]
)
def test_a_processor_sees_every_committed_prefix_once(target, drafter, prompt, sampling, stop, drafting):
    """And in order, as a grammar that keeps state of its own must. Every token has a chance by the scores its own
    prefix was given."""
    diary, kwargs = Diary(VOCAB), {"max_new_tokens": LENGTH} | sampling | stop
    scored = {"return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(0)
    output, stats = speculate(
        target, drafter, prompt, logits_processor=LogitsProcessorList([diary]), **kwargs, **scored, **drafting
    )
    text = output.sequences[0].tolist()
    assert diary.prefixes == [text[:i] for i in range(prompt.shape[1], len(text))]
    assert all(scores[0, i] > -torch.inf for scores, i in zip(output.scores, text[prompt.shape[1] :], strict=True))
    assert max(stats.accepted_per_round) >= 1
    if not sampling["do_sample"]:
        alone = target.generate(prompt, logits_processor=LogitsProcessorList([Diary(VOCAB)]), **kwargs)
        assert_close("text", output.sequences, alone)


# --- call after call ---

OFFLOADED = pytest.param("offloaded", marks=pytest.mark.gpu)  # it needs CUDA streams


@pytest.mark.parametrize("implementation", ["dynamic", OFFLOADED])
def test_cache_implementations(target, drafter, prompt, implementation):
    device = "cuda" if implementation == "offloaded" else "cpu"
    models = [copy.deepcopy(model).to(device) for model in (target, drafter)]
    output, _ = speculate(*models, prompt.to(device), cache_implementation=implementation, **DRAFTED)
    assert_close("text", output.cpu(), greedy_text(target)[:, : output.shape[1]])


def test_confidence_threshold_shortens_chains_only(target, drafter, prompt):
    drafts_a_chain = []
    for threshold in (0.0, 0.3, 0.99):
        output, stats = speculate(
            target, drafter, prompt, num_assistant_tokens=6, assistant_confidence_threshold=threshold, **GREEDY
        )
        assert_close(f"text at threshold {threshold}", output, greedy_text(target)[:, : output.shape[1]])
        drafts_a_chain.append(stats.drafted_per_position)
    shares = [sum(positions[1:]) / positions[0] for positions in drafts_a_chain]
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


@pytest.mark.parametrize(("num_sequences", "drafting"), [(1, CHAIN), (3, TREE)])
def test_custom_generate_is_the_same(target, drafter, drafted, prompt, drafting, num_sequences):
    ids = torch.cat((prompt, torch.tensor([[4, 4, 4, 4, 4], [9, 0, 7, 7, 1]])))[:num_sequences]
    expected, expected_stats = speculate(target, drafter, ids, **drafting, **GREEDY)
    count = len(drafted)
    for installed in (True, False):
        if not installed:
            hook.uninstall()
        try:
            with eagle31_hf.track_acceptance() as stats:
                output = target.generate(ids, custom_generate=functools.partial(drafter.decode, **drafting), **GREEDY)
        finally:
            hook.install()
        assert_close(f"text, installed {installed}", output, expected)
        assert stats.accepted_per_round == expected_stats.accepted_per_round
    assert len(drafted) == 3 * count


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
