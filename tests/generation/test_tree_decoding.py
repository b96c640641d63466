"""Decoding with draft trees is decoding with the target alone: token for token when greedy, in distribution when
sampled.

V target vocabulary, N nodes of a tree.
"""

import functools
import itertools

import pytest
import torch
from at_once import PROMPTS, at_once
from chi_square import critical_value, statistic
from close import TARGET_FORWARD, assert_close
from conftest import TARGETS, VOCAB, build_target, greedy_text
from observers import Countdown, Diary, InterruptError, Puts, num_hooks, raise_at, speculate
from proposers import build_proposer, propose
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import eagle31_hf
from eagle31_hf import Eagle31Config, Eagle31DrafterModel
from eagle31_hf.cache.masks import SlotMask
from eagle31_hf.cache.transfer import Mirrored
from eagle31_hf.generation import hook
from eagle31_hf.generation.noise import Noise
from eagle31_hf.generation.planning.plan import Plan
from eagle31_hf.generation.proposer import Proposer
from eagle31_hf.generation.rejection_sampler import Accepted, RejectionSampler
from eagle31_hf.generation.sequences import Sequences
from eagle31_hf.generation.stopping import Ends, Stopping
from eagle31_hf.generation.tree import DraftTokens
from eagle31_hf.targets.layers import target_states
from eagle31_hf.targets.masks import slot_masks

LENGTH = 24
GREEDY = {"max_new_tokens": LENGTH, "do_sample": False}


def knobs(top_k: int = 3, total: int = 16, depth: int = 4) -> dict[str, int]:
    return {"draft_tree_top_k": top_k, "draft_tree_total_tokens": total, "num_assistant_tokens": depth}


@pytest.fixture
def trees(monkeypatch) -> list[DraftTokens]:
    """Every tree that is drafted: a test of trees must not pass on chains."""
    drafted: list[DraftTokens] = []
    original = Proposer.propose

    def propose(self, unread, prefixes, plan):
        drafts = original(self, unread, prefixes, plan)
        if plan.top_k > 1:
            assert not drafts.is_chain
            drafted.append(drafts)
        return drafts

    monkeypatch.setattr(Proposer, "propose", propose)
    return drafted


def branches(trees: list[DraftTokens]) -> bool:
    return any(len(children) > 1 for tree in trees for children in tree.on_host()[0].children(0))


# --- greedy ---

SHAPES = [(3, 16, 4), (10, 60, 8), (2, 5, 3), (11, 12, 1), (4, 2, 6)]  # top_k, total, depth
PAIRS = [
    (kind, name, attention, [SHAPES[0]])
    for kind in TARGETS
    for name in ("eagle31", "pruned")
    for attention in ("sdpa", "eager")
]
PAIRS += [
    ("llama", name, "sdpa", SHAPES[:2])
    for name in ("eagle3", "two_layers", "window_4", "own_embedding", "mla", "padded_vocabulary")
]
PAIRS += [("gemma3_window_8", name, "sdpa", SHAPES[:1]) for name in ("window_4", "mla", "target_head")]
PAIRS += [(kind, "eagle31", "sdpa", SHAPES[1:]) for kind in TARGETS]


@pytest.mark.parametrize(
    ("kind", "name", "attention", "shapes"), PAIRS, ids=[f"{k}-{n}-{a}-{len(s)}" for k, n, a, s in PAIRS]
)
def test_greedy_equals_the_target_alone(make_target, make_drafter, trees, prompt, kind, name, attention, shapes):
    target = make_target(kind, attention)
    drafter, expected = make_drafter(target, name, attention), greedy_text(target)[:, : prompt.shape[1] + LENGTH]
    accepted = []
    for shape in shapes:
        output, stats = speculate(target, drafter, prompt, **knobs(*shape), **GREEDY)
        assert_close(f"text with {shape}", output, expected)
        assert stats.generated_tokens == LENGTH
        accepted += stats.accepted_per_round
        assert max(tree.num_nodes for tree in trees) <= shape[1]
        assert max(int(tree.depths.max()) for tree in trees) <= shape[2]
        trees_seen, trees[:] = list(trees), []
        assert len(trees_seen) >= stats.target_forwards - 1  # nothing is left to draft for the last token
        assert branches(trees_seen) or shape[1] == 2
    if not drafter.config.share_target_head:
        assert max(accepted) >= 1, "no burst was ever committed"


@pytest.mark.parametrize("prompt_ids", [[4], [9, 9], [9, 0, 7, 7, 1, 6, 2, 2, 5, 3, 3, 1, 0]], ids=len)
@pytest.mark.parametrize("kind", TARGETS)
def test_prompts_of_other_lengths(make_target, make_drafter, kind, prompt_ids):
    """Shorter and longer than the window; the drafter knows nothing of what follows."""
    target, prompt = make_target(kind), torch.tensor([prompt_ids])
    output, _ = speculate(target, make_drafter(target), prompt, **knobs(11, 60, 3), **GREEDY)
    assert_close("text", output, target.generate(prompt, **GREEDY))


@pytest.mark.parametrize("kind", TARGETS)
def test_left_padding(make_target, make_drafter, trees, prompt, kind):
    target = make_target(kind)
    drafter, padded = make_drafter(target), pad(prompt, (4, 0), value=6)
    mask = pad(torch.ones_like(prompt), (4, 0))
    output, stats = speculate(target, drafter, padded, attention_mask=mask, pad_token_id=6, **knobs(), **GREEDY)
    assert_close("text", output, target.generate(padded, attention_mask=mask, pad_token_id=6, **GREEDY))
    of_padded = [(tree.ids.tolist(), tree.parents.tolist()) for tree in trees]
    trees.clear()
    _, unpadded = speculate(target, drafter, prompt, **knobs(), **GREEDY)
    assert of_padded == [(tree.ids.tolist(), tree.parents.tolist()) for tree in trees], (
        "padding changed what is drafted"
    )
    assert stats.accepted_per_round == unpadded.accepted_per_round


@pytest.mark.parametrize("kind", ["llama", "mistral_window_8"])
def test_the_drafter_reads_the_states_of_the_accepted_path(make_target, make_drafter, monkeypatch, prompt, kind):
    """Whichever nodes of the verifying forward held it: they are the states of the text alone."""
    target = make_target(kind)
    drafter, original, moved = make_drafter(target), Proposer.propose, []
    of_text, _ = target_states(
        target, greedy_text(target), drafter.config.resolve_layer_ids(target.config.num_hidden_layers)
    )

    def propose(self, unread, prefixes, plan):
        start, end = self.runner.lengths.host[0], prefixes[0].shape[1] - 1
        assert unread.counts.host == [end - start]
        assert_close(f"states from {start}", unread.states, of_text[:, start:end], TARGET_FORWARD)
        assert_close(f"tokens from {start}", unread.tokens, prefixes[0][:, start + 1 :])
        return original(self, unread, prefixes, plan)

    def accept(*args):
        accepted = chosen(*args)
        moved.append(accepted.paths[0] != list(range(len(accepted.paths[0]))))
        return accepted

    chosen = RejectionSampler.accept
    monkeypatch.setattr(Proposer, "propose", propose)
    monkeypatch.setattr(RejectionSampler, "accept", accept)
    speculate(target, drafter, prompt, **knobs(4, 30, 5), **GREEDY)
    assert any(moved), "the path always led: nothing was to be moved"


@pytest.mark.parametrize(
    "kwargs",
    [{"token_type_ids": [[0, 0, 0, 3, 1]]}, {"position_ids": [[2, 3, 4, 5, 6]]}],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_inputs_that_grow_with_the_text(make_target, make_drafter, trees, prompt, kwargs):
    target = make_target("gpt2")
    kwargs = {name: torch.tensor(value) for name, value in kwargs.items()}
    output, _ = speculate(target, make_drafter(target), prompt, **knobs(), **kwargs, **GREEDY)
    assert_close("text", output, target.generate(prompt, **kwargs, **GREEDY))
    assert branches(trees)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("turns", ["both", "first", "second"])
@pytest.mark.parametrize("kind", TARGETS)
def test_a_second_turn_goes_on_from_the_cache_of_the_first(make_target, make_drafter, prompt, kind, turns, padding):
    target = make_target(kind)
    with_trees = {"assistant_model": make_drafter(target)} | knobs(3, 12, 4)
    turn = {"max_new_tokens": 13, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 6}
    texts = []
    for first, second in ((turns != "second", turns != "first"), (False, False)):
        ids, mask = pad(prompt, (padding, 0), value=6), pad(torch.ones_like(prompt), (padding, 0))
        one = target.generate(ids, attention_mask=mask, **turn, **(with_trees if first else {}))
        assert one.past_key_values.get_seq_length() == one.sequences.shape[1] - 1
        more = torch.cat((one.sequences, torch.tensor([[4, 9, 1]])), dim=1)
        mask = pad(mask, (0, more.shape[1] - mask.shape[1]), value=1)
        past = one.past_key_values
        texts.append(
            target.generate(
                more, attention_mask=mask, past_key_values=past, **turn, **(with_trees if second else {})
            ).sequences
        )
    assert_close("text", *texts)


@pytest.mark.parametrize("kind", TARGETS)
def test_the_cache_equals_that_of_the_target_alone(make_target, make_drafter, trees, prompt, kind):
    target, asked = make_target(kind), GREEDY | {"return_dict_in_generate": True}
    output, _ = speculate(target, make_drafter(target), prompt, **knobs(4, 20, 5), **asked)
    alone = target.generate(prompt, **asked)
    assert branches(trees)
    for i, (ours, theirs) in enumerate(zip(output.past_key_values.layers, alone.past_key_values.layers, strict=True)):
        assert ours.get_seq_length() == theirs.get_seq_length() == output.sequences.shape[1] - 1
        shared = min(ours.keys.shape[-2], theirs.keys.shape[-2])
        assert_close(f"keys of layer {i}", ours.keys[:, :, -shared:], theirs.keys[:, :, -shared:], TARGET_FORWARD)
        assert_close(f"values of layer {i}", ours.values[:, :, -shared:], theirs.values[:, :, -shared:], TARGET_FORWARD)


# --- where generation ends ---


@pytest.fixture
def late(make_target):
    """A target whose text uses ten of the eleven ids, most of them late for the first time."""
    return make_target("mistral_window_8")


@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.0001}], ids=["plain", "processed"])
@pytest.mark.parametrize("shape", [(3, 16, 4), (10, 60, 7)], ids=str)
def test_eos_at_every_offset(late, make_drafter, prompt, shape, processors):
    drafter, lengths, inside = make_drafter(late), set(), 0
    for eos in range(VOCAB):
        asked = GREEDY | processors | {"eos_token_id": eos, "return_dict_in_generate": True}
        output, stats = speculate(late, drafter, prompt, **knobs(*shape), **asked)
        alone = late.generate(prompt, **asked)
        assert_close("text", output.sequences, alone.sequences)
        assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1, (
            "the cache holds more than was read"
        )
        assert stats.generated_tokens == output.sequences.shape[1] - prompt.shape[1]
        lengths.add(stats.generated_tokens)
        inside += sum(stats.accepted_per_round) + stats.target_forwards + 1 > stats.generated_tokens
    assert len(lengths) > 6
    assert inside > 0, "no text ended with an accepted draft"


@pytest.mark.parametrize("eos", [[10, 4], [4, 6, 5], [6, 9]])
def test_eos_lists_in_a_sampled_text(late, make_drafter, prompt, eos):
    torch.manual_seed(0)
    drafter = make_drafter(late)
    for _ in range(12):
        output, _ = speculate(
            late, drafter, prompt, max_new_tokens=LENGTH, do_sample=True, top_k=0, eos_token_id=eos, **knobs()
        )
        new = output[0, prompt.shape[1] :].tolist()
        assert not set(eos) & set(new[:-1]), "went on after the end"
        assert new[-1] in eos or len(new) == LENGTH


@pytest.mark.parametrize("count", range(1, 14))
@pytest.mark.parametrize("limit", ["max_new_tokens", "max_length"])
def test_every_length(target, drafter, trees, prompt, limit, count):
    length = prompt.shape[1] + count
    kwargs = {limit: count if limit == "max_new_tokens" else length}
    output, stats = speculate(target, drafter, prompt, do_sample=False, **knobs(4, 30, 5), **kwargs)
    assert_close("text", output, greedy_text(target)[:, :length])
    assert stats.generated_tokens == count
    assert all(int(tree.depths.max()) <= count - 2 for tree in trees), "drafted past the end"


def test_stop_strings_at_every_offset(late, make_drafter, prompt, tokenizer):
    letters, drafter = tokenizer.decode(greedy_text(late)[0]), make_drafter(late)
    for end in range(prompt.shape[1] + 1, prompt.shape[1] + 14):
        asked = GREEDY | {"stop_strings": ["zz", letters[end - 3 : end]], "tokenizer": tokenizer}
        output, stats = speculate(late, drafter, prompt, **knobs(3, 20, 6), **asked)
        assert_close("text", output, late.generate(prompt, **asked))
        assert stats.generated_tokens == output.shape[1] - prompt.shape[1]


@pytest.mark.parametrize("count", range(1, 12))
def test_a_custom_criterion_is_shown_every_text_once(late, make_drafter, prompt, count):
    ours, alone = Countdown(count), Countdown(count)
    asked = GREEDY | {"return_dict_in_generate": True}
    output, _ = speculate(
        late, make_drafter(late), prompt, stopping_criteria=StoppingCriteriaList([ours]), **knobs(3, 20, 6), **asked
    )
    expected = late.generate(prompt, stopping_criteria=StoppingCriteriaList([alone]), **asked)
    assert_close("text", output.sequences, expected.sequences)
    assert ours.texts == alone.texts
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1


# --- what else generate takes ---

ENDS = {
    "length": {},
    "eos": {"eos_token_id": 6},
    "one_token": {"max_new_tokens": 1},
    "two_tokens": {"max_new_tokens": 2},
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_streamer_gets_the_calls_of_plain_generate(target, drafter, prompt, end):
    ours, alone = Puts(), Puts()
    _, stats = speculate(target, drafter, prompt, streamer=ours, **knobs(4, 30, 6), **GREEDY | end)
    target.generate(prompt, streamer=alone, **GREEDY | end)
    assert ours.calls == alone.calls
    assert len(ours.calls) == 2 + stats.generated_tokens


@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}], ids=["plain", "processed"])
@pytest.mark.parametrize("end", [{}, {"eos_token_id": 6}, {"eos_token_id": 4}], ids=["length", "eos_6", "eos_4"])
@pytest.mark.parametrize("kind", ["llama", "mistral_window_8"])
def test_scores_and_logits(make_target, make_drafter, trees, prompt, kind, end, processors):
    """Of the accepted path's nodes, one per token."""
    target = make_target(kind)
    asked = GREEDY | end | processors | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output, _ = speculate(target, make_drafter(target), prompt, **knobs(3, 20, 5), **asked)
    alone = target.generate(prompt, **asked)
    assert_close("text", output.sequences, alone.sequences)
    assert_close("scores", output.scores, alone.scores, TARGET_FORWARD)
    assert_close("logits", output.logits, alone.logits, TARGET_FORWARD)
    assert branches(trees)


@pytest.mark.parametrize("wanted", ["hidden_states", "attentions"])
def test_hidden_states_and_attentions_are_those_of_chains(make_target, make_drafter, trees, prompt, wanted):
    target = make_target("qwen3", "eager")
    asked = GREEDY | {"return_dict_in_generate": True, f"output_{wanted}": True}
    output, stats = speculate(target, make_drafter(target, "eagle31", "eager"), prompt, **knobs(), **asked)
    alone = target.generate(prompt, **asked)
    assert trees == []
    assert max(stats.accepted_per_round) >= 1
    assert_close("text", output.sequences, alone.sequences)
    assert_close(wanted, getattr(output, wanted), getattr(alone, wanted), TARGET_FORWARD)


def test_custom_generate_is_the_same(target, drafter, trees, prompt):
    expected, expected_stats = speculate(target, drafter, prompt, **knobs(), **GREEDY)
    assert branches(trees)
    count = len(trees)
    hook.uninstall()
    try:
        with eagle31_hf.track_acceptance() as stats:
            output = target.generate(prompt, custom_generate=functools.partial(drafter.decode, **knobs()), **GREEDY)
    finally:
        hook.install()
    assert_close("text", output, expected)
    assert stats.accepted_per_round == expected_stats.accepted_per_round
    assert len(trees) == 2 * count


@pytest.mark.parametrize("name", ["eagle31", "window_4"])
def test_threads_have_trees_of_their_own(target, make_drafter, name):
    drafter = make_drafter(target, name)
    expected = [speculate(target, drafter, prompt, **knobs(), **GREEDY) for prompt in PROMPTS]
    results = at_once(
        [lambda prompt=prompt: speculate(target, drafter, prompt, **knobs(), **GREEDY) for prompt in PROMPTS]
    )
    for i, ((text, stats), (expected_text, expected_stats)) in enumerate(zip(results, expected, strict=True)):
        assert_close(f"text {i}", text, expected_text)
        assert stats.accepted_per_round == expected_stats.accepted_per_round, "threads drafted from each other's states"
    assert num_hooks(target) == 0


def failing(place: str, call: int) -> dict:
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


@pytest.mark.parametrize("call", [1, 3, 7])
@pytest.mark.parametrize("place", ["processor", "criterion", "streamer"])
def test_an_exception_leaves_nothing_behind(late, make_drafter, prompt, place, call):
    drafter, past = make_drafter(late), late(prompt[:, :3]).past_key_values
    found = [(type(layer), layer.record_past) for layer in past.layers]
    with pytest.raises(InterruptError):
        late.generate(
            prompt, assistant_model=drafter, past_key_values=past, **knobs(), **GREEDY, **failing(place, call)
        )
    assert num_hooks(late) == 0
    assert [(type(layer), layer.record_past) for layer in past.layers] == found, "the cache is not as it was handed in"
    output, _ = speculate(late, drafter, prompt, **knobs(), **GREEDY)
    assert_close("text of the next call", output, greedy_text(late)[:, : output.shape[1]])


# --- processors ---


@pytest.mark.parametrize("stop", [{}, {"eos_token_id": 10}], ids=["length", "eos"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_processor_sees_every_committed_prefix_once(target, drafter, trees, prompt, do_sample, stop):
    """And in order, as a grammar that keeps state of its own must."""
    diary = Diary(VOCAB)
    kwargs = {"max_new_tokens": LENGTH, "do_sample": do_sample} | stop
    torch.manual_seed(0)
    output, stats = speculate(
        target, drafter, prompt, logits_processor=LogitsProcessorList([diary]), **knobs(), **kwargs
    )
    text = output[0].tolist()
    assert diary.prefixes == [text[:i] for i in range(prompt.shape[1], len(text))]
    assert max(stats.accepted_per_round) >= 1
    assert branches(trees)
    if not do_sample:
        assert_close(
            "text", output, target.generate(prompt, logits_processor=LogitsProcessorList([Diary(VOCAB)]), **kwargs)
        )


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[10], [2, 7], [8, 8]]},
    "min_new_tokens": {"eos_token_id": 10, "min_new_tokens": 9},
    "sequence_bias": {"sequence_bias": [[[2], -1.5], [[7, 10], 4.0]]},
    "suppress": {"suppress_tokens": [2]},
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
def test_processors(target, make_drafter, trees, prompt, kwargs, name):
    output, _ = speculate(target, make_drafter(target, name), prompt, **knobs(5, 30, 4), **GREEDY, **kwargs)
    assert_close("text", output, target.generate(prompt, **GREEDY, **kwargs))
    assert branches(trees)


def test_a_processor_that_runs_the_target_itself(target, drafter, prompt):
    kwargs = {"guidance_scale": 1.7}
    output, _ = speculate(target, drafter, prompt, **knobs(5, 30, 4), **GREEDY, **kwargs)
    assert_close("text", output, target.generate(prompt, **GREEDY, **kwargs))


# --- sampling ---

V, SAMPLED, DRAWS = 4, 3, 3000
START = torch.tensor([[0, 2, 1]])


@pytest.fixture(scope="module")
def small():
    return build_target(vocab_size=V, num_hidden_layers=2, initializer_range=0.3)


@pytest.fixture(scope="module")
def small_drafters(small):
    """Full and pruned draft vocabularies, with random weights."""
    fields = {
        "vocab_size": V, "hidden_size": 36, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1,
        "aux_hidden_state_layer_ids": [0, 2], "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    full, pruned = (Eagle31DrafterModel(Eagle31Config(**fields, draft_vocab_size=size)).eval() for size in (V, V - 1))
    pruned.set_draft_vocabulary(torch.tensor([3, 0, 1]))
    for drafter in (full, pruned):
        drafter.load_target_embeddings(small)
    return {"full": full, "pruned": pruned}


def texts_after(length: int) -> Tensor:
    """START and every continuation of `length` tokens, in the order of their numbers in base V: (V ** length, ...)."""
    continuations = torch.tensor(list(itertools.product(range(V), repeat=length)), dtype=torch.long)
    return torch.cat((START.expand(V**length, -1), continuations), dim=1)


def number(tokens: list[int]) -> int:
    """The index of a continuation in `texts_after`."""
    return functools.reduce(lambda index, token: index * V + token, tokens, 0)


@torch.no_grad()
def exact(target, processors) -> list[Tensor]:
    """The target alone: at [n] the distributions (V ** n, V) of the token after every continuation of n tokens."""
    return [processors(texts_after(n), target(texts_after(n)).logits[:, -1]).softmax(-1) for n in range(SAMPLED)]


def joint(next_token: list[Tensor]) -> Tensor:
    """The distribution (V ** SAMPLED,) of whole continuations."""
    return functools.reduce(lambda whole, p: (whole[:, None] * p).flatten(), next_token, torch.ones(1))


@torch.inference_mode()
def drawn(
    target, drafter, processors, shape: tuple[int, int, int], kind: type[RejectionSampler] = RejectionSampler
) -> Tensor:
    """Counts by continuation of SAMPLED tokens: one round with a tree, completed by the target alone."""
    top_k, total, depth = shape
    states, _ = target_states(target, START, drafter.config.aux_hidden_state_layer_ids)
    length, cpu = START.shape[1] - 1, torch.device("cpu")
    proposer = build_proposer(drafter, processors, vocab_size=V)
    tree = propose(proposer, START, states, 0, length, Plan(depth, top_k, top_k, total))
    past = DynamicCache()
    target(START[:, :-1], past_key_values=past)
    masks = slot_masks(target, past, SlotMask(Mirrored([length]), tree.ancestors, tree.depths, tree.depths))
    ids = torch.cat((START[:, -1:], tree.ids), dim=1)
    logits = target(ids, position_ids=length + tree.depths, attention_mask=masks, past_key_values=past).logits
    next_token, counts = exact(target, processors), torch.zeros(V**SAMPLED)
    torch.manual_seed(0)
    noise = Noise(1, V, cpu, is_coupled=True)
    sampler, sequences = kind(processors, noise), Sequences(START, 0)
    for _ in range(DRAWS):
        noise.forget([START.shape[1] + 99])  # the same slots, with other noise
        noise.start(START.shape[1])
        ends = Ends(Stopping(StoppingCriteriaList(), max_length=99), sequences)
        tokens = sampler.accept(sequences, tree, logits.clone(), ends).tokens[0]
        while len(tokens) < SAMPLED:
            tokens.append(int(torch.multinomial(next_token[len(tokens)][number(tokens)], 1)))
        counts[number(tokens[:SAMPLED])] += 1
    return counts


class Follows:
    """What it favours depends on the last token and the length."""

    def __call__(self, input_ids, scores):
        favoured = (input_ids[:, -1:] + input_ids.shape[1]) % V
        return scores.scatter_add(1, favoured, torch.full(favoured.shape, 1.5))


CASES = {  # processors, (top_k, total, depth), drafter
    "plain": ([], (2, 7, 3), "full"),
    "everything": ([], (4, 85, 3), "full"),
    "temperature": ([TemperatureLogitsWarper(0.6)], (2, 9, 3), "full"),
    "top_k": ([TopKLogitsWarper(2)], (3, 12, 2), "full"),
    "top_p": ([TopPLogitsWarper(0.8)], (3, 12, 2), "full"),
    "repetition_penalty": ([RepetitionPenaltyLogitsProcessor(1.8)], (3, 20, 3), "full"),
    "unknown_processor": ([Follows()], (3, 20, 3), "full"),
    "pruned": ([], (2, 8, 3), "pruned"),
}


@pytest.mark.parametrize(("processors", "shape", "name"), CASES.values(), ids=CASES)
def test_sequences_are_distributed_as_the_target_alone_would(small, small_drafters, processors, shape, name):
    processors = LogitsProcessorList(processors)
    value, df = statistic(drawn(small, small_drafters[name], processors, shape), joint(exact(small, processors)))
    assert df >= 4, "too few continuations are likely for a test"
    assert value < critical_value(df, len(CASES) + 1)


class FirstChild(RejectionSampler):
    """Takes the first child of the root whatever the target says."""

    def accept(self, sequences: Sequences, drafts: DraftTokens, logits: Tensor, ends: Ends) -> Accepted:
        self.drafts = drafts
        return super().accept(sequences, drafts, logits, ends)

    def choose(self, b, slot, *logits):
        return self.drafts.ids[b, :1] if slot == START.shape[1] else super().choose(b, slot, *logits)


class ArgmaxAtTheRoot(RejectionSampler):
    def choose(self, b, slot, scores, *draft):
        return scores.argmax(-1) if slot == START.shape[1] else super().choose(b, slot, scores, *draft)


class PrefersAChild(FirstChild):
    """Draws twice, and keeps the draw that is a draft."""

    def choose(self, b, slot, scores, *draft):
        one, two = RejectionSampler.choose(self, b, slot, scores, *draft), (scores + self.noise.gumbel(b)).argmax(-1)
        return one if slot > START.shape[1] or int(one) in self.drafts.on_host()[0].children(b)[0] else two


class OfTheParents(RejectionSampler):
    """Draws below the root from the distribution after the parent."""

    def accept(self, sequences: Sequences, drafts: DraftTokens, logits: Tensor, ends: Ends) -> Accepted:
        return super().accept(sequences, drafts, logits[:, pad(drafts.parents[0], (1, 0))], ends)


class Unprocessed(RejectionSampler):
    def accept(self, sequences: Sequences, drafts: DraftTokens, logits: Tensor, ends: Ends) -> Accepted:
        self.processors = LogitsProcessorList()
        return super().accept(sequences, drafts, logits, ends)


class TheSameNoiseAgain(RejectionSampler):
    """Every token is drawn with the noise of the first."""

    def choose(self, b, slot, *logits):
        return super().choose(b, START.shape[1], *logits)


MUTATIONS = {
    "first_child": (FirstChild, []),
    "argmax_at_the_root": (ArgmaxAtTheRoot, []),
    "prefers_a_child": (PrefersAChild, []),
    "of_the_parents": (OfTheParents, []),
    "unprocessed": (Unprocessed, [TemperatureLogitsWarper(0.6)]),
    "the_same_noise_again": (TheSameNoiseAgain, []),
}


@pytest.mark.parametrize(("kind", "processors"), MUTATIONS.values(), ids=MUTATIONS)
def test_the_test_sees_another_acceptance(small, small_drafters, kind, processors):
    processors = LogitsProcessorList(processors)
    value, df = statistic(
        drawn(small, small_drafters["full"], processors, (2, 7, 3), kind), joint(exact(small, processors))
    )
    assert value > critical_value(df, len(CASES) + 1)


def test_generate_itself(small, small_drafters, trees):
    """The same through the whole loop: the last two of three tokens come from one tree or two."""
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.95)]
    )
    kwargs = {"do_sample": True, "repetition_penalty": 1.2, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
    counts = torch.zeros(V**SAMPLED)
    torch.manual_seed(0)
    for _ in range(400):
        output, _ = speculate(
            small, small_drafters["pruned"], START, max_new_tokens=SAMPLED + 1, **knobs(2, 6, 2), **kwargs
        )
        counts[number(output[0, START.shape[1] :].tolist()[:SAMPLED])] += 1
    value, df = statistic(counts, joint(exact(small, processors)))
    assert value < critical_value(df, len(CASES) + 1)
    assert branches(trees)


SAMPLING = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.8, "top_k": 0}


def test_the_text_is_a_function_of_the_seed_alone(target, make_drafter, trees, prompt):
    """Whatever is drafted, by whom, and however the trees look: the target draws with the noise of the slot."""
    shapes, texts, accepted = [(3, 16, 4), (2, 6, 2), (11, 60, 1), (4, 40, 6)], set(), 0
    for seed in range(4):
        outputs = []
        for name, shape in (*(("eagle31", shape) for shape in shapes), ("pruned", shapes[0]), ("window_4", shapes[0])):
            torch.manual_seed(seed)
            output, stats = speculate(target, make_drafter(target, name), prompt, **knobs(*shape), **SAMPLING)
            outputs.append(output)
            accepted += sum(stats.accepted_per_round)
        for output in outputs[1:]:
            assert_close(f"text of seed {seed}", output, outputs[0])
        texts.add(tuple(outputs[0][0].tolist()))
    assert len(texts) == 4, "the texts never differed"
    assert accepted > 40, "hardly a draft was accepted"
    assert branches(trees)


def test_padding_changes_no_sampled_text(target, drafter, trees, prompt):
    """Noise is drawn from the end of the prompt on, however long it is."""
    padded, mask, texts = pad(prompt, (4, 0), value=6), pad(torch.ones_like(prompt), (4, 0)), []
    for ids, kwargs in ((prompt, {}), (padded, {"attention_mask": mask, "pad_token_id": 6})):
        torch.manual_seed(0)
        texts.append(speculate(target, drafter, ids, **knobs(), **SAMPLING, **kwargs)[0][:, -16:])
    assert_close("text", texts[1], texts[0])
    assert branches(trees)


def test_the_tree_is_drawn_with_the_noise_of_its_slots(target, drafter, trees, prompt):
    """A function of the committed text and that noise: the same again for the same seed, other trees for another."""
    drawn_by_seed = []
    for seed in (0, 0, 1, 2):
        torch.manual_seed(seed)
        trees.clear()
        speculate(target, drafter, prompt, **knobs(), **SAMPLING | {"temperature": 4.0})
        drawn_by_seed.append([tree.ids.tolist() for tree in trees])
    assert drawn_by_seed[0] == drawn_by_seed[1]
    assert drawn_by_seed[0] != drawn_by_seed[2] != drawn_by_seed[3]


def test_a_cold_tree_is_the_greedy_one(target, drafter, trees, prompt):
    """The colder the draw, the less its noise may shape what is drafted."""
    greedy, _ = speculate(target, drafter, prompt, **knobs(), max_new_tokens=16, do_sample=False)
    expected = list(trees)
    trees.clear()
    output, _ = speculate(target, drafter, prompt, **knobs(), **SAMPLING | {"temperature": 1e-5})
    assert_close("text", output, greedy)
    assert_close("drafts", [tree.ids for tree in trees], [tree.ids for tree in expected])
    assert_close("log-probabilities", [tree.log_probs for tree in trees], [tree.log_probs for tree in expected], 1e-3)


# --- accepted length: only what holds for any pair of models ---


def test_a_tree_of_everything_is_always_right(target, drafter, prompt):
    """Every token, and every pair of tokens, is among the drafts."""
    for depth in (1, 2):
        output, stats = speculate(target, drafter, prompt, **knobs(VOCAB, 1 + VOCAB + VOCAB**2, depth), **GREEDY)
        assert_close("text", output, greedy_text(target)[:, : output.shape[1]])
        assert set(stats.accepted_per_round[:-1]) == {depth}


@pytest.mark.parametrize("name", ["eagle31", "eagle3", "pruned", "window_4"])
def test_more_drafts_of_one_level_are_never_worse(target, make_drafter, prompt, name):
    """A level deep, a wider tree holds the narrower one and the chain: from no position does it get less far."""
    drafter = make_drafter(target, name)
    _, chain = speculate(target, drafter, prompt, num_assistant_tokens=1, **GREEDY)
    forwards = [chain.target_forwards]
    forwards += [
        speculate(target, drafter, prompt, **knobs(top_k, top_k + 1, 1), **GREEDY)[1].target_forwards
        for top_k in (2, 4, 8)
    ]
    assert forwards == sorted(forwards, reverse=True)


def test_a_bigger_budget_is_never_worse_at_the_same_place(target, drafter, prompt):
    """Of the same expansion a bigger budget keeps every node of a smaller one."""
    for length in range(1, 16, 3):
        text, accepted = greedy_text(target)[:, : prompt.shape[1] + length], []
        for total in (3, 8, 40):
            _, stats = speculate(target, drafter, text, max_new_tokens=8, do_sample=False, **knobs(3, total, 4))
            accepted.append(stats.accepted_per_round[0])
        assert accepted == sorted(accepted), f"after {length} tokens"
