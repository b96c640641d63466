"""`eagle31 prepare-data`: one set of arguments gives one store, whoever makes it and however often they are stopped."""

import copy
import json
import multiprocessing
import random
import shutil
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from close import FORWARD, assert_close
from letters import END, build_tokenizer, conversations, maker_of, write_data
from programs import in_two_processes
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from transformers.generation import configuration_utils

from eagle31_hf.cli.parsing import Parser
from eagle31_hf.cli.preparation import add_prepare_data
from eagle31_hf.cli.preparation import prepare_data as command
from eagle31_hf.storage.fingerprints import digest
from eagle31_hf.targets.layers import target_states
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.prepare import Prepared, prepare_data
from eagle31_hf.training.servers import EngineOptions
from eagle31_hf.training.store import HiddenStateStore, load_target_parts, missing_shards

LENGTH, LAYERS = 48, [0, 2, 4]
SAMPLING = {"do_sample": True, "temperature": 2.0}
REGENERATED = {"max_length": LENGTH, "regenerate": True, "max_new_tokens": 10, "generation": SAMPLING, "batch_size": 3}
WITH_STATES = {"states": True, "layer_ids": LAYERS, "records_per_shard": 3}


def prepare(target, tokenizer, data: str, folder, part=(0, 1), progress=None, **options) -> Prepared:
    options = PreparationOptions(**options)
    return prepare_data(target, tokenizer, data, folder, options, part=part, progress=progress)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, make_target) -> str:
    """A target with its tokenizer in a folder."""
    folder = str(tmp_path_factory.mktemp("target"))
    make_target("qwen3", eos_token_id=END).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(saved):
    return AutoModelForCausalLM.from_pretrained(saved).eval()


@pytest.fixture(scope="module")
def tokenizer(saved):
    return AutoTokenizer.from_pretrained(saved)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_data(tmp_path_factory.mktemp("data") / "chats.jsonl", conversations())


@pytest.fixture(scope="module")
def whole(tmp_path_factory, target, tokenizer, data):
    """A store of sampled answers and states that was made in one go."""
    folder = tmp_path_factory.mktemp("whole")
    prepare(target, tokenizer, data, folder, **REGENERATED, **WITH_STATES)
    return folder


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_examples_are_those_of_the_records(tmp_path, target, tokenizer, data):
    prepared = prepare(target, tokenizer, data, tmp_path, max_length=20, records_per_shard=4)
    maker = maker_of(tokenizer, 20)
    expected = []
    for index, record in enumerate(conversations()):
        expected += maker.examples(record, index)
    store = HiddenStateStore(tmp_path)
    assert (prepared.rows, prepared.tokens, prepared.shards, prepared.num_shards) == (
        len(expected),
        sum(store.lengths),
        4,
        4,
    )
    for found, example in zip(store, expected, strict=True):
        assert found.keys() == example.keys()
        assert all(torch.equal(found[name], example[name]) for name in example)


def test_answers_end_where_the_target_ends_them(tmp_path, target, tokenizer):
    target = copy.deepcopy(target)
    target.generation_config.eos_token_id = [6]
    template = "{% for m in messages %}{{ m.content }}{{ 'ga' if m.role == 'assistant' }}{% endfor %}"
    turns = [{"role": "user", "content": "bb"}, {"role": "assistant", "content": "cde"}]
    data = write_data(tmp_path / "data.jsonl", [{"messages": turns}])
    prepare(target, tokenizer, data, tmp_path / "store", max_length=LENGTH, chat_template=template)
    example = HiddenStateStore(tmp_path / "store")[0]
    assert tokenizer.decode(example["input_ids"][example["answers"]]) == "cdeg"


@pytest.mark.parametrize("regenerate", [False, True])
def test_states_are_those_of_each_example_alone(tmp_path, target, tokenizer, data, regenerate):
    options = REGENERATED if regenerate else {"max_length": LENGTH}
    prepare(target, tokenizer, data, tmp_path, **options, **WITH_STATES)
    store = HiddenStateStore(tmp_path)
    assert len(store) >= 14
    for example in store:
        states, logits = target_states(target, example["input_ids"][None], LAYERS)
        said = target.lm_head(example["last_states"]).detach()
        for name, found, expected in (("states", example["states"], states[0]), ("logits", said, logits[0])):
            assert_close(name, found, expected, FORWARD)


def test_stored_parts_say_what_the_target_said(tmp_path, target, tokenizer, data):
    """A final norm applied twice, or never, would show."""
    prepare(target, tokenizer, data, tmp_path, **REGENERATED | {"generation": {"do_sample": False}}, **WITH_STATES)
    parts, scoring = load_target_parts(tmp_path)
    assert scoring == {"scale": 1.0, "cap": None}
    for example in HiddenStateStore(tmp_path):
        predicted = (example["last_states"] @ parts["head"].T).argmax(-1)[:-1]
        answered = example["answers"][1:]
        assert torch.equal(predicted[answered], example["input_ids"][1:][answered])


def test_by_default_states_are_those_drafters_read_in_the_target_s_dtype(tmp_path, make_target, tokenizer, data):
    target = copy.deepcopy(make_target("llama")).bfloat16()
    prepare(target, tokenizer, data, tmp_path, max_length=LENGTH, states=True)
    manifest = HiddenStateStore(tmp_path).manifest
    assert (manifest.layer_ids, manifest.dtype) == ([2, 3, 4], "bfloat16")


def test_states_of_a_shallow_target_are_those_a_new_drafter_reads(make_target):
    target = make_target("qwen3", num_hidden_layers=3)
    found = PreparationOptions(states=True).for_target(target).layer_ids
    assert found == new_drafter(target).config.aux_hidden_state_layer_ids == [1, 3]


@pytest.mark.parametrize("options", [{"max_length": LENGTH}, REGENERATED], ids=["as_they_are", "regenerated"])
def test_templates_are_told_their_options(tmp_path, target, data, options):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ 'gfg' if loud }}" + tokenizer.chat_template
    prepare(target, tokenizer, data, tmp_path / "loud", template_options={"loud": True}, **options)
    prepare(target, tokenizer, data, tmp_path / "still", **options)
    beginnings = [
        {tuple(example["input_ids"][:4].tolist()) for example in HiddenStateStore(tmp_path / name)}
        for name in ("loud", "still")
    ]
    assert {beginning[:3] for beginning in beginnings[0]} == {(6, 5, 6)}
    assert {beginning[0] for beginning in beginnings[1]} == {8}


def test_what_makes_no_example_is_counted(tmp_path, target, tokenizer):
    records = [*conversations(3), {"messages": [{"role": "user", "content": "abc"}]}, {"text": "ab"}, {"messages": []}]
    data = write_data(tmp_path / "data.jsonl", records)
    prepared = prepare(target, tokenizer, data, tmp_path / "store", max_length=LENGTH, records_per_shard=1)
    assert prepared.rows == 3
    assert prepared.skipped == {"no answer": 2, "too short": 1}
    assert prepared.shards == 6


def test_states_that_are_not_finite_are_counted(tmp_path, make_target, tokenizer):
    target = copy.deepcopy(make_target("qwen3", vocab_size=40))
    target.get_input_embeddings().weight.data[30, 0] = float("nan")
    records = [{"input_ids": [1, 2, token, 3, 4], "answers": [1] * 5} for token in (5, 30, 6, 31)]
    data = write_data(tmp_path / "data.jsonl", records)
    prepared = prepare(target, tokenizer, data, tmp_path / "store", max_length=LENGTH, **WITH_STATES)
    assert prepared.skipped == {"states are not finite": 1}
    assert [int(example["input_ids"][2]) for example in HiddenStateStore(tmp_path / "store")] == [5, 6, 31]


@pytest.mark.parametrize("mask", ["answers", "all"])
def test_texts_and_tokens_are_gone_on_with(tmp_path, target, tokenizer, mask):
    tokens = {"input_ids": [1, 2, 3, 4, 5, 6], "answers": [0, 0, 0, 0, 1, 1]}
    data = write_data(tmp_path / "data.jsonl", [{"text": "abcdefgh"}, tokens, *conversations(1)])
    prepare(target, tokenizer, data, tmp_path / "store", mask=mask, **REGENERATED)
    examples = [*HiddenStateStore(tmp_path / "store")]
    *_, text, pretokenized = examples
    assert text["input_ids"][:4].tolist() == [0, 1, 2, 3]
    assert pretokenized["input_ids"][:4].tolist() == [1, 2, 3, 4]
    for example in (text, pretokenized):
        begin = 0 if mask == "all" else 4
        assert example["answers"].tolist() == [i >= begin for i in range(len(example["input_ids"]))]
        assert len(example["input_ids"]) > 5


def test_a_missing_shard_is_made_again_as_it_was(tmp_path, target, tokenizer, data, whole):
    """Samples, too, do not depend on what was sampled before."""
    prepare(target, tokenizer, data, tmp_path, **REGENERATED, **WITH_STATES)
    removed = tmp_path / "shard-00002.safetensors"
    removed.unlink()
    messages = []
    prepare(target, tokenizer, data, tmp_path, **REGENERATED, **WITH_STATES, progress=messages.append)
    assert len([message for message in messages if message.startswith("shard ")]) == 1
    assert contents(tmp_path) == contents(whole)


def test_other_seeds_give_other_answers(tmp_path, target, tokenizer, data, whole):
    prepare(target, tokenizer, data, tmp_path, **REGENERATED, **WITH_STATES, seed=1)
    found, other = HiddenStateStore(tmp_path), HiddenStateStore(whole)
    assert [example["input_ids"].tolist() for example in found] != [example["input_ids"].tolist() for example in other]


def test_one_question_has_another_answer_in_every_shard(tmp_path, target, tokenizer):
    data = write_data(tmp_path / "data.jsonl", [{"text": "abcdefgh"}] * 4)
    prepare(target, tokenizer, data, tmp_path / "store", **REGENERATED, records_per_shard=1)
    assert len({str(example["input_ids"].tolist()) for example in HiddenStateStore(tmp_path / "store")}) > 1


def test_parts_make_the_same_store(tmp_path, target, tokenizer, data, whole):
    for index, expected in ((2, [0, 1, 3, 4]), (0, [1, 4]), (1, [])):
        prepared = prepare(target, tokenizer, data, tmp_path, **REGENERATED, **WITH_STATES, part=(index, 3))
        assert missing_shards(tmp_path) == expected
        assert (prepared.shards, prepared.num_shards) == (5 - len(expected), 5)
    assert contents(tmp_path) == contents(whole)


DIFFERENT = {
    "max_length": 47,
    "max_new_tokens": 11,
    "generation": {"do_sample": False},
    "batch_size": 2,
    "seed": 1,
    "mask": "all",
    "records_per_shard": 4,
    "layer_ids": [1, 2, 3],
    "states": None,
    "regenerate": None,
    "dtype": "fp8",
    "chat_template": "{{ messages }}",
    "template_options": {"loud": True},
}


@pytest.mark.parametrize("option", DIFFERENT)
def test_other_options_need_another_folder(tmp_path, target, tokenizer, data, option):
    options = REGENERATED | WITH_STATES
    prepare(target, tokenizer, data, tmp_path, **options, part=(9, 10))
    dropped = {"states": ("states", "layer_ids"), "regenerate": ("regenerate", "max_new_tokens", "generation")}.get(
        option, ()
    )
    changed = options if dropped else options | {option: DIFFERENT[option]}
    with pytest.raises(ValueError, match=r"manifest.json: .* Name another folder"):
        prepare(
            target, tokenizer, data, tmp_path, **{name: value for name, value in changed.items() if name not in dropped}
        )


def test_other_data_targets_and_tokenizers_need_another_folder(tmp_path, target, tokenizer, data):
    prepare(target, tokenizer, data, tmp_path, max_length=LENGTH)
    with pytest.raises(ValueError, match=r"source.data is"):
        prepare(
            target, tokenizer, write_data(tmp_path / "other.jsonl", conversations()[::-1]), tmp_path, max_length=LENGTH
        )
    trained = copy.deepcopy(target)
    trained.get_output_embeddings().weight.data[0, 0] += 1
    prepare(trained, tokenizer, data, tmp_path, max_length=LENGTH)  # tokens alone are every target's
    prepare(target, tokenizer, data, tmp_path / "states", max_length=LENGTH, states=True, layer_ids=LAYERS)
    with pytest.raises(ValueError, match="revision is"):
        prepare(trained, tokenizer, data, tmp_path / "states", max_length=LENGTH, states=True, layer_ids=LAYERS)
    other = build_tokenizer()
    other.chat_template += " "
    with pytest.raises(ValueError, match="tokenizer is"):
        prepare(target, other, data, tmp_path, max_length=LENGTH)


def test_another_release_of_transformers_goes_on_and_other_settings_do_not(
    tmp_path, target, tokenizer, data, monkeypatch
):
    prepare(target, tokenizer, data, tmp_path, **REGENERATED, part=(9, 10))
    with monkeypatch.context() as other:
        other.setattr(configuration_utils, "__version__", "99.0.0")
        prepare(target, tokenizer, data, tmp_path, **REGENERATED, part=(9, 10))
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["source"]["generation_config"] = digest(target.generation_config.to_json_string(use_diff=False))
    path.write_text(json.dumps(manifest))  # as it was before
    prepare(target, tokenizer, data, tmp_path, **REGENERATED, part=(9, 10))
    penalised = copy.deepcopy(target)
    penalised.generation_config.repetition_penalty = 1.3
    with pytest.raises(ValueError, match=r"source.generation_config is"):
        prepare(penalised, tokenizer, data, tmp_path, **REGENERATED, part=(9, 10))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"part": (2, 2)}, "part is 2/2; expected 0/n to n-1/n"),
        ({"layer_ids": [1, 2, 3]}, "without states; expected neither, or states"),
        ({"dtype": "fp8"}, "without states"),
        ({"states": True, "layer_ids": [1, 2, 9]}, "reach past the target"),
        ({"states": True, "layer_ids": LAYERS, "dtype": "int8"}, "dtype is 'int8'; expected one of float32"),
        (
            {"regenerate": True, "template_augmentation": 0.5},
            "template_augmentation is 0.5; expected 0 with regenerate",
        ),
    ],
)
def test_options_that_do_not_go_together(tmp_path, target, tokenizer, data, options, words):
    with pytest.raises(ValueError, match=words):
        prepare(target, tokenizer, data, tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def _prepare(target, tokenizer, data, folder) -> None:
    prepare(target, tokenizer, data, folder, **REGENERATED, **WITH_STATES)


def _num_shards(folder, suffix: str) -> int:
    return sum(path.name.endswith(suffix) for path in folder.glob("shard-*"))


MOMENTS = {
    "after the first shard": lambda folder: _num_shards(folder, ".safetensors") >= 1,
    "while a shard is written": lambda folder: (
        _num_shards(folder, ".partial") or _num_shards(folder, ".safetensors") >= 4
    ),
    "after the third shard": lambda folder: _num_shards(folder, ".safetensors") >= 3,
}


@pytest.mark.parametrize("seed", range(2))
def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path, target, tokenizer, data, whole, seed):
    """It is killed by SIGKILL, of which no process hears."""
    context = multiprocessing.get_context("fork")
    draw = random.Random(seed)
    kills = 0
    for moment in (*MOMENTS.values(), None):
        delay, start = draw.uniform(0, 0.4), time.monotonic()
        reached = moment or (lambda folder, delay=delay, start=start: time.monotonic() - start > delay)
        process = context.Process(target=_prepare, args=(target, tokenizer, data, tmp_path))
        process.start()
        while process.is_alive() and not reached(tmp_path):
            pass
        process.kill()  # unless it has ended
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills >= 2
    (tmp_path / "shard-00004.safetensors").unlink(missing_ok=True)
    for index in (0, 4):  # one that is finished, one that is not
        (tmp_path / f"shard-{index:05d}.safetensors.00ff.partial").write_bytes(b"half")
    assert 4 in missing_shards(tmp_path)
    _prepare(target, tokenizer, data, tmp_path)
    assert {
        name: value for name, value in contents(tmp_path).items() if not name.startswith("manifest.json.")
    } == contents(whole)


def run(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    parser = Parser()
    add_prepare_data(parser)
    parser.set_defaults(out=sys.stdout)
    return command(parser.parse_args(arguments))


def arguments(saved: str, data: str, folder) -> list[str]:
    options = "--regenerate --states --max-length 48 --max-new-tokens 10 --temperature 2 --batch-size 3"
    options += " --records-per-shard 3 --layers 0 2 4"
    return ["--target", saved, "--data", data, "--output", str(folder), *options.split()]


def test_two_processes_at_once_make_the_same_store(tmp_path, saved, data, whole):
    parts = [[*arguments(saved, data, tmp_path), "--part", f"{index}/2"] for index in range(2)]
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        assert [*pool.map(run, parts)] == [0, 0]
    assert contents(tmp_path) == contents(whole)


def test_the_command_prints_what_was_made(tmp_path, saved, data, whole, capsys):
    assert run([*arguments(saved, data, tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert set(report) == {"folder", "rows", "tokens", "skipped", "shards", "num_shards"}
    assert report["rows"] == len(HiddenStateStore(whole))
    assert "shard 5 of 5: " in err
    assert contents(tmp_path) == contents(whole)
    assert run(arguments(saved, data, tmp_path)) == 0
    assert "5 of 5 shards\nrows     " in capsys.readouterr().out


def test_the_command_without_regeneration(tmp_path, saved, target, tokenizer, data, capsys):
    """The target's weights are not there."""
    bare = shutil.copytree(saved, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ 'g' if loud }}{% for m in messages %}h{{ m.content }}{{ 'k' if m.role == 'assistant' }}{% endfor %}"
    )
    places = ["--target", str(bare), "--data", data, "--output", str(tmp_path / "store")]
    plain = [*places, "--chat-template", str(template)]
    assert run(plain) == 0
    prepare(target, tokenizer, data, tmp_path / "store", chat_template=template.read_text())  # it is the same store
    assert HiddenStateStore(tmp_path / "store")[0]["input_ids"][0] == 7
    assert run([*plain, "--output", str(tmp_path / "loud"), "--template-option", "loud=true"]) == 0
    assert HiddenStateStore(tmp_path / "loud")[0]["input_ids"][:2].tolist() == [6, 7]
    for option in (["--temperature", "0"], ["--top-k", "3"], ["--max-new-tokens", "5"]):
        with pytest.raises(ValueError, match="expected --regenerate too"):
            run([*plain, *option])


@pytest.mark.parametrize("text", ["2/2", "1", "a/b", "-1/2", "1/"])
def test_parts_that_are_none(text):
    with pytest.raises(ValueError, match="expected I/N with I from 0 to N - 1"):
        run(["--target", "t", "--data", "d", "--output", "o", f"--part={text}"])


SPREAD = {"by tensor parallelism": {"tp_plan": "auto"}, "as it is loaded in parts": {"fsdp_size": 2}}
EVEN = 98  # 5.17 splits no other vocabulary
GREEDY = REGENERATED | WITH_STATES | {"generation": {"do_sample": False}}


def prepare_together(saved: str, data: str, folder: Path, spread: dict[str, Any]) -> None:
    """By each of two processes: makes a store, stopped after its first shard, with its part of every weight."""
    target = AutoModelForCausalLM.from_pretrained(saved, distributed_config=DistributedConfig(**spread)).eval()
    tokenizer, said = AutoTokenizer.from_pretrained(saved), []
    with pytest.raises(ValueError, match="expected no part"):
        prepare(target, tokenizer, data, folder / "part", part=(0, 2), **GREEDY)
    with pytest.raises(ValueError, match="an engine answers, and the target is spread"):
        prepare(target, tokenizer, data, folder / "part", engine=EngineOptions(("http://localhost:1",)), **GREEDY)
    made = prepare(target, tokenizer, data, folder / "store", progress=said.append, **GREEDY)
    assert [line.startswith("shard") for line in said].count(True) == (made.num_shards if dist.get_rank() == 0 else 0)
    if dist.get_rank() == 0:
        next((folder / "store").glob("shard-*1.safetensors")).unlink()
    dist.barrier()
    again = prepare(target, tokenizer, data, folder / "store", progress=said.append, **GREEDY)
    assert asdict(again) == asdict(made)


@pytest.mark.parametrize("how", SPREAD)
def test_processes_that_hold_a_part_of_every_weight_make_a_store_together(make_target, tokenizer, data, tmp_path, how):
    """That of the whole target: the same tokens, its states, and the ends of the target whole."""
    target = make_target("qwen3", eos_token_id=END, num_attention_heads=4, num_key_value_heads=2, vocab_size=EVEN)
    saved = str(tmp_path / "target")
    target.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    in_two_processes(tmp_path, prepare_together, saved, data, tmp_path, SPREAD[how])
    prepare(AutoModelForCausalLM.from_pretrained(saved).eval(), tokenizer, data, tmp_path / "whole", **GREEDY)
    found, expected = (HiddenStateStore(tmp_path / name) for name in ("store", "whole"))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one["input_ids"].tolist() == other["input_ids"].tolist()
        for name in ("states", "last_states"):
            assert_close(name, one[name], other[name], FORWARD)
    ends, expected_ends = load_target_parts(tmp_path / "store"), load_target_parts(tmp_path / "whole")
    assert_close("ends", *([ends[0][name] for name in sorted(ends[0])] for ends in (ends, expected_ends)))
    assert not list(tmp_path.glob("store/*.partial"))
