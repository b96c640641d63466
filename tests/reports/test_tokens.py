"""Rounds as they are shown: what was drafted, in the order of the tree, and what of it was accepted."""

import pytest
import torch
from conftest import build_drafter, build_target, letters
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from eagle31_hf import track_acceptance
from eagle31_hf.acceptance import Round, watch_rounds
from eagle31_hf.reports.acceptance_study import end_of, shown_round

PROMPT = torch.tensor([[1, 2, 3, 5, 8]])


def drafts_of(shown: dict) -> list[tuple[str, int, bool]]:
    return [(draft["text"], draft["depth"], draft["is_accepted"]) for draft in shown["drafts"]]


def test_a_chain_is_accepted_up_to_the_first_that_differs():
    shown = shown_round(Round([[0, 1, 9]], [2], [[0, 1, 2, 9]], None), letters(unk_token="k"))
    assert (shown["accepted"], shown["bonus"]) == (["a", "b"], "j")
    assert drafts_of(shown) == [("a", 1, True), ("b", 2, True), ("c", 3, False), ("j", 4, False)]


def test_a_tree_is_shown_branch_by_branch():
    """The root's children are a and b; b was accepted, and of its children d; a token is not accepted off the path."""
    shown = shown_round(Round([[1, 3, 5]], [2], [[0, 1, 3, 3, 4]], [[0, 0, 1, 2, 2]]), letters(unk_token="k"))
    assert drafts_of(shown) == [("a", 1, False), ("d", 2, False), ("b", 1, True), ("d", 2, True), ("e", 2, False)]
    assert (shown["accepted"], shown["bonus"]) == (["b", "d"], "f")


def test_a_draft_that_ends_the_text_leaves_no_bonus_token():
    shown = shown_round(Round([[0, 1]], [2], [[0, 1, 2]], None), letters(unk_token="k"))
    assert (shown["accepted"], shown["bonus"]) == (["a", "b"], None)


def test_tokens_keep_the_space_that_they_begin_with():
    """As in Llama 2's vocabulary, whose decoder takes the first space of a text away."""
    made = Tokenizer(WordLevel({"\u2581the": 0, "\u2581fox": 1}))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    shown = shown_round(Round([[0, 1]], [1], [[0]], None), PreTrainedTokenizerFast(tokenizer_object=made))
    assert (shown["accepted"], shown["bonus"]) == ([" the"], " fox")


def test_the_prompt_is_cut_to_its_end():
    assert end_of("x" * 500) == "..." + "x" * 240
    assert end_of("short") == "short"


@pytest.mark.parametrize("tree", [False, True])
def test_rounds_are_those_that_are_counted(tree):
    target = build_target("qwen3")
    drafter = build_drafter(target)
    knobs = {"num_assistant_tokens": 3} | ({"draft_tree_top_k": 2, "draft_tree_total_tokens": 6} if tree else {})
    rounds = []
    with watch_rounds(rounds.append), track_acceptance() as stats:
        sequence = target.generate(PROMPT, assistant_model=drafter, max_new_tokens=12, do_sample=False, **knobs)
    assert [token for found in rounds for token in found.tokens[0]] == sequence[0, PROMPT.shape[1] :].tolist()
    assert [found.num_accepted[0] for found in rounds[1:]] == stats.accepted_per_round
    assert rounds[0].drafts == [[]]
    assert any(found.parents is not None for found in rounds) == tree
    target.generate(PROMPT, assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert len(rounds) == len(stats.accepted_per_round) + 1  # nobody watches any more


def test_what_a_watcher_raises_ends_the_call():
    target = build_target("qwen3")
    drafter = build_drafter(target)

    def stop(found):
        raise KeyboardInterrupt

    with watch_rounds(stop), pytest.raises(KeyboardInterrupt):
        target.generate(PROMPT, assistant_model=drafter, max_new_tokens=12)
    assert target.generate(PROMPT, assistant_model=drafter, max_new_tokens=4).shape == (1, 9)
