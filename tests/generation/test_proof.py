"""Rounds that compute something else than the target are found by the first that are compared, and nobody's text is
made of them."""

import copy
from functools import cache

import pytest
import torch
from batches import known_prompts, left_padded
from conftest import build_drafter, build_target
from recorded import Recorded

from eagle31_hf import track_acceptance
from eagle31_hf.generation.captured import executor, proof, round
from eagle31_hf.generation.captured.kept import release
from eagle31_hf.generation.captured.round import Round
from eagle31_hf.generation.captured.seam import Uncaptured, seams
from eagle31_hf.targets import decoder_layer
from eagle31_hf.targets.probe import LOW_PRECISION_TOLERANCE, difference, is_rounding

pytestmark = pytest.mark.usefixtures("nothing_is_kept")
CHAIN = {"num_assistant_tokens": 4}
TREE = {"num_assistant_tokens": 4, "draft_tree_top_k": 3, "draft_tree_total_tokens": 10}
DRAWN = {"do_sample": True, "temperature": 0.7}


@pytest.fixture(scope="module")
def pair():
    target = build_target("llama")
    return target, build_drafter(target)


@pytest.fixture(scope="module")
def low_pair(pair):
    """The pair in bf16, where rounding alone carries its logits by a tenth of their spread."""
    return tuple(copy.deepcopy(model).to(torch.bfloat16) for model in pair)


def asked(pair, *lengths, **options) -> dict:
    ids, mask = left_padded(known_prompts(pair[0], *lengths))
    given = {"inputs": ids, "attention_mask": mask, "max_new_tokens": 20, "pad_token_id": 6, "do_sample": False}
    return given | options


def decode(pair, plan=TREE, seam=None, **options):
    torch.manual_seed(3)
    with seams(lambda device: seam), track_acceptance() as stats:
        text = pair[0].generate(**options, assistant_model=pair[1], **plan).tolist()
    return text, stats.executions


# --- faults, each of captured rounds alone ---


def wrong_bit(monkeypatch):
    """Nodes do not see the root."""
    made = round.span_masks

    def blind(target, starts, begin, places, bits, has_states):
        return made(target, starts, begin, places, bits & ~1 | (bits == 1).long(), has_states)

    monkeypatch.setattr(round, "span_masks", blind)


def shifted_position(monkeypatch):
    fill = executor.CapturedExecutor._fill_carry

    def shifted(self):
        fill(self)
        self.carry.position += 1

    monkeypatch.setattr(executor.CapturedExecutor, "_fill_carry", shifted)


def keys_not_moved(monkeypatch):
    """Accepted nodes of a tree are moved in memory that nobody reads: the next round sees it."""
    moved = round.move_path
    monkeypatch.setattr(round, "move_path", lambda stacks, *rest: moved([one.clone() for one in stacks], *rest))


def keys_not_written(monkeypatch):
    """They go to memory that nobody reads."""
    append = decoder_layer.rope_append

    def appended(qkv, rope, weights, eps, buffers, starts):
        return append(qkv, rope, weights, eps, [one.clone() for one in buffers], starts)

    monkeypatch.setattr(decoder_layer, "rope_append", appended)


def kernel_that_returns_its_input(monkeypatch):
    attend = decoder_layer.tree_attention

    def unchanged(q, *rest):
        return q.transpose(1, 2).reshape(attend(q, *rest).shape)

    monkeypatch.setattr(decoder_layer, "tree_attention", unchanged)


def states_of_other_layers(monkeypatch):
    run = Round._run_target

    def swapped(self, *args):
        logits, states = run(self, *args)
        return logits, states.flip(-1)

    monkeypatch.setattr(Round, "_run_target", swapped)


def a_token_too_many(monkeypatch):
    """What was refused is committed."""
    accepted = round.accepted_path

    def generous(ids, *rest):
        path, tokens, count = accepted(ids, *rest)
        return path, tokens, torch.where(count > 0, (count + 1).clamp(max=rest[-1]), count)

    generous.reference = accepted.reference
    monkeypatch.setattr(round, "accepted_path", generous)


FAULTS = {
    "wrong bit": (wrong_bit, "logits differ"),
    "shifted position": (shifted_position, "logits differ"),
    "keys not moved": (keys_not_moved, "logits differ"),
    "keys not written": (keys_not_written, "logits differ"),
    "kernel that returns its input": (kernel_that_returns_its_input, "logits differ"),
    "states of other layers": (states_of_other_layers, "states differ"),
    "a token too many": (a_token_too_many, "commits other tokens"),
}


# Each greedily; those that are hardest to tell from rounding in bf16, too, and one of each part of a round sampled.
CASES = [(name, "greedy") for name in FAULTS]
CASES += [(name, "bf16") for name in ("wrong bit", "shifted position", "states of other layers")]
CASES += [(name, "sampled") for name in ("keys not moved", "a token too many")]


@cache
def without_faults(pair, is_sampled: bool) -> list[list[int]]:
    """The text of eager rounds. The target is then known to take spans, and its layers to be fused."""
    options = asked(pair, 5, 9, 7, **(DRAWN if is_sampled else {}))
    decode(pair, seam=Uncaptured(), **options)
    release()
    return decode(pair, **options)[0]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_faults_are_found(request, monkeypatch, name, way):
    inject, words = FAULTS[name]
    pair = request.getfixturevalue("low_pair" if way == "bf16" else "pair")
    options = asked(pair, 5, 9, 7, **(DRAWN if way == "sampled" else {}))
    expected = without_faults(pair, way == "sampled")
    inject(monkeypatch)
    text, executions = decode(pair, seam=Uncaptured(), **options)
    is_exact = way != "bf16"  # in bf16 rounding may choose another token
    assert not is_exact or text == expected
    (reason,) = [each for each in executions if each.startswith("eagerly")]
    assert "a captured round was wrong" in reason
    assert words in reason
    again, executions = decode(pair, seam=Uncaptured(), **options)
    assert not is_exact or again == expected
    assert [*executions] == [reason]  # not trusted again


def test_a_choice_that_is_not_that_of_the_logits_is_found(pair):
    """As where a graph reads noise that lies elsewhere by now."""

    class Stale(Recorded):
        def capture(self, function, part):
            replay = super().capture(function, part)
            rounds = function.func.__self__

            def stale():
                replay()
                if part == "verify":
                    rounds.verified[function.args[0]].chosen.add_(1).remainder_(11)

            return stale

    options = asked(pair, 5)
    text, executions = decode(pair, CHAIN, Stale(), **options)
    assert text == decode(pair, **options)[0]
    assert any("chooses other tokens than its logits say" in each for each in executions)


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
def test_rounding_is_no_fault(low_pair, monkeypatch, plan):
    """In 16 bits logits differ by several times what would be wrong in fp32, here as much as a fault may."""
    errors = []

    def noted(*args):
        errors.append(args[1])
        return is_rounding(*args)

    monkeypatch.setattr(proof, "is_rounding", noted)
    executions = decode(low_pair, plan, Uncaptured(), **asked(low_pair, 5, 9, 7))[1]
    assert [*executions] == [f"as {Uncaptured.name}"]
    assert max(errors) > LOW_PRECISION_TOLERANCE


# --- what is compared, and when ---


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
def test_two_rounds_of_a_plan_are_compared(pair, monkeypatch, plan):
    checked, compare = [], proof._check_forward

    def watched(*args):
        checked.append(args[-2])
        compare(*args)

    monkeypatch.setattr(proof, "_check_forward", watched)
    seam = Recorded()
    for lengths in ((5, 9, 7), (6, 8, 5)):
        decode(pair, plan, seam, **asked(pair, *lengths))
    assert checked == [0, 2, 0, 2]  # the first and the last row that goes on


def test_a_long_text_is_not_read_again(pair, monkeypatch):
    """Rounds after it wait for another call to be compared."""
    monkeypatch.setattr(proof, "LONGEST", 8)
    seam, checked = Recorded(), []
    monkeypatch.setattr(proof, "_check", lambda *args: checked.append(args))
    decode(pair, CHAIN, seam, **asked(pair, 9))
    assert checked == []
    decode(pair, CHAIN, seam, **asked(pair, 4))
    assert checked


def test_short_memory_is_no_fault_and_no_proof(pair, monkeypatch):
    """A call tries once; the next call's rounds are compared."""

    def without_memory(*args):
        tries.append(args)
        raise torch.OutOfMemoryError

    seam, tries, checked, compare = Recorded(), [], [], proof._check_forward
    options = asked(pair, 5)
    expected = decode(pair, **options)[0]
    for check in (without_memory, lambda *args: (checked.append(args[-2]), compare(*args))):
        monkeypatch.setattr(proof, "_check_forward", check)
        text, executions = decode(pair, CHAIN, seam, **options)
        assert text == expected
        assert [*executions] == [f"as {Recorded.name}"]
    assert len(tries) == 1
    assert len(checked) == proof.ROUNDS


def test_positions_that_do_not_begin_at_zero_are_compared_as_they_are():
    """Of a target that has learnt what each position means."""
    target = build_target("gpt2")
    pair, options = (target, build_drafter(target)), asked((target,), 5)
    options["position_ids"] = torch.arange(options["inputs"].shape[1])[None] + 7
    text, executions = decode(pair, CHAIN, Recorded(), **options)
    assert text == target.generate(**options).tolist()
    assert [*executions] == [f"as {Recorded.name}"]


def test_a_round_that_cannot_be_compared_is_not_trusted(pair, monkeypatch):
    def failing(*args):
        raise ValueError("no such layout")

    monkeypatch.setattr(proof, "_check_forward", failing)
    options = asked(pair, 5)
    text, executions = decode(pair, CHAIN, Recorded(), **options)
    assert text == decode(pair, **options)[0]
    assert "it cannot be compared (ValueError: no such layout)" in next(iter(executions))


def test_values_out_of_any_scale_hide_no_difference():
    """As those of ids that a model masks; and where rounding has no end, it says nothing."""
    expected, other = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    for masked in (float("-inf"), torch.finfo(torch.float32).min, float("nan")):
        expected[:, 7], other[:, 7] = masked, masked
        assert difference(expected.clone(), expected) == 0
        assert difference(other, expected) > 0.5
        assert difference(other.fill_(float("inf")), expected) == float("inf")
        other = torch.randn(3, 50)
    target = build_target("llama").bfloat16()
    assert not is_rounding(target, float("inf"), lambda: float("inf"))
