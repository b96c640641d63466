"""The parts of a training run: what is held out, where regenerated examples go, what a new drafter begins with."""

import json
import os
import signal
from argparse import Namespace
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from conftest import build_target
from tokenizers import normalizers
from transformers import TrainerState

from eagle31_hf.cli.training import starting_drafter
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.prepare import in_processes, prepare_data, processes
from eagle31_hf.training.recipe import (
    ExampleReader,
    ProgressLines,
    asked_data,
    draft_vocabulary,
    drawn_chats,
    line_of,
    loaded_drafter,
)
from eagle31_hf.training.records import read_records
from eagle31_hf.training.shard_builder import ShardBuilder
from eagle31_hf.training.skipped import Skips
from eagle31_hf.training.store import HiddenStateStore, open_store

RECORDS = 30
OPTIONS = PreparationOptions(max_length=40)


@pytest.fixture
def source(tmp_path) -> str:
    letters = torch.randint(0, 10, (RECORDS, 12), generator=torch.Generator().manual_seed(0))
    lines = [json.dumps({"text": "".join(chr(ord("a") + i) for i in text)}) for text in letters.tolist()]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "texts.jsonl")


@pytest.fixture
def speller(tokenizer):
    """A tokenizer of the test's own, which may change it."""
    own = deepcopy(tokenizer)
    own.eos_token = "k"
    return own


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def reader(target, speller, told, tmp_path) -> ExampleReader:
    return ExampleReader(target, speller, OPTIONS, told.append, tmp_path / "run")


@pytest.mark.parametrize(("asked", "held_out"), [(0, None), (2, 2), (99, 3)], ids=["none", "some", "a tenth"])
def test_some_examples_are_held_out_drawn_at_random(reader, source, told, asked, held_out):
    data = reader.training_data(source, None, asked)
    whole, facts = reader.read(source, "data")
    texts = [whole[i]["input_ids"].tolist() for i in range(RECORDS)]
    kept = [data.train[i]["input_ids"].tolist() for i in range(len(data.train))]
    apart = [data.held_out[i]["input_ids"].tolist() for i in range(held_out or 0)]
    assert (len(data.train), data.held_out is None) == (RECORDS - (held_out or 0), held_out is None)
    assert sorted(kept + apart) == sorted(texts)
    assert kept == [text for text in texts if text not in apart]  # their order is the data's
    assert held_out is None or data.held_out.indices != [*range(RECORDS - held_out, RECORDS)]
    assert data.facts == facts | {"held_out_digest": data.facts["held_out_digest"]}
    assert facts["rows"] == RECORDS
    assert facts["tokens"] == sum(map(len, texts))
    assert told[1:] == 2 * [f"{source}: 30 rows of {facts['tokens']} tokens"]
    assert told[0].startswith("shard 1 of 1: 30 rows")  # made once


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"max_samples": 3},
        {"regenerate": True, "max_new_tokens": 4},
        {"regenerate": True, "max_new_tokens": 4, "seed": 1},
        {"regenerate": True, "max_new_tokens": 4, "self_prompts": 2},
    ],
    ids=lambda changed: ", ".join(changed) or "plain",
)
def test_what_was_read_is_known_before_it_is_read_again(target, speller, source, tmp_path, told, changed):
    options = replace(OPTIONS, **changed)
    reader = ExampleReader(target, speller, options, told.append, tmp_path / "run")
    known = {"records_digest": reader.read(source, "data")[1]["records_digest"]}
    assert asked_data(source, None, options) == known
    assert asked_data(source, None, replace(options, max_length=20, processes=1)) == known
    assert asked_data(source, None, replace(options, max_samples=4)) != known
    assert (asked_data(source, None, replace(options, seed=7)) == known) != options.regenerate
    folder = str(prepare_data(target, speller, source, tmp_path / "store", options).folder)
    assert asked_data(folder, None, OPTIONS) == known


def test_a_chat_is_held_out_whole():
    """Its turns are examples of their own, each of which begins with the first question."""

    def example(prompt: list[int], answer: int) -> dict:
        ids = torch.tensor([*prompt, *[answer] * 3])
        return {"input_ids": ids, "answers": torch.arange(len(ids)) >= len(prompt)}

    chats = [[example([1, chat, *[5] * turn], 7 + turn) for turn in range(1 + chat % 3)] for chat in range(30)]
    examples = [one for chat in chats for one in chat]
    starts = [0, *accumulate(map(len, chats))]
    rows_of = [{*range(start, end)} for start, end in pairwise(starts)]
    drawn = set()
    for seed in range(20):
        chosen = drawn_chats(examples, 7, seed)
        assert 5 <= len(chosen) <= 7
        assert all(rows <= chosen or not rows & chosen for rows in rows_of)
        assert chosen == drawn_chats(examples, 7, seed)
        drawn.add(frozenset(chosen))
    assert len(drawn) > 15


def test_examples_of_another_source_are_held_out_whole(reader, source, tmp_path):
    (tmp_path / "others.jsonl").write_text('{"text": "abcdefgh"}')
    data = reader.training_data(source, str(tmp_path / "others.jsonl"), 5)
    assert (len(data.train), len(data.held_out)) == (RECORDS, 1)
    assert data.facts == reader.training_data(source, None, 0).facts, "all is trained on"
    assert data.facts.items() > asked_data(source, "others", OPTIONS).items()


def test_regenerated_examples_are_read_from_their_store_by_another_run(target, speller, source, tmp_path, told):
    reader = ExampleReader(target, speller, replace(OPTIONS, regenerate=True), told.append, tmp_path / "run")
    examples, facts = reader.read(source, "data")
    made = [line for line in told if line.startswith("shard")]
    again, facts_again = ExampleReader(target, speller, OPTIONS, told.append, tmp_path / "other").read(
        str(tmp_path / "run" / "data"), "data"
    )
    assert (facts["rows"], facts["tokens"]) == (facts_again["rows"], facts_again["tokens"])
    assert [line for line in told if line.startswith("shard")] == made
    assert isinstance(again, HiddenStateStore)
    assert all(torch.equal(examples[i]["input_ids"], again[i]["input_ids"]) for i in range(len(examples)))
    speller.add_tokens("a token more")
    with pytest.raises(ValueError, match=r"tokenizer is .*, expected"):
        reader.read(str(tmp_path / "run" / "data"), "data")


def test_a_new_drafter_proposes_the_answers_frequent_tokens(reader, target, source, told):
    data = reader.training_data(source, None, 0)
    ids, share = draft_vocabulary(target, reader.tokenizer, data, 9, told.append)
    assert len(ids) == 9
    assert 0 < share < 1
    assert "a draft vocabulary of 9 covers" in told[-1]
    fields = {"fc_norm": False}
    asked = Namespace(drafter=None, draft_vocab_size=9, head="target", seed=0, field=fields)
    read_layers = replace(data, layer_ids=[0, 1, 2])
    drafter, _ = starting_drafter(asked, target, reader.tokenizer, read_layers)
    assert drafter.draft_to_target_ids().tolist() == ids.tolist()
    assert not drafter.config.fc_norm
    assert drafter.config.aux_hidden_state_layer_ids == [0, 1, 2]
    assert draft_vocabulary(target, reader.tokenizer, data, target.config.vocab_size, told.append) == (None, None)


def test_only_an_eagle_3_drafter_is_upgraded(reader, make_drafter, source, tmp_path, told):
    target = build_target("llama")
    data = reader.training_data(source, None, 0)
    seen = []

    def upgrade(drafter, upgraded_for, texts):
        seen.append((upgraded_for, len(texts), texts[0].tolist()))
        raise KeyError("far enough")

    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path / "eagle31")
    loaded = loaded_drafter(str(tmp_path / "eagle31"), target, data, told.append, upgrade=upgrade)
    assert all(torch.equal(weight, drafter.state_dict()[name]) for name, weight in loaded.state_dict().items())
    make_drafter(target, fc_norm=False, norm_output=False).save_pretrained(tmp_path / "eagle3")
    with pytest.raises(KeyError):
        loaded_drafter(str(tmp_path / "eagle3"), target, data, told.append, upgrade=upgrade)
    assert seen == [(target, 16, [data.train[0]["input_ids"].tolist()])]


def test_a_log_is_one_line_of_the_figures_one_looks_at():
    assert line_of({"learning_rate": 0.1}) == ""
    assert line_of({"loss": 1.25, "accuracy_1": 0.5, "accuracy_2": 0.25, "grad_norm": 3.0}) == (
        "loss 1.250; accuracy 0.50 0.25"
    )
    assert line_of({"eval_loss": 2.0, "eval_accepted_length": 1.5, "eval_served_accepted_length": 1.25}) == (
        "held out, loss 2.000; accepted length 1.50; in generate() 1.25"
    )


def test_a_log_says_how_fast_a_run_is_and_how_long_it_takes(told, monkeypatch):
    """Of a run resumed after 100 steps of 400, ten steps that took a minute."""
    now = [1000.0]
    monkeypatch.setattr("eagle31_hf.training.recipe.monotonic", lambda: now[0])
    lines, state = ProgressLines(told.append), TrainerState(global_step=100, max_steps=400)
    lines.on_train_begin(None, state, None)
    state.global_step, now[0] = 110, 1060.0
    lines.on_log(None, state, None, {"loss": 1.25, "tokens_per_second": 1234.5})
    lines.on_log(None, state, None, {"eval_loss": 1.5})
    assert told == [
        "step 110 of 400: loss 1.250; 1,234 tokens/s, 29 minutes left",
        "step 110 of 400: held out, loss 1.500",
    ]


@pytest.mark.parametrize("regenerate", [False, True])
def test_of_the_data_as_many_samples_are_read_as_are_asked_for(target, speller, source, tmp_path, told, regenerate):
    """Not of what is evaluated on; and a store is read whole, or not at all."""
    options = replace(OPTIONS, max_samples=3, regenerate=regenerate)
    options = replace(options, max_new_tokens=4, generation={"do_sample": False}) if regenerate else options
    reader = ExampleReader(target, speller, options, told.append, tmp_path / "run")
    data = reader.training_data(source, source, 5)
    assert len(data.train) == 3
    assert len(data.held_out) > RECORDS - 5  # some may have no answer
    more = ExampleReader(target, speller, replace(options, max_samples=4), told.append, tmp_path / "more")
    assert len(more.read(source, "data")[0]) == 4
    prepare_data(target, speller, source, tmp_path / "store", OPTIONS)
    with pytest.raises(ValueError, match=r"max_samples is 3 and .* is a store, .* expected the data it was made of"):
        reader.read(str(tmp_path / "store"), "data")
    with pytest.raises(ValueError, match="max_samples is 0; expected at least 1"):
        PreparationOptions(max_samples=0)
    with pytest.raises(ValueError, match="num_records is 30, expected 4"):
        prepare_data(target, speller, source, tmp_path / "store", replace(OPTIONS, max_samples=4))


@pytest.mark.parametrize("regenerate", [False, True])
def test_a_dataset_of_the_hub_is_streamed_wherever_it_is_read(target, speller, tmp_path, monkeypatch, regenerate):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path, name, *, split, streaming):
        asked.append((path, split, streaming))
        return datasets.Dataset.from_list([{"text": "abcdefgh"}] * RECORDS).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    options = replace(OPTIONS, split="dev", max_samples=3, regenerate=regenerate)
    options = replace(options, max_new_tokens=4, generation={"do_sample": False}) if regenerate else options
    source = f"owner/{'answered' if regenerate else 'given'}"
    examples, facts = ExampleReader(target, speller, options, print, tmp_path / "run").read(source, "data")
    assert len(examples) == 3
    assert asked_data(source, None, options) == {"records_digest": facts["records_digest"]}
    assert asked == [(source, "dev", True)]


def test_answers_of_a_store_are_not_regenerated_in_silence(target, speller, source, tmp_path, told):
    prepare_data(target, speller, source, tmp_path / "store", OPTIONS)
    reader = ExampleReader(target, speller, replace(OPTIONS, regenerate=True), told.append, tmp_path / "run")
    with pytest.raises(ValueError, match=r"regenerate is True and .* is a store, .* made by prepare-data --regenerate"):
        reader.read(str(tmp_path / "store"), "data")


def test_a_source_is_tokenized_once_for_all_runs_that_read_it_alike(target, speller, source, tmp_path, told):
    def read(options=OPTIONS, name="run"):
        told.clear()
        store, _ = ExampleReader(target, speller, options, told.append, tmp_path / name).read(source, "data")
        return store, [line for line in told if line.startswith("shard")]

    first, made = read()
    assert len(made) == 1
    for again, made in (read(), read(name="other"), read(replace(OPTIONS, processes=1, batch_size=3))):
        assert (again.folder, made) == (first.folder, [])
    shorter, made = read(replace(OPTIONS, max_length=OPTIONS.max_length - 1))
    assert (shorter.folder != first.folder, len(made)) == (True, 1)
    with open(source, "a") as file:
        file.write('\n{"text": "abcdefgh"}')
    longer, _ = read()
    assert (len(longer), len(first)) == (RECORDS + 1, RECORDS)
    assert not (tmp_path / "run").exists(), "a run's folder has what only it can use"


@pytest.mark.parametrize("count", [2, 3])
def test_processes_make_the_shards_that_one_makes(target, speller, source, tmp_path, count):
    for folder, num in (("one", 1), ("several", count)):
        options = replace(OPTIONS, records_per_shard=4, processes=num)
        prepare_data(target, speller, source, tmp_path / folder, options)
    found = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "several")]
    assert found[0] == found[1]
    assert len(found[0]) == 1 + -(-RECORDS // 4)


@pytest.mark.parametrize(("quota", "expected"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 5), ("", 5)])
def test_a_container_has_no_more_processes_than_cores_that_it_is_allowed(tmp_path, monkeypatch, quota, expected):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr("eagle31_hf.training.prepare.QUOTA", str(tmp_path / "cpu.max"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(5)}, raising=False)
    assert processes(OPTIONS) == expected
    assert processes(replace(OPTIONS, processes=7)) == 7


def test_a_killed_process_is_named_and_what_is_complete_is_kept(target, speller, source, tmp_path, monkeypatch):
    build = ShardBuilder.build

    def killed(self, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return build(self, index)

    options = replace(OPTIONS, records_per_shard=4, processes=2)
    with monkeypatch.context() as patch:
        patch.setattr(ShardBuilder, "build", killed)
        with pytest.raises(RuntimeError, match=r"a process that tokenizes was killed, .* --processes 1"):
            prepare_data(target, speller, source, tmp_path / "store", options)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("shard-*.safetensors")}
    assert kept
    assert prepare_data(target, speller, source, tmp_path / "store", options).rows == RECORDS
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())


def test_what_the_vocabulary_does_not_show_is_tokenized_anew(target, speller, source, tmp_path):
    def folder(tokenizer, target=target):
        reader = ExampleReader(target, tokenizer, OPTIONS, lambda line: None, tmp_path / "run")
        return reader.read(source, "data")[0].folder

    other, tuned = deepcopy(speller), deepcopy(target)
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    tuned.lm_head.weight.data *= 1.01
    stopping = deepcopy(target)
    stopping.generation_config.eos_token_id = [5, 10]
    assert len({folder(speller), folder(other), folder(speller, stopping), folder(speller, build_target("gpt2"))}) == 4
    assert folder(speller, tuned) == folder(speller)


def test_a_cache_that_cannot_be_written_to(target, speller, source, tmp_path, told, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("eagle31_hf.storage.measured.FOLDER", str(tmp_path / "file" / "cache"))
    store, _ = ExampleReader(target, speller, OPTIONS, told.append, tmp_path / "run").read(source, "data")
    assert store.folder.parent.parent == tmp_path / "run"
    assert "cannot be written to; examples go into" in told[0]


def test_a_source_without_examples_stops_all_processes(target, speller, tmp_path, told):
    path = tmp_path / "empty.jsonl"
    path.write_text('{"text": "a"}')
    with pytest.raises(ValueError, match="none of its 1 records makes a row"):
        ExampleReader(target, speller, OPTIONS, told.append, tmp_path / "run").read(str(path), "data")


def test_a_stop_waits_for_the_shards_that_are_being_made_alone(target, speller, source, tmp_path):
    options = replace(OPTIONS, records_per_shard=2).for_target(target)
    records = read_records(source)
    builder = ShardBuilder(target, speller, records, options, Skips(records.where), lambda line: None)
    open_store(tmp_path / "store", builder.manifest(source))
    making = in_processes(builder, tmp_path / "store", [*range(15)], 2)
    assert next(making)[0] == 2
    making.close()
    assert len([*(tmp_path / "store").glob("shard-*.safetensors")]) <= 3
