"""The loss of a batch: its definition, what it is divided by, what it says besides, and that it can be trained by.

B sequences, T tokens, K depths, V target vocabulary.
"""

import pytest
import torch
from close import FORWARD, assert_close
from factories import NORMS, VARIANTS, VOCAB, build, chain, inputs, target
from torch.nn.functional import kl_div

from eagle31_hf.training.loss_mask import CONVENTIONS, loss_denominators
from eagle31_hf.training.objective import Batch, DraftingObjective, Settings, means_of, sum_dtype
from eagle31_hf.training.target import TargetReader

DEPTH = 4
LENGTH = 11
HT = 20
SUMMED = 1e-5  # fp32 sums in another order
EVEN = Settings(DEPTH, (1.0,) * DEPTH)
HEAD = torch.randn(VOCAB, HT, generator=torch.Generator().manual_seed(7))


def logits_of(last_states):
    return last_states @ HEAD.T


def batch_of(drafter, answers=None, documents=None, length=LENGTH, batch=2):
    tokens, states = inputs(drafter, length, batch)
    last = torch.randn(batch, length, HT, generator=torch.Generator().manual_seed(2))
    answers = torch.ones_like(tokens).bool() if answers is None else answers
    return Batch(tokens, answers, torch.ones_like(tokens) if documents is None else documents, states, last)


def objective_of(drafter, settings=EVEN):
    return DraftingObjective(drafter, settings, logits_of)


def gradients(objective, outputs) -> dict:
    weights = {name: weight for name, weight in objective.named_parameters() if weight.requires_grad}
    return dict(zip(weights, torch.autograd.grad(outputs["loss"], list(weights.values())), strict=True))


def ragged_answers():
    """A sequence with a long answer, one with two short ones, and one without any."""
    answers = torch.zeros(3, LENGTH, dtype=torch.bool)
    answers[0, 2:] = True
    answers[1, 1:4], answers[1, 6:10] = True, True
    return answers


@pytest.mark.parametrize("decay", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["eagle31", "full_vocabulary"])
@torch.no_grad()
def test_the_loss_is_its_definition(kind, decay):
    drafter = build(**VARIANTS[kind])
    batch = batch_of(drafter)
    target_logits = logits_of(batch.last_states)
    ids = range(VOCAB) if drafter.d2t is None else drafter.draft_to_target_ids().tolist()
    ids = torch.tensor(list(ids))
    best, p = target_logits.argmax(-1), target_logits.softmax(-1)[..., ids]
    distance, accuracy, accepted = ([[] for _ in range(DEPTH)] for _ in range(3))
    for position in range(LENGTH - 2):  # the token predicted is in the text
        for k, (logits, _) in enumerate(
            chain(drafter, batch.input_ids, batch.states, position, min(DEPTH, LENGTH - 2 - position))
        ):
            wanted, q = p[:, position + 1 + k], logits.softmax(-1)
            likeliest, covered = best[:, position + 1 + k], wanted.sum(-1)
            kl = covered * kl_div(q.log(), wanted / covered[:, None], reduction="none").sum(-1)
            cross_entropy = -(q.log() * (ids == likeliest[:, None])).sum(-1)  # nothing where no draft is the likeliest
            distance[k].append(0.9 * kl + 0.1 * cross_entropy)
            accuracy[k].append((ids[q.argmax(-1)] == likeliest).float())
            accepted[k].append(q.minimum(wanted).sum(-1))
    outputs = objective_of(drafter, Settings(DEPTH, tuple(decay**k for k in range(DEPTH))))(batch)
    figures = means_of(outputs["sums"])
    mean = [[torch.cat(values).mean().item() for values in depths] for depths in (distance, accuracy, accepted)]
    assert figures["distance"] == pytest.approx(mean[0], rel=FORWARD)
    assert figures["accuracy"] == pytest.approx(mean[1], rel=FORWARD)
    assert figures["acceptance"] == pytest.approx(mean[2], rel=FORWARD)
    assert outputs["loss"].item() == pytest.approx(
        sum(decay**k * value for k, value in enumerate(mean[0])), rel=FORWARD
    )


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_batch_in_parts_adds_up_to_the_whole(convention, normalisation):
    """Accumulation is exact, since every part is divided by the denominators of the whole."""
    drafter = build()
    settings = Settings(DEPTH, (1.0, 0.8, 0.6, 0.4), convention=convention, normalisation=normalisation)
    objective, whole = objective_of(drafter, settings), batch_of(drafter, ragged_answers(), batch=3)
    totals = loss_denominators(whole.answers, whole.documents, DEPTH, convention, normalisation)
    expected, found = objective(whole), []
    for b in range(3):
        columns = (whole.input_ids, whole.answers, whole.documents, whole.states, whole.last_states)
        found.append(objective(Batch(*(column[b : b + 1] for column in columns)), totals))
    assert_close("loss", sum(part["loss"] for part in found), expected["loss"], SUMMED)
    assert_close("figures", sum(part["sums"] for part in found), expected["sums"], SUMMED)
    parts = [gradients(objective, part) for part in found]
    for name, gradient in gradients(objective, expected).items():
        assert_close(name, sum(part[name] for part in parts), gradient, SUMMED)


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_packed_texts_have_the_loss_they_have_alone(normalisation):
    drafter = build()
    objective = objective_of(drafter, Settings(DEPTH, (1.0,) * DEPTH, normalisation=normalisation))
    objective.watches = True
    alone = batch_of(drafter, ragged_answers()[:2])
    documents = torch.tensor([[1] * LENGTH, [2] * LENGTH])
    columns = (alone.input_ids, alone.answers, documents, alone.states, alone.last_states)
    packed = Batch(*(column.reshape(1, 2 * LENGTH, *column.shape[2:]) for column in columns))
    theirs, ours = objective(alone), objective(packed)
    assert_close("loss", ours["loss"], theirs["loss"], SUMMED)
    assert_close("figures", ours["sums"], theirs["sums"], SUMMED)


def test_by_sequence_every_text_weighs_alike():
    """A text's mean, whatever its length; by token the long one would count for more."""
    drafter, answers = build(), torch.zeros(2, LENGTH, dtype=torch.bool)
    answers[0, 1:], answers[1, 1:4] = True, True
    one_deep = Settings(1, (1.0,), normalisation="sequence")
    whole = batch_of(drafter, answers)
    columns = (whole.input_ids, whole.answers, whole.documents, whole.states, whole.last_states)
    alone = [
        objective_of(drafter, one_deep)(Batch(*(column[i : i + 1] for column in columns)))["loss"] for i in range(2)
    ]
    assert_close("mean of means", objective_of(drafter, one_deep)(whole)["loss"], sum(alone) / 2, SUMMED)


def test_a_batch_without_answers_is_a_loss_of_nothing_that_reaches_every_weight():
    drafter = build()
    objective = objective_of(drafter)
    outputs = objective(batch_of(drafter, torch.zeros(2, LENGTH, dtype=torch.bool)))
    assert outputs["loss"].item() == 0.0
    for name, gradient in gradients(objective, outputs).items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


def test_a_batch_shorter_than_the_unroll_is_padded():
    drafter = build()
    answers = torch.ones(2, 4, dtype=torch.bool)
    outputs = objective_of(drafter)(batch_of(drafter, answers, length=4))
    assert outputs["sums"][0].tolist() == [4.0, 2.0, 0.0, 0.0]  # two texts: positions 0 and 1, then 0
    assert torch.isfinite(outputs["loss"])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_text_with_broken_states_is_left_out_whole(broken):
    """The other texts of its sequence stay as they were."""
    drafter = build()
    documents = torch.tensor([[1] * 5 + [2] * 6, [1] * 11])
    whole = batch_of(drafter, documents=documents)
    whole.states[0, 7, 3] = broken
    batch, count = whole.without_broken()
    assert int(count) == 1
    assert batch.answers[0].tolist() == [True] * 5 + [False] * 6
    assert batch.answers[1].all()
    without = batch_of(drafter, documents=documents)
    without.answers[0, 5:] = False
    assert_close("loss", objective_of(drafter)(batch)["loss"], objective_of(drafter)(without)["loss"], SUMMED)
    assert int(batch.without_broken()[1]) == 0


def test_states_that_were_given_stay_as_they_are():
    """A dataset in memory is read in every epoch."""
    whole = batch_of(build())
    assert whole.without_broken()[0] is whole, "a copy of states that are all finite"
    whole.states[0, 7, 3] = float("inf")
    before = whole.states.clone()
    batch, _ = whole.without_broken()
    assert whole.states.equal(before)
    assert batch.states.isfinite().all()


def test_states_to_score_are_handed_over():
    drafter, batch = build(), batch_of(build())
    outputs = objective_of(drafter)(batch)
    assert outputs["record"].states == []


def test_padding_changes_nothing():
    drafter = build()
    short = batch_of(drafter)
    long = short.padded(LENGTH + 5)
    assert_close("loss", objective_of(drafter)(long)["loss"], objective_of(drafter)(short)["loss"], SUMMED)


@pytest.mark.parametrize(
    ("part", "frozen"), [("lm_head", "drafter.lm_head.weight"), ("embed_tokens", "drafter.embed_tokens.weight")]
)
def test_what_is_frozen_stays(part, frozen):
    drafter = build()
    getattr(drafter, part).requires_grad_(False)
    objective = objective_of(drafter)
    objective(batch_of(drafter))["loss"].backward()
    found = {name: weight.grad for name, weight in objective.named_parameters()}
    assert found.pop(frozen) is None
    assert all(gradient is not None for gradient in found.values())


def test_the_loss_is_in_fp32_under_autocast():
    drafter = build()
    batch = batch_of(drafter)
    expected = objective_of(drafter)(batch)
    with torch.autocast("cpu", torch.bfloat16):
        seen = []
        objective = DraftingObjective(
            drafter, EVEN, lambda states: seen.append(torch.is_autocast_enabled("cpu")) or logits_of(states)
        )
        outputs = objective(batch)
    assert seen, "the target was not asked"
    assert not any(seen), "the target's logits are rounded"
    assert outputs["loss"].dtype == outputs["figures"].loss.dtype == torch.float32
    assert_close("loss", outputs["loss"], expected["loss"], 0.05)


def test_figures_are_added_up_in_fp32_where_there_is_no_fp64(monkeypatch):
    """As on Apple's GPUs."""
    assert sum_dtype(torch.device("mps")) == torch.float32
    drafter = build()
    expected = objective_of(drafter)(batch_of(drafter))["sums"]
    monkeypatch.setattr("eagle31_hf.training.objective.sum_dtype", lambda device: torch.float32)
    found = objective_of(drafter)(batch_of(drafter))["sums"]
    assert (expected.dtype, found.dtype) == (torch.float64, torch.float32)
    assert_close("sums", found.double(), expected, SUMMED)


def test_the_target_is_no_part_of_what_is_trained():
    drafter, theirs = build(), target()
    objective = DraftingObjective(drafter, EVEN, TargetReader(theirs, [1, 2, 4]).logits)
    assert {name.partition(".")[0] for name in objective.state_dict()} == {"drafter"}
    assert {id(weight) for weight in objective.parameters()} == {id(weight) for weight in drafter.parameters()}


@pytest.mark.parametrize("fields", NORMS.values(), ids=NORMS)
def test_thirty_steps_of_training_help_at_every_depth(fields):
    torch.manual_seed(0)
    theirs, ours = target(), build(**fields, draft_vocab_size=VOCAB).train()
    ours.embed_tokens.weight.requires_grad_(False)
    tokens = theirs.generate(torch.randint(VOCAB, (8, 2)), max_new_tokens=18, do_sample=True)
    reader = TargetReader(theirs, ours.config.resolve_layer_ids(4))
    one = torch.ones_like(tokens)
    batch = Batch(tokens, one.bool(), one, *reader.read(tokens, one))
    objective = DraftingObjective(ours, Settings(3, (1.0, 0.8, 0.64)), reader.logits)
    optimizer = torch.optim.AdamW([weight for weight in ours.parameters() if weight.requires_grad], lr=1e-2)
    history = []
    for _ in range(30):
        outputs = objective(batch)
        history.append((outputs["loss"].item(), means_of(outputs["sums"])))
        optimizer.zero_grad()
        outputs["loss"].backward()
        optimizer.step()
    (first_loss, first), (last_loss, last) = history[0], history[-1]
    assert last_loss < 0.5 * first_loss
    for k in range(3):
        assert last["distance"][k] < 0.6 * first["distance"][k], k
        assert last["accuracy"][k] > first["accuracy"][k] + 0.2, k
        assert last["acceptance"][k] > first["acceptance"][k] + 0.1, k
