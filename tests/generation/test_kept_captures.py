"""What is captured serves calls that differ in temperature, length or batch, and is made anew where it must be."""

import copy
import random
from threading import Barrier, Thread
from types import MethodType

import pytest
import torch
from batches import PAD, known_prompts, left_padded
from close import TARGET_FORWARD, assert_close
from conftest import PROMPT, PRUNED_IDS, VOCAB, build_drafter, build_target
from observers import Puts
from recorded import Recorded
from transformers import DynamicCache, StoppingCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle31_hf import track_acceptance
from eagle31_hf.cache import arena
from eagle31_hf.generation.captured import kept
from eagle31_hf.generation.captured.carry import Carry
from eagle31_hf.generation.captured.kept import release
from eagle31_hf.generation.captured.seam import Uncaptured, seams
from eagle31_hf.targets import probe
from eagle31_hf.targets.decoder_layer import forward_of

pytestmark = pytest.mark.usefixtures("nothing_is_kept")
CHAIN = {"num_assistant_tokens": 4}
TREE = {"num_assistant_tokens": 4, "draft_tree_top_k": 3, "draft_tree_total_tokens": 10}  # sampled as captured: coupled
DRAWN = {"do_sample": True, "temperature": 0.6}
GREEDY = {"do_sample": False}


@pytest.fixture(scope="module")
def built():
    target = build_target("llama", max_position_embeddings=4096)
    return target, build_drafter(target, max_position_embeddings=4096)


@pytest.fixture
def pair(built):
    """Models of their own for every test, which may change them."""
    return copy.deepcopy(built)


def batch_of(*prompts, **options) -> dict:
    ids, mask = left_padded([*prompts])
    return {"inputs": ids, "attention_mask": mask, "max_new_tokens": 12, "pad_token_id": PAD} | options


def captured(pair, seam, seed: int = 3, **options):
    """Decodes by chains in captured rounds; returns the text."""
    torch.manual_seed(seed)
    with seams(lambda device: seam), track_acceptance() as stats:
        text = pair[0].generate(**options, assistant_model=pair[1], **CHAIN)
    assert set(stats.executions) <= {f"as {seam.name}"}  # none where the prompt's own token ends the text
    return text.tolist()


def eager(pair, seed: int = 3, **options):
    torch.manual_seed(seed)
    return pair[0].generate(**options, assistant_model=pair[1], **TREE).tolist()


def test_requests_that_differ_share_captures(pair, monkeypatch):
    """Calls of a server, an eighth as long as on a GPU: twelve captures, none after the first eighteen."""
    monkeypatch.setitem(arena.LEAST_SLOTS, "cpu", 512)
    draw, seam, numbers = random.Random(0), Recorded(), []
    ends = [1, 4, 9]  # a third of all tokens: texts are short, whatever may be asked for
    for call in range(24):
        lengths = [draw.choice((2, 20, 100, 250)) for _ in range(4)]
        prompts = [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths[: draw.randint(1, 4)]]
        options = batch_of(*prompts, max_new_tokens=draw.randint(2, 24), eos_token_id=ends)
        sampled = {"do_sample": True, "temperature": draw.uniform(0.1, 1.5), "top_p": draw.uniform(0.3, 0.99)}
        options |= GREEDY if draw.random() < 0.5 else sampled
        text = captured(pair, seam, call, **options)
        if call % 10 == 0:
            assert text == eager(pair, call, **options)
        numbers.append(seam.captures)
    assert numbers[-1] == numbers[17] <= 12


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_a_capture_reads_the_numbers_of_each_call(pair, name):
    seam, texts = Recorded(), []
    for value in (0.2, 0.9, 0.2):
        options = batch_of(*known_prompts(pair[0], 5, 7), **DRAWN | {name: value})
        texts.append(captured(pair, seam, **options))
        assert texts[-1] == eager(pair, **options)
    assert texts[0] == texts[2] != texts[1]
    assert seam.captures == 2


def test_what_no_tensor_holds_is_captured_anew(pair):
    seam = Recorded()
    for count, top_k in ((2, 3), (4, 5), (4, 3)):
        options = batch_of(*PROMPT, **DRAWN, top_k=top_k)
        assert captured(pair, seam, **options) == eager(pair, **options)
        assert seam.captures == count


@pytest.mark.parametrize("options", [GREEDY, DRAWN], ids=["greedy", "sampled"])
def test_rows_without_a_sequence_are_idle(pair, options):
    """Three sequences run in the capture of four: first, and after four others, whose remains are in its last row."""
    seam, prompts = Recorded(), known_prompts(pair[0], 5, 7, 9, 6)
    for count in (3, 4, 3):
        asked = batch_of(*prompts[:count], **options)
        assert captured(pair, seam, **asked) == eager(pair, **asked)
    assert seam.captures == 2


def test_a_text_that_ends_beyond_the_arena_has_a_larger_one(pair):
    seam = Recorded()
    for length, captures in ((12, 2), (140, 4), (12, 4)):
        options = batch_of(*PROMPT, max_new_tokens=length, eos_token_id=[1, 4], **GREEDY)
        assert captured(pair, seam, **options) == eager(pair, **options)
        assert seam.captures == captures


def test_an_idle_arena_is_not_counted_as_taken(pair, monkeypatch):
    """The second call has no memory left but what the first one keeps for it. A longer one gives that up, and has as
    much besides as it needs, or a byte less."""
    captured(pair, Recorded(), **batch_of(*PROMPT, **GREEDY))
    (one,) = kept._kept[pair[1]][pair[0]].values()
    monkeypatch.setattr(kept, "free_bytes", lambda device: 0.0)
    captured(pair, Recorded(), **batch_of(*PROMPT, **GREEDY))
    longer = batch_of(*PROMPT, max_new_tokens=300, eos_token_id=[1, 4], **GREEDY)
    arena_of_target = one.arenas[0]
    missing = arena_of_target.num_bytes() * (512 + arena.SPARE) // arena_of_target.capacity - one.num_bytes()
    for short, reason in ((1, "eagerly: keys and values of max_length tokens take"), (0, "as recorded tensors")):
        monkeypatch.setattr(kept, "free_bytes", lambda device, free=missing - short: free)
        with seams(lambda device: Recorded()), track_acceptance() as stats:
            pair[0].generate(**longer, assistant_model=pair[1], **CHAIN)
        (execution,) = stats.executions
        assert execution.startswith(reason)


def test_a_gpu_short_of_memory_has_no_more_slots_than_are_asked_for(pair, monkeypatch):
    monkeypatch.setitem(arena.LEAST_SLOTS, "cpu", 4096)
    found = []
    for free in (float("inf"), 200_000.0):
        release()
        monkeypatch.setattr(kept, "free_bytes", lambda device, free=free: free)
        captured(pair, Uncaptured(), **batch_of(*PROMPT, **GREEDY))
        (one,) = kept._kept[pair[1]][pair[0]].values()
        found.append(one.arenas[0].capacity)
    assert found == [4096 + arena.SPARE, 128 + arena.SPARE]


def test_few_sizes_are_kept(pair, monkeypatch):
    """Those used last: a depth that comes back at once is not captured again."""
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    seam = Recorded()
    with seams(lambda device: seam):
        for depth in (*range(1, kept.MOST_KEPT + 2), kept.MOST_KEPT + 1, 1):
            pair[0].generate(**batch_of(*PROMPT, **GREEDY), assistant_model=pair[1], num_assistant_tokens=depth)
    assert len(kept._kept[pair[1]][pair[0]]) == kept.MOST_KEPT
    assert seam.captures == 2 * (kept.MOST_KEPT + 2)


def test_few_ways_to_choose_are_kept(pair, monkeypatch):
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    seam, ways = Recorded(), (*range(2, kept.MOST_KEPT + 4), kept.MOST_KEPT + 3, 2)
    texts = [captured(pair, seam, **batch_of(*PROMPT, **DRAWN, top_k=top_k)) for top_k in ways]
    expected = [eager(pair, **batch_of(*PROMPT, **DRAWN, top_k=top_k)) for top_k in (ways[0], ways[-2])]
    assert [texts[0], texts[-2]] == [texts[-1], texts[-3]] == expected
    (one,) = kept._kept[pair[1]][pair[0]].values()
    assert len(one.by_choice) == kept.MOST_KEPT
    assert seam.captures == 2 * (kept.MOST_KEPT + 3)


def test_another_draft_vocabulary_in_place(pair):
    """Drafts follow it: as many are accepted as if the pair had never been captured."""
    target = pair[0]
    drafter = build_drafter(target, draft_vocab_size=len(PRUNED_IDS))
    counts, other = [], [*range(VOCAB)][: len(PRUNED_IDS)]
    for ids, is_fresh in ((PRUNED_IDS, False), (other, False), (other, True)):
        drafter.set_draft_vocabulary(torch.tensor(ids))
        if is_fresh:
            release()
        with seams(lambda device: Recorded()), track_acceptance() as stats:
            target.generate(**batch_of(*known_prompts(target, 5), **GREEDY), assistant_model=drafter, **CHAIN)
        counts.append(stats.accepted_per_position)
    assert counts[1] == counts[2] != counts[0]


def test_a_call_within_a_call_runs_eagerly(pair):
    """It would wait for itself."""
    found = []

    class Nested(Puts):
        begun = False

        def put(self, value):
            if self.begun and not found:
                with track_acceptance() as stats:
                    text = pair[0].generate(**options, assistant_model=pair[1], **CHAIN)
                found.append((text.tolist(), *stats.executions))
            self.begun = True  # the prompt comes first

    options = batch_of(*PROMPT, **GREEDY)
    expected = pair[0].generate(**options).tolist()
    with seams(lambda device: Recorded()):
        text = pair[0].generate(**options, assistant_model=pair[1], **CHAIN, streamer=Nested())
    assert text.tolist() == expected
    assert found == [(expected, "eagerly: it is within a call in captured rounds")]


def test_threads_whose_calls_hold_calls_of_each_others_size(pair):
    """Neither waits for the other: a call within a call is never captured."""
    texts, both, options = {}, Barrier(2), batch_of(*PROMPT, **GREEDY)

    class Nested(StoppingCriteria):
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, input_ids, scores, **kwargs):
            if self.inner not in texts:
                both.wait(timeout=60)  # each holds what is kept for its size
                text = pair[0].generate(**options, assistant_model=pair[1], num_assistant_tokens=self.inner)
                texts[self.inner] = text.tolist()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def call(outer, inner):
        given = {"num_assistant_tokens": outer, "stopping_criteria": [Nested(inner)]}
        pair[0].generate(**options, assistant_model=pair[1], **given)

    with seams(lambda device: Recorded()):
        threads = [Thread(target=call, args=depths, daemon=True) for depths in ((2, 4), (4, 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert texts == dict.fromkeys((2, 4), pair[0].generate(**options).tolist())


def test_states_of_an_earlier_call_are_not_read(pair):
    """They may not be finite; idle rows have some, and those that pad what a prompt has left."""
    seam, options = Recorded(), batch_of(*known_prompts(pair[0], 5, 3, 4), **GREEDY)
    counts = []
    for spoil in (False, True):
        for one in kept._kept.get(pair[1], {}).get(pair[0], {}).values() if spoil else ():
            one.carry.states.fill_(float("nan"))
        with seams(lambda device: seam), track_acceptance() as stats:
            pair[0].generate(**options, assistant_model=pair[1], **CHAIN)
        counts.append(stats.accepted_per_position)
    assert counts[0] == counts[1]
    assert sum(counts[0]) > 0


def test_the_cause_of_a_failure_is_told(pair):
    """Ending a capture that has failed raises again, which says nothing."""

    class Fails(Recorded):
        def capture(self, function, part):
            try:
                raise torch.OutOfMemoryError("CUDA out of memory, say")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    with seams(lambda device: Fails()), track_acceptance() as stats:
        pair[0].generate(**batch_of(*PROMPT, **GREEDY), assistant_model=pair[1], **CHAIN)
    assert any("OutOfMemoryError: CUDA out of memory, say" in execution for execution in stats.executions)


def test_weights_that_are_changed_in_place_are_read(pair):
    """What was captured stays."""
    target = pair[0]
    options, seam = batch_of(*known_prompts(target, 5), **GREEDY), Recorded()
    before = captured(pair, seam, **options)
    count = seam.captures
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.v_proj.weight.data.mul_(-1.5)
    after = captured(pair, seam, **options)
    assert after == target.generate(**options).tolist() != before
    assert seam.captures == count


def test_nothing_is_kept_of_a_drafter_that_is_released(pair):
    captured(pair, Recorded(), **batch_of(*PROMPT, **GREEDY))
    assert pair[1] in kept._kept
    release(pair[1])
    assert pair[1] not in kept._kept


class HalvesValues(DynamicCache):
    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return super().update(key_states, value_states * 0.5, layer_idx, *args, **kwargs)


def test_a_cache_that_updates_its_keys_in_its_own_way_runs_eagerly(pair):
    options = batch_of(*known_prompts(pair[0], 5), **GREEDY)
    expected = pair[0].generate(**options, past_key_values=HalvesValues(config=pair[0].config)).tolist()
    cache = HalvesValues(config=pair[0].config)
    with seams(lambda device: Recorded()), track_acceptance() as stats:
        text = pair[0].generate(**options, assistant_model=pair[1], **CHAIN, past_key_values=cache)
    assert text.tolist() == expected
    assert set(stats.executions) == {"eagerly: the target's HalvesValues updates its keys in a way of its own"}


def test_a_prompt_of_padding_alone_runs_eagerly(pair):
    """The drafter would read from before the text's beginning."""
    ids = torch.tensor([[PAD, PAD, PAD], [1, 2, 3]])
    options = {"inputs": ids, "attention_mask": (ids != PAD).long(), "max_new_tokens": 12, "pad_token_id": PAD}
    with seams(lambda device: Recorded()), track_acceptance() as stats:
        text = pair[0].generate(**options, **GREEDY, assistant_model=pair[1], **CHAIN)
    assert text.tolist() == pair[0].generate(**options, **GREEDY).tolist()
    assert set(stats.executions) == {"eagerly: a prompt is padding alone"}


@pytest.mark.parametrize("of", ["target", "drafter"])
def test_a_rotary_embedding_that_depends_on_the_texts_length_runs_eagerly(of):
    """A table of it, or a graph, would keep that of one length."""
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}
    target = build_target("llama", **(rope if of == "target" else {}))
    drafter = build_drafter(target, **(rope if of == "drafter" else {}))
    options = batch_of(*known_prompts(target, 5), **GREEDY)
    with seams(lambda device: Recorded()), track_acceptance() as stats:
        text = target.generate(**options, assistant_model=drafter, **CHAIN)
    assert text.tolist() == target.generate(**options).tolist()
    reason = f"eagerly: the {of} has a rotary embedding that branches on the length of the text"
    assert set(stats.executions) == {reason}


def test_a_call_that_runs_out_of_memory_keeps_none_of_it(pair, monkeypatch):
    """As where arenas are made: what has been made would be missing for good."""
    options, made = batch_of(*PROMPT, **GREEDY), []
    expected = pair[0].generate(**options).tolist()
    of_layer = arena.Arena.of_layer

    def fails(self, index, like):
        if self.capacity > probe.ARENA:  # no trial's
            made.append(self)
        if len(made) >= 3:
            raise torch.OutOfMemoryError("CUDA out of memory, say")
        return of_layer(self, index, like)

    monkeypatch.setattr(arena.Arena, "of_layer", fails)
    with pytest.raises(torch.OutOfMemoryError):
        captured(pair, Recorded(), **options)
    assert not made[0].buffers
    with seams(lambda device: Recorded()), track_acceptance() as stats:
        text = pair[0].generate(**options, assistant_model=pair[1], **CHAIN)
    assert text.tolist() == expected
    assert set(stats.executions) == {"eagerly: an earlier call ran out of memory"}


def test_where_there_is_no_memory_for_noise_the_caller_s_cache_is_its_own(pair, monkeypatch):
    """It has tokens of an earlier turn, and does not keep an arena's memory for them."""
    ids, cache = torch.tensor([PROMPT[0]]), DynamicCache(config=pair[0].config)
    text = pair[0].generate(ids, past_key_values=cache, max_new_tokens=6, **GREEDY)
    before = [layer.keys.clone() for layer in cache.layers]

    def fails(*args):
        raise torch.OutOfMemoryError("CUDA out of memory, say")

    monkeypatch.setattr(Carry, "hold_noise", fails)
    with pytest.raises(torch.OutOfMemoryError):
        captured(pair, Recorded(), input_ids=text, past_key_values=cache, max_new_tokens=4, **DRAWN)
    assert all(layer.keys.untyped_storage().nbytes() < 2 * before[0].nbytes for layer in cache.layers)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_eager_rounds_after_a_failure_stay_within_the_arena(pair):
    """Trees of 200 nodes would not: it has room for 128 beyond the longest text."""

    class Fails(Recorded):
        def capture(self, function, part):
            raise RuntimeError("not today")

    options = batch_of(*known_prompts(pair[0], 5), **GREEDY) | {"max_new_tokens": 120}
    tree = {"num_assistant_tokens": 4, "draft_tree_top_k": 10, "draft_tree_total_tokens": 200}
    with seams(lambda device: Fails()):
        text = pair[0].generate(**options, assistant_model=pair[1], **tree)
    assert text.tolist() == pair[0].generate(**options).tolist()


def test_the_callers_cache_holds_the_text_up_to_an_error(pair):
    class Fails(Puts):
        num_put = 0

        def put(self, value):
            self.num_put += value.numel()
            if self.num_put > len(PROMPT[0]) + 6:
                raise KeyboardInterrupt

    cache, streamer = DynamicCache(config=pair[0].config), Fails()
    options = batch_of(*PROMPT, **GREEDY) | {"past_key_values": cache}
    with pytest.raises(KeyboardInterrupt):
        captured(pair, Recorded(), **options, streamer=streamer)
    text = pair[0].generate(**batch_of(*PROMPT, **GREEDY))
    held = cache.get_seq_length()
    assert len(PROMPT[0]) < held < text.shape[1]  # the rounds before the one under way
    with torch.no_grad():
        expected = pair[0](input_ids=text[:, :held]).past_key_values
    for ours, own in zip(cache.layers, expected.layers, strict=True):
        assert_close("keys", ours.keys, own.keys, TARGET_FORWARD)


def another_activation(target, monkeypatch):
    """Twice: from a module to a function, and to another function."""
    for layer in target.model.layers:
        other = torch.tanh if layer.mlp.act_fn is torch.relu else torch.relu
        del layer.mlp.act_fn
        layer.mlp.act_fn = other


def another_attention(target, monkeypatch):
    def scaled(module, query, *args, **kwargs):
        return sdpa_attention_forward(module, query * 3, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", scaled)


@pytest.mark.parametrize("change", [another_activation, another_attention], ids=lambda change: change.__name__)
def test_what_changes_a_target_is_noticed(pair, monkeypatch, change):
    """By the texts after it, each of which is the target's own."""
    options, seam, texts = batch_of(*known_prompts(pair[0], 5), **GREEDY), Recorded(), []
    for _ in range(3):
        with seams(lambda device: seam):
            text = pair[0].generate(**options, assistant_model=pair[1], **CHAIN).tolist()
        assert text == pair[0].generate(**options).tolist()
        texts.append(text)
        change(pair[0], monkeypatch)
    assert texts[0] != texts[1]


def test_a_forward_at_the_address_of_an_earlier_one_is_another(pair):
    mlp, seen = pair[0].model.layers[0].mlp, []
    for factor in (1.0, -1.0):
        mlp.forward = MethodType(lambda self, x, by=factor: by * type(self).forward(self, x), mlp)
        seen.append(forward_of(mlp))
        assert forward_of(mlp) == seen[-1]
        del mlp.forward
    assert seen[0] != seen[1]


def test_plans_that_were_captured_first_are_dropped(pair, monkeypatch):
    monkeypatch.setattr(kept, "MOST_PLANS", 3)
    seam, options = Recorded(), batch_of(*PROMPT, **GREEDY)
    expected = pair[0].generate(**options).tolist()
    for nodes in (*range(4, 9), 8, 4):
        tree = {"num_assistant_tokens": 4, "draft_tree_top_k": nodes - 2, "draft_tree_total_tokens": nodes}
        with seams(lambda device: seam):
            assert pair[0].generate(**options, assistant_model=pair[1], **tree).tolist() == expected
    (rounds,) = [rounds for one in kept._kept[pair[1]][pair[0]].values() for rounds in one.by_choice.values()]
    assert len(rounds.captured) == len(rounds.samplers) == len(rounds.out) == 4
    assert all(len(made) <= 4 for made in vars(rounds).values() if isinstance(made, dict))
    assert seam.captures == 2 * 6  # the one used last is still there, the first one is captured again


def test_a_callers_error_within_a_capture_is_raised(pair):
    """As of a timer, which may go off at any time; the next call is captured."""

    class Late(Recorded):
        name = "late"  # another seam than the next call's

        def capture(self, function, part):
            raise TimeoutError("the caller's deadline")

    options = batch_of(*PROMPT, **GREEDY)
    with seams(lambda device: Late()), pytest.raises(TimeoutError, match="deadline"):
        pair[0].generate(**options, assistant_model=pair[1], **CHAIN)
    assert captured(pair, Recorded(), **options) == pair[0].generate(**options).tolist()


def test_samplers_of_all_parts_of_a_plan_are_kept(pair):
    """A caller's error may come between two parts; those of the next call are captured with its own samplers."""

    class Once(Recorded):
        def capture(self, function, part):
            if part == "verify" and self.captures == 1:
                self.captures += 1
                raise TimeoutError("the caller's deadline")
            return super().capture(function, part)

    options, seam = batch_of(*PROMPT, **GREEDY), Once()
    with seams(lambda device: seam):
        with pytest.raises(TimeoutError, match="deadline"):
            pair[0].generate(**options, assistant_model=pair[1], **CHAIN)
        text = pair[0].generate(**options, assistant_model=pair[1], **CHAIN)
    assert text.tolist() == pair[0].generate(**options).tolist()
    (one,) = kept._kept[pair[1]][pair[0]].values()
    ((samplers,),) = [rounds.samplers.values() for rounds in one.by_choice.values()]
    assert len({*map(id, samplers)}) == 4


def test_no_noise_is_kept_from_call_to_call(pair):
    captured(pair, Recorded(), **batch_of(*PROMPT, **DRAWN))
    (one,) = kept._kept[pair[1]][pair[0]].values()
    (rounds,) = one.by_choice.values()
    assert rounds.samplers
    assert all(sampler.noise is None for samplers in rounds.samplers.values() for sampler in samplers)
