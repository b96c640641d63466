"""A batch with a drafter is the same batch without: sequence by sequence where they may go at their own pace, in
lock-step where they may not. `test_cases.py` has what else is asked of batches."""

import families
import pytest
import torch
from batches import PAD, Idle, Notebook, alone, keeps_step, known_prompts, left_padded, mixed_prompts, together
from close import assert_close
from conftest import TARGETS, VOCAB, build_drafter, build_target
from draftings import CHAIN, PER_SEQUENCE, TREE
from draftings import CHAIN_OR_TREE as DRAFTINGS
from transformers import LogitsProcessorList, StoppingCriteriaList

LENGTH = 20
GREEDY = {"max_new_tokens": LENGTH, "do_sample": False}

each_drafting = pytest.mark.parametrize("drafting", DRAFTINGS.values(), ids=DRAFTINGS)


def check(target, drafter, prompts, **kwargs):
    """The same text as the target alone; returns the statistics."""
    output, stats = together(target, drafter, prompts, **GREEDY | kwargs)
    assert_close("text", output, alone(target, prompts, **GREEDY | without_knobs(kwargs)))
    return stats


def without_knobs(kwargs):
    return {name: value for name, value in kwargs.items() if name not in TREE}


# --- sequences at their own pace ---

PAIRS = [(kind, "pruned", "chain") for kind in TARGETS] + [(kind, "eagle31", "tree") for kind in TARGETS]
PAIRS += [("llama", name, "tree") for name in ("two_layers", "window_4", "mla", "padded_vocabulary")]


@pytest.mark.parametrize(("kind", "name", "drafting"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_greedy_text_is_the_targets_own(make_target, make_drafter, kind, name, drafting):
    target = make_target(kind)
    stats = check(target, make_drafter(target, name), mixed_prompts(target), **DRAFTINGS[drafting])
    assert not keeps_step(stats)


def test_every_sequence_is_as_it_is_alone(target, drafter):
    """Neither text nor acceptance of a sequence depend on its neighbours, its padding or how far the others are."""
    prompts = mixed_prompts(target)
    output, stats = together(target, drafter, prompts, **GREEDY, **CHAIN)
    for b, prompt in enumerate(prompts):
        expected, single = together(target, drafter, [prompt], **GREEDY, **CHAIN)
        assert_close(f"text {b}", output[b, -LENGTH:], expected[0, -LENGTH:])
        # near the end drafts are cut to what the longest sequence has left
        shared = slice(0, len(single.accepted_per_round) - 2)
        assert stats.sequences[b].accepted_per_round[shared] == single.accepted_per_round[shared]


MASKS = {
    "right": [[1] * 9, [1] * 7 + [0] * 2, [1] * 9],
    "holes": [[1] * 9, [1, 1, 0, 0, 1, 1, 1, 0, 1], [0, 1, 1, 1, 0, 1, 1, 1, 1]],
}


@pytest.mark.parametrize(("kind", "mask"), [("llama", "right"), ("llama", "holes"), ("gpt2", "holes")])
@each_drafting
def test_padding_that_is_not_on_the_left(make_target, make_drafter, kind, mask, drafting):
    target = make_target(kind)
    ids = torch.tensor([*known_prompts(target, 9, 9), [9, 0, 7, 7, 1, 2, 2, 4, 4]])
    kwargs = {"attention_mask": torch.tensor(MASKS[mask]), "pad_token_id": PAD} | GREEDY
    output = target.generate(ids, assistant_model=make_drafter(target), **drafting, **kwargs)
    assert_close("text", output, target.generate(ids, **kwargs))


def test_ids_of_32_bits(target, drafter):
    prompts = known_prompts(target, 4, 4)
    ids = torch.tensor([*prompts, [9, 0, 7, 7]])
    asked = {"attention_mask": torch.ones_like(ids), "pad_token_id": PAD, **GREEDY}
    output = target.generate(ids.int(), assistant_model=drafter, **CHAIN, **asked)
    assert_close("text", output, target.generate(ids, **asked))


def test_positions_a_model_works_out_from_the_mask():
    target = families.build_target("OPT", "eager")
    check(target, build_drafter(target), mixed_prompts(target), **TREE)


@pytest.mark.parametrize("kwargs", PER_SEQUENCE.values(), ids=PER_SEQUENCE)
def test_processors_of_sequences(target, drafter, kwargs):
    """They see each sequence's own text, whatever the length of the others."""
    stats = check(target, drafter, mixed_prompts(target), **kwargs, **TREE)
    assert not keeps_step(stats)


def test_sequences_cannot_be_repeated_greedily(target, drafter, prompt):
    """Refused as without a drafter, by transformers' own message."""
    for assistant in ({}, {"assistant_model": drafter}):
        with pytest.raises(ValueError, match="num_return_sequences"):
            target.generate(prompt, num_return_sequences=2, **assistant, **GREEDY)


# --- ends ---


def ended(texts, eos, num_prompt):
    """The output of plain generate with EOS: padding after a sequence's first EOS, as long as the longest of them."""
    new = [text[: text.index(eos) + 1] if eos in text else text for text in texts[:, num_prompt:].tolist()]
    longest = max(map(len, new))
    padded = [text + [PAD] * (longest - len(text)) for text in new]
    return torch.cat((texts[:, :num_prompt], torch.tensor(padded)), dim=1)


@pytest.mark.parametrize("pad", [PAD, 4, 7, None], ids=["neither", "second_eos", "first_eos", "nobody_set_it"])
def test_several_eos_and_padding(target, drafter, pad):
    prompts = mixed_prompts(target)
    output, stats = together(target, drafter, prompts, eos_token_id=[7, 4], pad_token_id=pad, **GREEDY, **TREE)
    assert_close("text", output, alone(target, prompts, eos_token_id=[7, 4], pad_token_id=pad, **GREEDY))
    assert min(one.generated_tokens for one in stats.sequences) < output.shape[1] - left_padded(prompts)[0].shape[1], (
        "no sequence ended early"
    )


@pytest.mark.parametrize(("pad", "drafting"), [(VOCAB + 500, TREE), (-1, CHAIN)], ids=["large", "negative"])
def test_padding_that_no_embedding_has(target, drafter, pad, drafting):
    """Some configs name such an id; nothing reads it as long as no sequence ends before the others."""
    prompts = mixed_prompts(target)
    stats = check(target, drafter, prompts, pad_token_id=pad, **drafting)
    assert not keeps_step(stats)
    output, _ = together(target, drafter, prompts, eos_token_id=7, pad_token_id=pad, **GREEDY, **drafting)
    whole = alone(target, prompts, **GREEDY)
    assert_close("text", output.where(output != pad, PAD), ended(whole, 7, whole.shape[1] - LENGTH))


@each_drafting
def test_sequences_that_have_ended_do_not_disturb(target, drafter, drafting):
    """They are written over with every forward; text and acceptance of the others are those of a sequence by itself."""
    prompts = [*known_prompts(target, 12), [4], [7]]
    stats = check(target, drafter, prompts, eos_token_id=1, **drafting)
    single = check(target, drafter, prompts[:1], eos_token_id=1, **drafting)
    assert [one.generated_tokens for one in stats.sequences] == [LENGTH, 4, 3]
    assert stats.sequences[0].accepted_per_round == single.sequences[0].accepted_per_round


@pytest.mark.parametrize("drafting", [{"num_assistant_tokens": 6}, TREE], ids=DRAFTINGS)
def test_a_table_of_positions_that_ends_with_the_text(drafting):
    target = build_target("gpt2", n_positions=37)
    prompts = [*known_prompts(target, 8), [1, 9, 3, 3, 2, 0, 4, 4]]
    check(target, build_drafter(target), prompts, max_new_tokens=37 - 8, **drafting)


# --- caches ---


@pytest.mark.parametrize("whole", [True, False], ids=["whole_prompt", "new_tokens"])
@pytest.mark.parametrize(("kind", "drafting"), [("llama", CHAIN), ("mistral_window_8", TREE), ("gpt2", TREE)])
def test_a_cache_from_an_earlier_forward(make_target, make_drafter, kind, whole, drafting):
    target, outputs = make_target(kind), []
    ids, mask = left_padded(mixed_prompts(target))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for assistant in ({"assistant_model": make_drafter(target)} | drafting, {}):
        past = target(
            ids[:, :6], attention_mask=mask[:, :6], position_ids=positions[:, :6], use_cache=True
        ).past_key_values
        given = ids if whole else ids[:, 6:]
        outputs.append(
            target.generate(given, attention_mask=mask, past_key_values=past, pad_token_id=PAD, **GREEDY, **assistant)
        )
    assert_close("text", *outputs)


# --- sequences in lock-step ---

STEP = {
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([Idle()])},
    "processor": lambda: {"logits_processor": LogitsProcessorList([Notebook()])},
    "max_time": lambda: {"max_time": 1e6},
    "scores": lambda: {"return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize(("name", "drafting"), [*((name, CHAIN) for name in STEP), ("criterion", {})])
def test_sequences_keep_step_where_something_sees_them_together(target, drafter, name, drafting):
    kwargs = STEP[name]
    prompts = known_prompts(target, 5, 9, 11)
    output, stats = together(target, drafter, prompts, eos_token_id=7, **GREEDY, **drafting, **kwargs())
    expected = alone(target, prompts, eos_token_id=7, **GREEDY, **kwargs())
    if "return_dict_in_generate" in kwargs():
        output, expected = output.sequences, expected.sequences
    assert_close("text", output, expected)
    assert keeps_step(stats)


@pytest.mark.parametrize(("kind", "drafting"), [("BLOOM", TREE), ("MPT", CHAIN), ("MPT", {})])
def test_sequences_keep_step_where_the_target_takes_no_masks_of_ours(kind, drafting):
    target = families.build_target(kind, "eager")
    stats = check(target, build_drafter(target), known_prompts(target, 5, 9, 7), eos_token_id=7, **drafting)
    assert keeps_step(stats)
    check(target, build_drafter(target), mixed_prompts(target), **drafting)


def test_a_pace_of_their_own_takes_fewer_forwards(target, drafter):
    prompts = mixed_prompts(target)
    ragged = check(target, drafter, prompts, **CHAIN)
    in_step = check(target, drafter, prompts, stopping_criteria=StoppingCriteriaList([Idle()]), **CHAIN)
    assert keeps_step(in_step)
    assert not keeps_step(ragged)
    assert ragged.target_forwards < in_step.target_forwards
    assert ragged.mean_accepted_length > in_step.mean_accepted_length


def test_max_time_ends_all_sequences_at_once(target, drafter, monkeypatch):
    """A clock that ticks once for every criterion asked: the time is up at a certain token, whatever the bursts."""
    prompts = known_prompts(target, 8, 8)
    for limit, count in ((1e-9, 1), (6.5, 7)):
        ticks = iter(range(1000))
        with monkeypatch.context() as patch:
            patch.setattr("transformers.generation.stopping_criteria.time.time", lambda ticks=ticks: float(next(ticks)))
            output, stats = together(target, drafter, prompts, max_time=limit, **GREEDY, **CHAIN)
        assert_close("text", output, alone(target, prompts, max_new_tokens=count))
    assert max(stats.accepted_per_round) >= 2


# --- statistics ---


@pytest.mark.parametrize("step", [False, True], ids=["own_pace", "in_step"])
@each_drafting
def test_statistics_of_sequences_add_up(target, drafter, drafting, step):
    prompts, forwards = mixed_prompts(target), []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    extra = {"stopping_criteria": StoppingCriteriaList([Idle()])} if step else {}
    output, stats = together(target, drafter, prompts, eos_token_id=7, **GREEDY, **drafting, **extra)
    handle.remove()
    num_prompt = left_padded(prompts)[0].shape[1]
    tokens = [text.index(7) + 1 if 7 in text else len(text) for text in output[:, num_prompt:].tolist()]
    assert [one.generated_tokens for one in stats.sequences] == tokens
    assert stats.generated_tokens == sum(tokens)
    assert [one.prefills for one in stats.sequences] == [1] * len(prompts)
    assert stats.prefills == len(prompts)
    assert stats.target_forwards == len(forwards) - 1 == max(len(one.accepted_per_round) for one in stats.sequences)
    assert all(shape[0] == len(prompts) for shape in forwards)
    for name in ("drafted_per_position", "accepted_per_position"):
        counts = [getattr(one, name) for one in stats.sequences]
        assert getattr(stats, name) == [
            sum(by_depth[i] for by_depth in counts if i < len(by_depth)) for i in range(max(map(len, counts)))
        ]
    assert sorted(stats.accepted_per_round) == sorted(
        count for one in stats.sequences for count in one.accepted_per_round
    )
    for one in stats.sequences:
        bonus = sum(one.accepted_per_round) + len(one.accepted_per_round) + 1
        assert one.generated_tokens in (bonus, bonus - 1), (
            "a text ends with a draft, or with a token of the target's own"
        )
        assert sum(one.accepted_per_position) == sum(one.accepted_per_round)
    assert "by sequence: " in stats.summary()
