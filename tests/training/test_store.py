"""Stores of examples: what is read is what was written, and what was not wholly written is not there."""

import copy
import errno
import json
import multiprocessing
import pickle
import resource
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from programs import forked
from torch.utils.data import DataLoader

from eagle31_hf.training.store import (
    NOT_FINITE,
    TARGET_PARTS,
    HiddenStateStore,
    Manifest,
    load_target_parts,
    missing_shards,
    open_store,
    save_target_parts,
    shard_path,
    write_shard,
)

WIDTH, LAYERS = 5, [1, 2, 4]
TOKENS_ONLY = Manifest(
    "me/target", "weights", "tokenizer", {"data": "hash", "max_length": 9}, WIDTH, num_records=10, records_per_shard=3
)
MANIFEST = replace(TOKENS_ONLY, layer_ids=LAYERS, dtype="float32")
EXACT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8_STEP = 2.0**-4  # of a value: three bits of mantissa, rounded
BF16_STEP = 2.0**-9


def examples(lengths: list[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for n in lengths:
        states = torch.randn(n, len(LAYERS), WIDTH, generator=generator) * torch.tensor([0.01, 1.0, 900.0])[:, None]
        last = torch.randn(n, WIDTH, generator=generator)
        ids = torch.randint(0, 150_000, (n,), generator=generator)
        made.append(
            {
                "input_ids": ids,
                "answers": ids % 2 == 0,
                "states": states.flatten(1).to(dtype),
                "last_states": last.to(dtype),
            }
        )
    return made


def fill(folder, manifest: Manifest = MANIFEST, shards=((4, 1, 7), (), (2, 3), (5,)), **options) -> list[dict]:
    """A store of these shards of examples of these lengths; its examples."""
    open_store(folder, manifest)
    written = [examples([*lengths], seed, **options) for seed, lengths in enumerate(shards)]
    for index, made in enumerate(written):
        write_shard(folder, index, made, Counter({"too short": index}))
    return [example for made in written for example in made]


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", EXACT)
def test_examples_are_read_as_they_were_written(tmp_path, dtype):
    expected = fill(tmp_path, replace(MANIFEST, dtype=dtype), dtype=EXACT[dtype])
    store = HiddenStateStore(tmp_path)
    assert len(store) == len(expected) == 6
    assert store.lengths == [4, 1, 7, 2, 3, 5]
    assert store.skipped == Counter({"too short": 6})
    for i in (5, 0, 3, 2, 4, 1, -1):
        assert_same(store[i], expected[i])
    with pytest.raises(IndexError):
        store[6]


def test_tokens_alone(tmp_path):
    expected = fill(tmp_path, TOKENS_ONLY)
    store = HiddenStateStore(tmp_path)
    for found, example in zip(store, expected, strict=True):
        assert_same(found, {name: example[name] for name in ("input_ids", "answers")})


def test_only_the_example_is_held(tmp_path):
    """The shard that it is a part of would be sent along between processes."""
    fill(tmp_path)
    for value in HiddenStateStore(tmp_path)[0].values():
        assert value.untyped_storage().nbytes() == value.nbytes


def test_fp8_rounds_within_a_step_of_each_value_or_of_its_state(tmp_path):
    """Three states differ much in size: each has a scale of its own."""
    expected = fill(tmp_path, replace(MANIFEST, dtype="fp8"))
    for found, example in zip(HiddenStateStore(tmp_path), expected, strict=True):
        assert found["states"].dtype == found["last_states"].dtype == torch.bfloat16
        assert torch.equal(found["last_states"], example["last_states"].bfloat16())
        values = example["states"].unflatten(-1, (len(LAYERS), WIDTH))
        smallest = values.abs().amax(-1, keepdim=True) / 448 * 2.0**-10  # half of the least fp8 holds
        bound = values.abs() * (FP8_STEP + 2 * BF16_STEP) + smallest
        assert ((found["states"].float().unflatten(-1, (len(LAYERS), WIDTH)) - values).abs() <= bound).all()


def test_fp8_of_a_state_of_zeros(tmp_path):
    open_store(tmp_path, replace(MANIFEST, dtype="fp8", num_records=1))
    (example,) = examples([3])
    example["states"][1] = 0
    write_shard(tmp_path, 0, [example], {})
    assert (HiddenStateStore(tmp_path)[0]["states"][1] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8"])
@pytest.mark.parametrize("name", ["states", "last_states"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_counted_and_left_out(tmp_path, dtype, name, value):
    open_store(tmp_path, replace(MANIFEST, dtype=dtype, num_records=3))
    made = examples([4, 6, 5])
    made[1][name][3, 2] = value
    skipped = Counter({"too short": 2})
    write_shard(tmp_path, 0, made, skipped)
    store = HiddenStateStore(tmp_path)
    assert store.lengths == [4, 5]
    assert torch.equal(store[1]["input_ids"], made[2]["input_ids"])
    assert store.skipped == {"too short": 2, NOT_FINITE: 1}
    assert skipped == {"too short": 2}


def test_states_too_large_for_fp16_are_not_finite(tmp_path):
    open_store(tmp_path, replace(MANIFEST, dtype="float16", num_records=1))
    (example,) = examples([3])
    example["states"][0, 0] = 1e5
    write_shard(tmp_path, 0, [example], {})
    assert HiddenStateStore(tmp_path).skipped == {NOT_FINITE: 1}


def test_states_of_another_width_are_refused(tmp_path):
    open_store(tmp_path, MANIFEST)
    (example,) = examples([3])
    example["states"] = example["states"][:, :-1]
    with pytest.raises(ValueError, match=r"states of a row has shape \(3, 14\); expected \(3, 15\)"):
        write_shard(tmp_path, 0, [example], {})
    assert missing_shards(tmp_path) == [0, 1, 2, 3]


def test_workers_of_a_loader_read_the_same(tmp_path):
    expected = fill(tmp_path)
    store = HiddenStateStore(tmp_path)
    store[0]
    loader = DataLoader(store, batch_size=None, num_workers=2, multiprocessing_context="fork")
    for found, example in zip(loader, expected, strict=True):
        assert_same(found, example)


def test_pickled_while_files_are_open(tmp_path):
    expected = fill(tmp_path)
    store = HiddenStateStore(tmp_path)
    store[0]
    assert_same(pickle.loads(pickle.dumps(store))[2], expected[2])


DIFFERENT = {
    "revision": "other weights",
    "tokenizer": "other",
    "target_hidden_size": 6,
    "num_records": 11,
    "records_per_shard": 4,
    "layer_ids": [1, 2, 3],
    "dtype": "fp8",
}
ELSEWHERE = {"target": "/moved/target", "commit": "abc"}


@pytest.mark.parametrize("field", DIFFERENT)
def test_a_store_of_something_else_is_refused(tmp_path, field):
    open_store(tmp_path, MANIFEST)
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match=rf"manifest.json: {field} is .*, expected .*Name another folder") as error:
        open_store(tmp_path, replace(MANIFEST, **{field: DIFFERENT[field]}))
    assert f"{field} is {getattr(MANIFEST, field)!r}, expected {DIFFERENT[field]!r}" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert (tmp_path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"data": "other", "max_length": 9}, "source.data is 'hash', expected 'other'"),
        ({"data": "hash", "max_length": 10}, "source.max_length is 9, expected 10"),
        ({"data": "hash"}, "source.max_length is 9, expected None"),
        ({"data": "hash", "max_length": 9, "mask": "all"}, "source.mask is None, expected 'all'"),
    ],
)
def test_a_store_made_in_another_way_is_refused(tmp_path, source, words):
    open_store(tmp_path, MANIFEST)
    with pytest.raises(ValueError, match=words):
        open_store(tmp_path, replace(MANIFEST, source=source))


def test_every_field_of_the_manifest_was_tried():
    assert {*DIFFERENT, *ELSEWHERE, "source"} == set(vars(MANIFEST))


def test_the_same_manifest_opens_the_store_again(tmp_path):
    fill(tmp_path / "new" / "store")
    open_store(tmp_path / "new" / "store", MANIFEST)
    assert missing_shards(tmp_path / "new" / "store") == []


def test_the_same_target_from_elsewhere_opens_the_store_again(tmp_path):
    open_store(tmp_path, MANIFEST)
    before = (tmp_path / "manifest.json").read_bytes()
    open_store(tmp_path, replace(MANIFEST, **ELSEWHERE))
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_a_folder_without_hard_links(tmp_path, monkeypatch):
    def link(source, destination):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", link)
    for _ in range(2):
        open_store(tmp_path, MANIFEST)
    with pytest.raises(ValueError, match="num_records is"):
        open_store(tmp_path, replace(MANIFEST, num_records=11))
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def _open(folder, number, barrier, results) -> None:
    barrier.wait()
    try:
        open_store(folder, replace(MANIFEST, revision=f"weights-{number % 2}"))
        results.put(number % 2)
    except ValueError as error:
        results.put(str(error))


def test_one_of_many_that_open_at_once_decides(tmp_path):
    context = multiprocessing.get_context("fork")
    for attempt in range(3):
        barrier = context.Barrier(6)
        results = context.Queue()
        folder = tmp_path / str(attempt)
        processes = [context.Process(target=_open, args=(folder, number, barrier, results)) for number in range(6)]
        for process in processes:
            process.start()
        found = [results.get(timeout=60) for _ in processes]
        for process in processes:
            process.join()
        winner = int(json.loads((folder / "manifest.json").read_text())["revision"][-1])
        assert found.count(winner) == 3
        assert sum("revision is" in str(answer) for answer in found) == 3
        assert [path.name for path in folder.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("fields", "words"), [({"dtype": None}, "expected both"), ({"dtype": "int8"}, "expected one of float32")]
)
def test_manifests_that_make_no_sense(fields, words):
    with pytest.raises(ValueError, match=words):
        replace(MANIFEST, **fields)


def test_an_incomplete_store_says_so(tmp_path):
    fill(tmp_path)
    shard_path(tmp_path, 0).unlink()
    assert missing_shards(tmp_path) == [0]
    with pytest.raises(ValueError, match=r"holds 3 of 4 shards; expected all. Run the same prepare-data command again"):
        HiddenStateStore(tmp_path)
    assert HiddenStateStore(tmp_path, allow_partial=True).lengths == [2, 3, 5]


def test_a_folder_without_a_store(tmp_path):
    with pytest.raises(ValueError, match=r"holds no manifest.json; expected a folder that prepare-data has made"):
        HiddenStateStore(tmp_path)
    (tmp_path / "manifest.json").write_text('{"target": "me/target"}')
    with pytest.raises(ValueError, match="other fields than this version writes"):
        HiddenStateStore(tmp_path)


def test_every_byte_counts(tmp_path):
    fill(tmp_path, TOKENS_ONLY, shards=((2,), (), (), ()))
    path = shard_path(tmp_path, 0)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(
            ValueError, match=r"shard-00000.safetensors: is damaged .*Delete it and run the command that made it again"
        ):
            HiddenStateStore(tmp_path)[0]


def test_other_shards_of_a_damaged_store_are_read(tmp_path):
    expected = fill(tmp_path)
    path = shard_path(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    store = HiddenStateStore(tmp_path)
    assert_same(store[0], expected[0])
    assert_same(HiddenStateStore(tmp_path, verify=False)[0], expected[0])
    assert HiddenStateStore(tmp_path, verify=False)[4]["input_ids"].shape == (3,)


def test_a_shortened_shard_is_damaged(tmp_path):
    fill(tmp_path)
    path = shard_path(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"shard-00002.safetensors: is damaged"):
        HiddenStateStore(tmp_path)


def test_what_a_killed_writer_left_is_not_a_shard_and_goes_when_it_is_written(tmp_path):
    open_store(tmp_path, MANIFEST)
    leftovers = [tmp_path / f"shard-0000{index}.safetensors.0abc.partial" for index in (0, 1)]
    for leftover in leftovers:
        leftover.write_bytes(b"half")
    assert missing_shards(tmp_path) == [0, 1, 2, 3]
    write_shard(tmp_path, 0, examples([3]), {})
    assert [leftover.exists() for leftover in leftovers] == [False, True]
    assert missing_shards(tmp_path) == [1, 2, 3]


def test_a_store_that_goes_on_loses_the_leftovers_of_finished_shards_alone(tmp_path):
    fill(tmp_path)
    shard_path(tmp_path, 1).unlink()
    (tmp_path / TARGET_PARTS).write_bytes(b"whole")  # which another process may be writing anew
    names = (shard_path(tmp_path, 0).name, shard_path(tmp_path, 1).name, TARGET_PARTS)
    leftovers = [tmp_path / f"{name}.0abc.partial" for name in names]
    for leftover in leftovers:
        leftover.write_bytes(b"half")
    open_store(tmp_path, MANIFEST)
    assert [leftover.exists() for leftover in leftovers] == [False, True, True]


def _write_again_and_again(folder, made) -> None:
    while True:
        write_shard(folder, 0, made, {})


def _size_of_partial(folder) -> int:
    """Returns the bytes written of a file that is not finished, -1 where there is none."""
    for path in folder.glob("*.partial"):
        with suppress(FileNotFoundError):
            return path.stat().st_size
    return -1


def test_a_writer_killed_at_any_moment_leaves_a_whole_shard_or_none(tmp_path):
    """The writer is killed as soon as so much of a file is written; on a busy machine the news may come late, so more
    often than would be needed."""
    open_store(tmp_path, replace(MANIFEST, num_records=1))
    made = examples([200_000, 1])
    halves = 0
    tries = 0
    write_shard(tmp_path, 0, made, {})
    whole = shard_path(tmp_path, 0).stat().st_size
    shard_path(tmp_path, 0).unlink()
    while tries < 8 or (not halves and tries < 100):
        process = multiprocessing.get_context("fork").Process(target=_write_again_and_again, args=(tmp_path, made))
        process.start()
        until = time.monotonic() + 2
        while time.monotonic() < until and _size_of_partial(tmp_path) < tries % 8 * whole // 8:
            pass
        process.kill()
        process.join()
        tries += 1
        left = [path.name for path in tmp_path.iterdir() if path.suffix == ".partial"]
        assert len(left) <= 1
        halves += len(left)
        for name in left:
            (tmp_path / name).unlink()
        if not missing_shards(tmp_path):
            assert torch.equal(HiddenStateStore(tmp_path)[0]["states"], made[0]["states"])
    assert halves >= 1


def _fill(folder: Path) -> None:
    """A limit on the size of files, which a write runs into half way."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
    write_shard(folder, 2, examples([50, 60]), {})


def test_a_full_disk(tmp_path):
    open_store(tmp_path, MANIFEST)
    write_shard(tmp_path, 0, examples([3]), {})
    with pytest.raises(OSError, match=r"could not be written \(File too large\)") as caught:
        forked(_fill, tmp_path)
    assert caught.value.filename == str(tmp_path / "shard-00002.safetensors")
    assert "run the same command again: finished files are kept" in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", "shard-00000.safetensors"}
    assert missing_shards(tmp_path) == [1, 2, 3]


def test_one_set_of_examples_has_one_file(tmp_path):
    """The file is the same whoever writes it, and whichever way the tensors lie in memory."""
    made = examples([4, 7])
    for name, written in (
        ("a", made),
        ("b", [{key: value.t().contiguous().t() for key, value in example.items()} for example in made]),
    ):
        open_store(tmp_path / name, MANIFEST)
        write_shard(tmp_path / name, 0, written, {"b": 1, "a": 2})
    assert shard_path(tmp_path / "a", 0).read_bytes() == shard_path(tmp_path / "b", 0).read_bytes()


def test_a_store_is_checked_against_what_is_trained_with(tmp_path):
    fill(tmp_path)
    store = HiddenStateStore(tmp_path)
    store.check("tokenizer")
    with pytest.raises(ValueError, match="tokenizer is 'tokenizer', expected 'other'"):
        store.check("other")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_the_target(tmp_path, make_target, tied, dtype):
    target = copy.deepcopy(make_target("llama", tie_word_embeddings=tied)).to(dtype)
    save_target_parts(tmp_path, target, {"scale": 0.5, "cap": None})
    parts, scoring = load_target_parts(tmp_path)
    assert scoring == {"scale": 0.5, "cap": None}
    assert parts.keys() == {"embedding", "head"}
    assert torch.equal(parts["embedding"], target.get_input_embeddings().weight)
    assert torch.equal(parts["head"], target.get_output_embeddings().weight)
    assert (parts["head"] is parts["embedding"]) == tied


def test_parts_of_a_target_with_a_bias(tmp_path, make_target):
    target = copy.deepcopy(make_target("llama"))
    target.lm_head = torch.nn.Linear(target.lm_head.in_features, target.lm_head.out_features)
    save_target_parts(tmp_path, target, {})
    assert torch.equal(load_target_parts(tmp_path)[0]["head_bias"], target.lm_head.bias)
    path = tmp_path / "target.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"target.safetensors: is damaged"):
        load_target_parts(tmp_path)


def test_weights_that_are_elsewhere_are_refused(tmp_path, make_target):
    whole = make_target()  # outside: it is made when first asked for, and kept
    with torch.device("meta"):
        target = type(whole)(whole.config)
    with pytest.raises(ValueError, match=r"embedding is torch.float32 on meta; expected it loaded"):
        save_target_parts(tmp_path, target, {})
