"""Captured rounds of targets with recurrent states: what `Round.keep` leaves of these is what plain decoding leaves."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from batches import known_prompts, left_padded
from conftest import PROMPT
from families import build_drafter, build_target
from observers import Puts, num_hooks
from recorded import Recorded
from states import KINDS, assert_same_states
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from eagle31_hf import track_acceptance
from eagle31_hf.cache.states import HAS_METHODS, StateArena
from eagle31_hf.cache_names import cache_argument
from eagle31_hf.generation.captured import kept, proof, seam
from eagle31_hf.generation.captured.kept import release
from eagle31_hf.generation.captured.proof import ROUNDS
from eagle31_hf.generation.captured.round import Round
from eagle31_hf.generation.captured.seam import Uncaptured, seams

pytestmark = [
    pytest.mark.usefixtures("nothing_is_kept"),
    pytest.mark.skipif(not HAS_METHODS, reason="transformers before 5.21 reads states in another way"),
]
CHAIN = {"num_assistant_tokens": 4}
CAPTURED = [name for name in KINDS if name != "Mamba2"]  # it gets no positions, so its rounds are not captured
AS_RECORDED = f"as {Recorded.name}"


def asked(target, *lengths: int, **options) -> dict:
    """Options of greedy decoding, of prompts of these lengths from texts that the drafter knows."""
    ids, mask = left_padded(known_prompts(target, *lengths))
    given = {"inputs": ids, "attention_mask": mask, "max_new_tokens": 20, "pad_token_id": 6, "do_sample": False}
    return given | options


def decode(pair, way, plan=CHAIN, **options):
    torch.manual_seed(3)
    with seams(lambda device: way), track_acceptance() as stats:
        return pair[0].generate(**options, assistant_model=pair[1], **plan), stats


def pair_of(name: str):
    return build_target(name, "sdpa" if name in ("Qwen3-Next", "Falcon-H1", "ZAYA") else "eager"), build_drafter(name)


@pytest.mark.parametrize("name", CAPTURED)
def test_replays_of_batches_whose_sequences_end_early(name):
    """Calls of other lengths, and of fewer sequences than an earlier one had: idle rows hold states of that one."""
    pair, way = pair_of(name), Recorded()
    executions = set()
    for lengths in ((5, 9, 7), (8, 4), (6, 7, 5, 9), (7,)):
        free = pair[0].generate(**asked(pair[0], *lengths))
        options = asked(pair[0], *lengths, eos_token_id=int(free[0, -9]))
        text, stats = decode(pair, way, **options)
        assert text.tolist() == pair[0].generate(**options).tolist()
        executions |= {*stats.executions}  # none where the first token ends every text
    assert executions == {AS_RECORDED}
    assert way.replays > 2 * way.captures
    assert num_hooks(pair[0]) == 0


@pytest.mark.parametrize("name", CAPTURED)
def test_a_conversation_goes_on_in_the_callers_cache(name):
    """What it holds after each turn is what plain decoding leaves, and another call in the same arena does not write to
    it."""
    pair, way = pair_of(name), Recorded()
    target = pair[0]
    own, plain = (DynamicCache(config=target.config) for _ in range(2))
    text = torch.tensor(known_prompts(target, 7))
    for _ in range(3):
        options = {"max_new_tokens": 9, "do_sample": False, "inputs": text, "attention_mask": torch.ones_like(text)}
        ours, stats = decode(pair, way, **options, **cache_argument(target.forward, own))
        said = target.generate(**options, **cache_argument(target.forward, plain))
        assert ours.tolist() == said.tolist()
        assert set(stats.executions) == {AS_RECORDED}
        decode(pair, way, **asked(target, 5))
        assert_same_states(own, plain)
        text = torch.cat((said, torch.tensor([[3, 1]])), dim=1)


@pytest.mark.parametrize("fails_at", range(1, 6))
def test_a_capture_that_fails_leaves_the_states_of_what_is_committed(fails_at):
    """Be it of a draft, of a verification, or of the part that keeps states."""
    pair = pair_of("Qwen3-Next")
    options = asked(pair[0], 9)
    own, plain = (DynamicCache(config=pair[0].config) for _ in range(2))
    text, stats = decode(pair, Recorded(fails_at), **options, past_key_values=own)
    assert text.tolist() == pair[0].generate(**options, past_key_values=plain).tolist()
    assert any("capturing failed" in each for each in stats.executions)
    assert_same_states(own, plain)
    assert [each.num_bytes() for each in kept._kept[pair[1]][pair[0]].values()] == [0]  # of what is given up


@torch.no_grad()
def test_idle_rows_are_as_before_the_first_token():
    """Not what an earlier call of more sequences has left there, which may not be finite."""
    target, arena = build_target("Qwen3-Next", "sdpa"), StateArena(3)
    for lengths in ((5, 9, 7), (6,)):
        ids, mask = left_padded(known_prompts(target, *lengths))
        cache = DynamicCache(config=target.config)
        target(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        arena.take_over(cache)
        assert all(state[: len(lengths)].any() for state in arena.states.values())
        assert not any(state[len(lengths) :].any() for state in arena.states.values())
        for state in arena.states.values():
            state.fill_(float("nan"))


class Interrupts(Puts):
    """Raises KeyboardInterrupt at the `number`-th call."""

    def __init__(self, number: int):
        super().__init__()
        self.left = number

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class InterruptedAfter(Recorded):
    """Is interrupted just after the `number`-th replay of a part that keeps states."""

    def __init__(self, number: int):
        super().__init__()
        self.left = number

    def capture(self, function, part):
        replay = super().capture(function, part)

        def interrupted():
            replay()
            self.left -= part.startswith("keep")
            if self.left == 0 and part.startswith("keep"):
                raise KeyboardInterrupt

        return interrupted


@pytest.mark.parametrize("place", ["streamer", "replay"])
@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("name", ["Qwen3-Next", "Falcon-H1", "LFM2"])
def test_after_an_interruption_the_cache_holds_the_accepted_tokens(name, turn, place):
    pair = pair_of(name)
    target = pair[0]
    own, text = DynamicCache(config=target.config), torch.tensor(known_prompts(target, 7))
    if turn == 2:
        text = target.generate(text, max_new_tokens=4, do_sample=False, **cache_argument(target.forward, own))
        text = torch.cat((text, torch.tensor([[3, 1]])), dim=1)
    options = {"inputs": text, "attention_mask": torch.ones_like(text), "max_new_tokens": 20, "do_sample": False}
    options |= cache_argument(target.forward, own)
    for number in (2, 3, 4):
        way = InterruptedAfter(1) if place == "replay" else Recorded()
        with pytest.raises(KeyboardInterrupt):
            decode(pair, way, **options, streamer=Interrupts(number if place == "streamer" else 99))
        held = own.get_seq_length()
        whole = target.generate(text, max_new_tokens=24, do_sample=False)
        plain = DynamicCache(config=target.config)
        given = {"max_new_tokens": held - text.shape[1] + 1, "do_sample": False}
        target.generate(text, **given, **cache_argument(target.forward, plain))
        assert_same_states(own, plain)
        options["inputs"] = text = whole[:, : held + 1]
        options["attention_mask"] = torch.ones_like(text)
        release()


class InPlace(torch.nn.Module):
    """A layer as adapters make them: what they add is written into the output."""

    def __init__(self, layer: torch.nn.Linear):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        output = self.layer(x)
        output *= 1.3
        return output


class PerHead(torch.nn.Module):
    """A layer over heads, whose inputs (B N, heads, D) have as many dimensions as those over tokens."""

    def __init__(self, layer: torch.nn.Linear):
        super().__init__()
        self.layer = layer
        width = layer.out_features // 2
        self.head = torch.nn.Linear(width, width, bias=False)  # padding is to stay zero

    def forward(self, x):
        output = self.layer(x)
        return self.head(output.reshape(-1, 2, output.shape[-1] // 2)).reshape(output.shape)


class ByName(torch.nn.Module):
    """A layer that names its arguments."""

    def __init__(self, layer: torch.nn.Linear):
        super().__init__()
        self.weight = layer.weight

    def forward(self, x):
        return torch.nn.functional.linear(x, weight=self.weight)


@pytest.mark.parametrize("kind", [InPlace, PerHead, ByName])
def test_layers_of_other_kinds(kind):
    target = copy.deepcopy(build_target("Qwen3-Next", "sdpa"))
    torch.manual_seed(0)
    for layer in target.model.layers[::2]:
        layer.linear_attn.in_proj_qkvz = kind(layer.linear_attn.in_proj_qkvz)
    pair = target, build_drafter("Qwen3-Next")
    options = asked(target, 5, 9)
    text, stats = decode(pair, Recorded(), **options)
    assert text.tolist() == target.generate(**options).tolist()
    assert set(stats.executions) == {AS_RECORDED}


def test_a_mixer_that_gives_zero_is_captured():
    """It does not tell whether several tokens are as one by one, so it goes one by one, and is not tried while
    capturing."""
    target = copy.deepcopy(build_target("Qwen3-Next", "sdpa"))
    target.model.layers[0].linear_attn.out_proj.weight.data.zero_()
    pair, options = (target, build_drafter("Qwen3-Next")), asked(target, 5)
    text, stats = decode(pair, Recorded(), **options)
    assert text.tolist() == target.generate(**options).tolist()
    assert set(stats.executions) == {AS_RECORDED}


def test_threads_that_share_a_target_are_captured():
    """The hooks that one call has on the target do not keep another one from captured rounds."""
    pair = pair_of("Qwen3-Next")
    options = asked(pair[0], 5)
    expected = pair[0].generate(**options).tolist()
    decode(pair, Uncaptured(), **options)
    executions, way = set(), Uncaptured()

    def text(_):
        with track_acceptance() as stats:
            found = pair[0].generate(**options, assistant_model=pair[1], **CHAIN).tolist()
        executions.update(stats.executions)
        return found

    with seams(lambda device: way), ThreadPoolExecutor(3) as pool:
        assert all(found == expected for found in pool.map(text, range(9)))
    assert executions == {f"as {Uncaptured.name}"}


def test_what_keeps_states_fails(monkeypatch):
    """Captured or not: the rest of the text is decoded eagerly, from states that are made anew."""
    pair = pair_of("Qwen3-Next")
    options = asked(pair[0], 9)
    monkeypatch.setattr(Round, "keep", lambda self, plan, count: [][count])
    own = DynamicCache(config=pair[0].config)
    text, stats = decode(pair, Recorded(), **options, past_key_values=own)
    assert text.tolist() == pair[0].generate(**options).tolist()
    assert any("capturing failed (IndexError" in each for each in stats.executions)


def test_a_target_that_a_mixer_refers_to_is_freed():
    target = copy.deepcopy(build_target("Qwen3-Next", "sdpa"))
    drafter = build_drafter("Qwen3-Next")
    target.model.layers[0].linear_attn.__dict__["whole"] = target
    ids = torch.tensor(PROMPT)  # not `asked`, which keeps what it has asked
    decode((target, drafter), Recorded(), inputs=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
    left = weakref.ref(target)
    del target
    gc.collect()
    assert left() is None


# --- faults, each of captured rounds alone ---


def states_that_stand_still(monkeypatch):
    monkeypatch.setattr(Round, "keep", lambda self, plan, count: None)


def a_token_too_few(monkeypatch):
    keep = Round.keep

    def late(self, plan, count):
        if count == 1:
            return
        accepted = self.carry.count.clone()
        self.carry.count.copy_(torch.where(accepted == count, count - 1, accepted))
        keep(self, plan, count - 1)
        self.carry.count.copy_(accepted)

    monkeypatch.setattr(Round, "keep", late)


def states_of_all_tokens(monkeypatch):
    """Also where some were rejected."""

    def every(self, plan, count):
        self.parts.target.arena.states.advance(self.unsettled[plan].after_all, self.carry.count == count)

    monkeypatch.setattr(Round, "keep", every)


def states_in_every_row(monkeypatch):
    advance = StateArena.advance
    monkeypatch.setattr(StateArena, "advance", lambda self, scratch, rows: advance(self, scratch, rows | True))


def states_of_no_prompt(monkeypatch):
    take_over = StateArena.take_over

    def without_the_prompt(self, cache):
        take_over(self, cache)
        for state in self.states.values():
            state.zero_()

    monkeypatch.setattr(StateArena, "take_over", without_the_prompt)


FAULTS = [states_that_stand_still, a_token_too_few, states_of_all_tokens, states_in_every_row, states_of_no_prompt]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", ["Qwen3-Next", "Jamba"])
def test_faults_are_found_and_states_are_made_anew(monkeypatch, name, fault):
    pair = pair_of(name)
    options = asked(pair[0], 5, 9, 7)
    expected = pair[0].generate(**options).tolist()
    decode(pair, Recorded(), **options)  # whether the target can be captured is tried while it is sound
    release()
    fault(monkeypatch)
    text, stats = decode(pair, Recorded(), **options)
    (reason,) = [each for each in stats.executions if each.startswith("eagerly")]
    assert "a captured round was wrong: its logits differ" in reason
    assert text.tolist() == expected


def test_states_that_came_about_in_a_new_way_are_compared(monkeypatch):
    """Only what keeps one count of tokens is wrong, and that is used first after the plan's rounds have been proved."""
    pair = pair_of("Qwen3-Next")
    options = asked(pair[0], 9, max_new_tokens=40)
    expected = pair[0].generate(**options).tolist()
    counts, keep = [], Round.keep

    def noted(self, plan, count):
        counts.append(count)
        keep(self, plan, count)

    monkeypatch.setattr(Round, "keep", noted)
    decode(pair, Recorded(), **options)
    late = list(dict.fromkeys(counts))[ROUNDS]
    release()

    def faulty(self, plan, count):
        keep(self, plan, count)
        for state in self.parts.target.arena.states.states.values() if count == late else []:
            state.mul_(1.5)

    monkeypatch.setattr(Round, "keep", faulty)
    text, stats = decode(pair, Recorded(), **options)
    assert any("a captured round was wrong: its logits differ" in each for each in stats.executions)
    assert stats.executions[AS_RECORDED] > ROUNDS
    assert text.tolist() == expected


def test_every_row_that_reads_new_states_is_compared(monkeypatch):
    """Also one between the first and the last, which alone are compared otherwise."""
    pair = pair_of("Qwen3-Next")
    compared, compare = set(), proof._check_forward

    def watched(*args):
        compared.add(args[-2])
        compare(*args)

    monkeypatch.setattr(proof, "_check_forward", watched)
    decode(pair, Recorded(), **asked(pair[0], 5, 9, 7))
    assert compared == {0, 1, 2}


@pytest.mark.parametrize("has_pools", [True, False])
def test_no_part_writes_over_what_another_has_left(monkeypatch, has_pools):
    """The next draft runs between a verification and the part that reads what it has left."""
    pair = pair_of("Qwen3-Next")
    options = asked(pair[0], 5, 9, max_new_tokens=30)
    if not has_pools:
        monkeypatch.setattr(seam, "pool_of", lambda part: "one for all")
    text, stats = decode(pair, Recorded(shares_memory=True), **options)
    assert text.tolist() == pair[0].generate(**options).tolist()  # what is wrong was found
    assert (set(stats.executions) == {AS_RECORDED}) is has_pools


# --- what is not captured ---


def test_trees_run_eagerly_and_auto_draws_chains():
    pair = pair_of("Qwen3-Next")
    options = asked(pair[0], 5)
    tree = {"num_assistant_tokens": 4, "draft_tree_top_k": 3, "draft_tree_total_tokens": 10}
    (reason,) = decode(pair, Recorded(), tree, **options)[1].executions
    assert reason == "eagerly: recurrent states are kept along chains alone"
    stats = decode(pair, Recorded(), {"num_assistant_tokens": "auto"}, **options)[1]
    assert set(stats.executions) == {AS_RECORDED}
    assert not stats.kinds["trees"]


# --- what it costs ---


class Reading(TorchDispatchMode):
    """Notes the memory that operations read."""

    def __init__(self):
        super().__init__()
        self.addresses = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.addresses |= {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CAPTURED)
def test_linear_layers_are_not_run_again(monkeypatch, name):
    """Their weights are most of what a mixer reads."""
    pair, keep, reading, counts = pair_of(name), Round.keep, Reading(), []

    def read(self, plan, count):
        counts.append(count)
        with reading:
            keep(self, plan, count)

    monkeypatch.setattr(Round, "keep", read)
    decode(pair, Uncaptured(), **asked(pair[0], 9, 5))
    linear = {name: each.weight for name, each in pair[0].named_modules() if isinstance(each, torch.nn.Linear)}
    again = {name for name, each in linear.items() if each.untyped_storage().data_ptr() in reading.addresses}
    assert set(counts) & {2, 3, 4}
    assert {name.rpartition(".")[2] for name in again} <= {"dt_proj"}  # small, and multiplied by Mamba itself


def test_no_cache_is_kept_for_what_is_captured():
    """It would hold the states of its call."""
    pair = pair_of("Qwen3-Next")
    own = DynamicCache(config=pair[0].config)
    decode(pair, Recorded(), **asked(pair[0], 5), past_key_values=own)
    left = weakref.ref(own)
    del own
    gc.collect()
    assert left() is None
