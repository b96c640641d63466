"""Texts that go on from earlier ones read what is new, and say what they would say without."""

import pytest
import torch
from conftest import VOCAB
from families import build_target as build_family
from observers import InterruptError, raise_at
from transformers import LogitsProcessorList

from eagle31_hf.cache import adopt
from eagle31_hf.cache.prefix_cache import PrefixCache

TEXT = torch.randint(0, VOCAB, (1, 80), generator=torch.Generator().manual_seed(6))


@pytest.fixture
def cached(make_target):
    return PrefixCache(make_target("qwen3"))


def answer(cached: PrefixCache, ids: torch.Tensor, piece: int | None = None, **options) -> tuple[torch.Tensor, int]:
    """Returns a text with its answer (1, L + 8), and how many tokens of the prompt were not read; what was read is
    counted at the target's forwards."""
    target, read = cached.target, []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False} | options
    try:
        with cached.text(ids, piece) as text:
            if not options.get("assistant_model"):
                given |= {"prefill_chunk_size": piece}
            found = target.generate(ids, **given, **text.argument)
            text.ids = found[0].tolist()
    finally:
        handle.remove()
    if piece is None:
        assert read[0] == ids.shape[1] - text.num_reused
    assert found.tolist() == target.generate(ids, **given | {"assistant_model": None}).tolist()
    return found, text.num_reused


def joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def test_a_text_that_goes_on(cached):
    said, reused = answer(cached, TEXT[:, :20])
    assert reused == 0
    said, reused = answer(cached, joined(said, TEXT[:, 20:25]))
    assert reused == 27  # the last token of an answer is not in the cache
    _, reused = answer(cached, joined(said, TEXT[:, 25:30]))
    assert reused == 40


def test_a_text_that_leaves_an_earlier_one(cached):
    said, _ = answer(cached, TEXT[:, :20])
    _, reused = answer(cached, joined(said[:, :22], TEXT[:, 40:45]))
    assert reused == 22
    _, reused = answer(cached, said[:, :22])  # the same words again
    assert reused == 21
    _, reused = answer(cached, joined(said[:, :5], TEXT[:, 60:75]))
    assert reused == 0  # too little of it


def test_texts_of_several_users(cached):
    first, other = TEXT[:, :20], TEXT[:, 30:50]
    said, _ = answer(cached, first)
    also_said, _ = answer(cached, other)
    assert answer(cached, joined(said, TEXT[:, 70:75]))[1] == 27
    assert answer(cached, joined(also_said, TEXT[:, 70:75]))[1] == 27


def test_two_calls_at_once_have_caches_of_their_own(cached):
    said, _ = answer(cached, TEXT[:, :20])
    with cached.text(said) as one, cached.text(said) as other:
        assert (one.num_reused, other.num_reused) == (27, 0)
        assert one.cache is not other.cache


@pytest.mark.parametrize(("most_tokens", "kept"), [(0, []), (1, [27]), (54, [27, 27, 27]), (53, [27, 27])])
def test_no_more_is_kept_than_asked_for(make_target, most_tokens, kept):
    cached = PrefixCache(make_target("qwen3"), most_tokens)
    for first in range(0, 60, 20):
        answer(cached, TEXT[:, first : first + 20])
    assert [len(text.ids) for text in cached._texts] == kept


def test_drafts_go_on_too(make_target, make_drafter):
    cached = PrefixCache(make_target("qwen3"))
    drafted = {"assistant_model": make_drafter(cached.target), "num_assistant_tokens": 3}
    cached.target.generate(TEXT[:, :4], **drafted)  # tries its layers, once
    said, _ = answer(cached, TEXT[:, :20], **drafted)
    assert answer(cached, joined(said, TEXT[:, 20:25]), **drafted)[1] == 27


@pytest.mark.parametrize("piece", [4, 30])
def test_prompts_that_are_read_in_pieces(cached, piece):
    said, _ = answer(cached, TEXT[:, :20], piece)
    _, reused = answer(cached, joined(said, TEXT[:, 20:30]), piece)
    assert reused in ((27, 0) if piece == 4 else (27,))  # 0: transformers before 5.23


def test_after_an_error_the_prompt_is_known(make_target, make_drafter):
    cached = PrefixCache(make_target("qwen3"))
    failing = LogitsProcessorList([raise_at(5, lambda ids, scores: scores)])
    drafted = {"assistant_model": make_drafter(cached.target), "num_assistant_tokens": 3}
    with pytest.raises(InterruptError):
        answer(cached, TEXT[:, :20], logits_processor=failing, **drafted)
    [text] = cached._texts
    assert text.ids == TEXT[0, :20].tolist()
    assert adopt.length(text.cache) == 20
    assert answer(cached, TEXT[:, :24], **drafted)[1] == 20


def test_without_memory_nothing_is_kept(cached):
    answer(cached, TEXT[:, :20])
    with pytest.raises(torch.OutOfMemoryError), cached.text(TEXT[:, 40:50]):
        raise torch.OutOfMemoryError
    assert not cached._texts


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ],
    ids=str,
)
def test_calls_that_need_a_cache_of_another_kind_make_their_own(cached, options):
    config = cached.target.generation_config
    config = type(config)(**config.to_dict() | options)
    with cached.text(TEXT[:, :20], config=config) as text:
        assert text.argument == {}


@pytest.mark.parametrize(("name", "num_reused"), [("Mamba2", 0), ("Jamba", 0), ("Gemma3 text, window", 27)])
def test_caches_that_cannot_be_cut(name, num_reused):
    """Of windows, texts that go on are served, others are read anew; caches with states are not kept."""
    cached = PrefixCache(build_family(name, "eager"))
    said, _ = answer(cached, TEXT[:, :20])
    assert answer(cached, said[:, :24])[1] == 0
    assert answer(cached, joined(said, TEXT[:, 20:25]))[1] == num_reused


def test_a_target_that_shifts_positions_by_its_last_image_reads_all():
    """Qwen2-VL's class adds the shift of whatever text it read last to the positions after a cached one."""
    cached = PrefixCache(build_family("Qwen2.5-VL", "eager"))
    said, _ = answer(cached, TEXT[:, :20])
    for module in cached.target.modules():
        if "rope_deltas" in vars(module):
            module.rope_deltas = torch.tensor([[-3]])  # as after an image
    assert answer(cached, joined(said, TEXT[:, 20:25]))[1] == 0
