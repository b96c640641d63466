"""Conversion into a folder and in place: the same bytes, nothing lost if the process dies, nothing written when
refused."""

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from close import assert_close
from folders import SPECFORGE, WEIGHTS, assert_loads, contents
from kill_points import left_behind
from programs import forked
from safetensors.torch import load_file, save
from writers import LAYOUTS, write_weights

from eagle31_hf import Eagle31DrafterModel, convert_checkpoint
from eagle31_hf.checkpoints import read_checkpoint


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_ino) for p in sorted(folder.rglob("*"))}


# What comes out.


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_converting_and_saving_write_the_same_bytes(layout, tmp_path):
    source, converted, saved = tmp_path / "source", tmp_path / "converted", tmp_path / "saved"
    drafter = layout.write(source)
    before = contents(source)
    checkpoint = convert_checkpoint(source, converted, **layout.options)
    assert contents(source) == before
    assert checkpoint.is_native
    assert checkpoint.folder == converted
    assert_loads(converted, drafter)
    Eagle31DrafterModel.from_pretrained(source, **layout.options).save_pretrained(saved)
    for name in ("config.json", WEIGHTS):
        assert (converted / name).read_bytes() == (saved / name).read_bytes()


@pytest.mark.parametrize("name", LAYOUTS)
def test_in_place_is_the_same_with_the_originals_beside(name, tmp_path):
    layout, folder = replace(LAYOUTS[name], subfolder=""), tmp_path / "drafter"
    drafter = layout.write(folder)
    before = contents(folder)
    convert_checkpoint(folder, tmp_path / "elsewhere", **layout.options)
    checkpoint = convert_checkpoint(folder, **layout.options)
    assert checkpoint.is_native
    assert_loads(folder, drafter)
    if name == "native":
        assert contents(folder) == before
        return
    for file in ("config.json", WEIGHTS):
        assert (folder / file).read_bytes() == (tmp_path / "elsewhere" / file).read_bytes()
    after = contents(folder)
    side_files = {name for name in before if name.endswith(".pt")}
    assert set(after) == {"config.json", WEIGHTS, "original/conversion.json"} | side_files | {
        f"original/{n}" for n in before.keys() - side_files
    }
    assert {name: after[name if name in side_files else f"original/{name}"] for name in before} == before


def test_the_original_can_be_put_back(tmp_path):
    drafter = SPECFORGE.write(tmp_path)
    before = contents(tmp_path)
    convert_checkpoint(tmp_path)
    (tmp_path / "original" / "conversion.json").unlink()
    for path in (tmp_path / "original").iterdir():
        path.replace(tmp_path / path.name)
    (tmp_path / "original").rmdir()
    assert contents(tmp_path) == before
    assert_loads(tmp_path, drafter)


def test_the_record_says_what_was_done(tmp_path):
    SPECFORGE.write(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "converted")
    record = json.loads((tmp_path / "converted" / "conversion.json").read_text())
    assert (record["source"], record["format"]) == (str(tmp_path / "source"), "SpecForge")
    assert record["renamed"]["midlayer.hidden_norm.weight"] == "layers.0.hidden_norm.weight"
    assert any("[1, 46, 90] are output ids" in reason for reason in record["reasons"])


def test_knobs_are_copied_from_a_native_checkpoint_only(tmp_path):
    for name in ("native", "specforge"):
        LAYOUTS[name].write(tmp_path / name)
        (tmp_path / name / "generation_config.json").write_text('{"num_assistant_tokens": 9}')
        convert_checkpoint(tmp_path / name, tmp_path / f"{name}-converted")
    assert (
        Eagle31DrafterModel.from_pretrained(tmp_path / "native-converted").generation_config.num_assistant_tokens == 9
    )
    assert not (tmp_path / "specforge-converted" / "generation_config.json").exists()


@pytest.mark.parametrize("discard", [False, True])
def test_another_librarys_generation_config_does_not_count_after_a_conversion_in_place_either(discard, tmp_path):
    SPECFORGE.write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"num_assistant_tokens": 20}')
    convert_checkpoint(tmp_path, discard_original=discard)
    assert Eagle31DrafterModel.from_pretrained(tmp_path).generation_config.num_assistant_tokens == "auto"
    assert ("original/generation_config.json" in contents(tmp_path)) is not discard


def test_each_tensor_keeps_its_dtype(tmp_path):
    SPECFORGE.write(tmp_path / "source")
    layout = replace(
        SPECFORGE,
        extra={"norm.weight": torch.ones(20, dtype=torch.float32), "lm_head.weight": torch.ones(37, 20).half()},
    )
    layout.write(tmp_path / "source")
    checkpoint = convert_checkpoint(tmp_path / "source", tmp_path / "converted")
    dtypes = {name: stored.dtype for name, stored in checkpoint.tensors.items()}
    assert (dtypes["norm.weight"], dtypes["lm_head.weight"], dtypes["fc.weight"]) == ("F32", "F16", "BF16")
    written = tmp_path / "converted" / WEIGHTS
    assert written.read_bytes() == save(load_file(written), {"format": "pt"})  # in safetensors' own order


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_largest_and_smallest_numbers_are_finite(dtype, tmp_path):
    limits = torch.finfo(dtype)
    row = torch.tensor([limits.max, limits.min, limits.tiny, limits.smallest_normal / 2, -0.0], dtype=dtype).repeat(4)
    drafter = replace(SPECFORGE, extra={"norm.weight": row}).write(tmp_path / "source")
    checkpoint = convert_checkpoint(tmp_path / "source", tmp_path / "converted")
    assert_close("norm", load_file(tmp_path / "converted" / WEIGHTS)["norm.weight"], row)
    assert checkpoint.tensors.keys() == drafter.state_dict().keys()


# Again, and away with the originals.


@pytest.mark.parametrize("name", ["specforge", "original_release", "speculators", "native"])
def test_a_second_run_does_nothing(name, tmp_path):
    layout = LAYOUTS[name]
    layout.write(tmp_path)
    convert_checkpoint(tmp_path, **layout.options)
    before, files = stamps(tmp_path), contents(tmp_path)
    convert_checkpoint(tmp_path, **layout.options)
    convert_checkpoint(tmp_path)
    assert contents(tmp_path) == files
    assert stamps(tmp_path) == before


@pytest.mark.parametrize("calls", ["at_once", "afterwards"])
@pytest.mark.parametrize("name", ["specforge", "original_release", "stray_buffers"])
def test_originals_are_discarded_when_asked(name, calls, tmp_path):
    drafter = LAYOUTS[name].write(tmp_path)
    if calls == "afterwards":
        convert_checkpoint(tmp_path)
    convert_checkpoint(tmp_path, discard_original=True)
    assert set(contents(tmp_path)) == {"config.json", WEIGHTS}
    assert_loads(tmp_path, drafter)
    files = contents(tmp_path)
    convert_checkpoint(tmp_path, discard_original=True)
    assert contents(tmp_path) == files


def test_what_is_not_ours_in_original_stays(tmp_path):
    SPECFORGE.write(tmp_path)
    convert_checkpoint(tmp_path)
    (tmp_path / "original" / "notes.txt").write_text("mine")
    convert_checkpoint(tmp_path, discard_original=True)
    assert set(contents(tmp_path)) == {"config.json", WEIGHTS, "original/notes.txt"}


@pytest.mark.parametrize("name", ["../victim.txt", "absolute", "sub/../../victim.txt"])
def test_a_record_cannot_name_files_outside(name, tmp_path):
    folder, victim = tmp_path / "drafter", tmp_path / "victim.txt"
    LAYOUTS["native"].write(folder)
    victim.write_text("mine")
    (folder / "original" / "sub").mkdir(parents=True)
    listed = [str(victim) if name == "absolute" else f"../{name}"]
    (folder / "original" / "conversion.json").write_text(json.dumps({"weight_files": listed}))
    with pytest.raises(ValueError, match=r"conversion\.json.*expected"):
        convert_checkpoint(folder, discard_original=True)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    "record", [{}, {"weight_files": 3}, {"weight_files": [3]}, {"weight_files": [""]}, []], ids=str
)
def test_a_record_that_is_none_of_ours_is_refused(record, tmp_path):
    LAYOUTS["native"].write(tmp_path)
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "conversion.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"conversion\.json.*expected|expected.*conversion\.json"):
        convert_checkpoint(tmp_path, discard_original=True)


# Refused, and nothing written.


def refused(source: Path, destination: Path | None, match: str, error=ValueError, **options) -> None:
    root = source.parent
    before = contents(root)
    with pytest.raises(error, match=match):
        convert_checkpoint(source, destination, **options)
    assert contents(root) == before


def test_a_destination_that_is_not_empty(tmp_path):
    SPECFORGE.write(tmp_path / "source")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    refused(tmp_path / "source", tmp_path / "there", "is there already; expected a folder that is new or empty")
    refused(tmp_path / "source", tmp_path / "there" / "file", "is there already")
    refused(tmp_path / "source", tmp_path / "source", "is there already")


def test_an_empty_destination_is_filled(tmp_path):
    drafter = SPECFORGE.write(tmp_path / "source")
    (tmp_path / "there").mkdir()
    convert_checkpoint(tmp_path / "source", tmp_path / "there")
    assert_loads(tmp_path / "there", drafter)


def test_the_original_of_an_earlier_conversion(tmp_path):
    folder = tmp_path / "drafter"
    SPECFORGE.write(folder)
    convert_checkpoint(folder)
    for path in ("model.safetensors", "config.json"):
        shutil.copyfile(folder / "original" / path, folder / path)
    refused(folder, None, "of an earlier conversion maybe; nothing was changed. Move it away")
    refused(folder, None, "of an earlier conversion maybe", discard_original=True)


def test_a_config_of_somebody_elses_in_original_is_kept(tmp_path):
    SPECFORGE.write(tmp_path / "drafter")
    (tmp_path / "drafter" / "original").mkdir()
    (tmp_path / "drafter" / "original" / "config.json").write_text("mine")
    refused(tmp_path / "drafter", None, r"holds \['config.json'\], of an earlier conversion maybe; nothing was changed")


def test_weights_in_a_subfolder(tmp_path):
    LAYOUTS["nemo"].write(tmp_path / "drafter")
    refused(
        tmp_path / "drafter",
        None,
        "its weights are in .*model/consolidated; convert that folder, or name a destination",
    )


@pytest.mark.parametrize("destination", ["here", "elsewhere"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("file", [WEIGHTS, "pytorch_model.bin"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_that_are_not_finite(dtype, file, value, destination, tmp_path):
    weight = torch.ones(37, 20, dtype=dtype)
    weight[36, 19] = value
    replace(SPECFORGE, file=file, extra={"lm_head.weight": weight}).write(tmp_path / "drafter")
    elsewhere = None if destination == "here" else tmp_path / "elsewhere"
    refused(tmp_path / "drafter", elsewhere, "lm_head.weight holds NaN or infinite values")


@pytest.mark.parametrize("options", [{"norm_outptu": True}, {"dtype": "float16"}, {"discard": True}], ids=str)
@pytest.mark.parametrize("destination", ["here", "elsewhere"])
def test_an_option_nobody_knows(options, destination, tmp_path):
    SPECFORGE.write(tmp_path / "drafter")
    elsewhere = None if destination == "here" else tmp_path / "elsewhere"
    refused(
        tmp_path / "drafter", elsewhere, f"got .*{next(iter(options))}.*expected fields of Eagle31Config", **options
    )


def test_what_is_no_folder_cannot_be_converted_in_place(tmp_path):
    SPECFORGE.write(tmp_path / "drafter")
    with pytest.raises(ValueError, match="is no local folder, so it cannot be converted in place; name a destination"):
        convert_checkpoint("owner/name")
    refused(tmp_path / "drafter" / "config.json", None, "is a file; expected the folder", OSError)
    refused(tmp_path / "draft", None, "there is no such folder", OSError)
    with pytest.raises(ValueError, match=r"discard_original .* expected no destination"):
        convert_checkpoint(tmp_path / "drafter", tmp_path / "other", discard_original=True)


def test_an_empty_folder(tmp_path):
    (tmp_path / "drafter").mkdir()
    refused(tmp_path / "drafter", None, "holds no config.json", OSError)


def test_links_are_not_moved(tmp_path):
    """The Hub's cache keeps relative links, which would point nowhere from original/."""
    SPECFORGE.write(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for name in (WEIGHTS, "config.json"):
        (tmp_path / "snapshot" / name).symlink_to(Path("..", "blobs", name))
    refused(tmp_path / "snapshot", None, "is a link; name a destination")
    convert_checkpoint(tmp_path / "snapshot", tmp_path / "converted")


# Killed at any moment.

KILLED = {
    "bin": LAYOUTS["original_release"],
    "safetensors": LAYOUTS["modelopt"],
    "sharded": replace(LAYOUTS["nemo"], subfolder=""),
    "native_with_another_field": replace(LAYOUTS["native"], options={"logit_scale": 0.5}),
}


def is_new(folder: Path, layout) -> bool:
    config = json.loads((folder / "config.json").read_text())
    return config["model_type"] == "eagle31" and (
        layout is not KILLED["native_with_another_field"] or config.get("logit_scale") == 0.5
    )


def state_of(folder: Path) -> frozenset:
    """The folder's files, whose temporary names do not matter."""
    return frozenset((re.sub(r"/tmp\w+/", "/", name), data) for name, data in contents(folder).items())


def of_each_state(copies: list[Path]) -> list[Path]:
    """Returns the first of the copies that are alike."""
    return list({state_of(copy): copy for copy in reversed(copies)}.values())[::-1]


def put_back(copy: Path, folder: Path) -> None:
    """Puts a copy in the folder's place, which the record of a conversion names."""
    shutil.rmtree(folder)
    copy.rename(folder)


def assert_old_or_new(folder: Path, layout, before: dict[str, bytes], discard: bool) -> None:
    """Asserts that every file is as it was, or that the new checkpoint is read and every old file lies somewhere.

    With `discard` the old files may be gone.
    """
    after = contents(folder)
    if not is_new(folder, layout):
        assert {name: after.get(name) for name in before} == before
    elif not discard:
        for name, data in before.items():
            assert data in (after.get(name), after.get(f"original/{name}")), f"{name} is lost"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="watches a forked process")
@pytest.mark.parametrize(("name", "discard"), [*((name, False) for name in KILLED), ("sharded", True)])
def test_a_killed_conversion_leaves_the_old_or_the_new_and_can_be_finished(name, discard, tmp_path):
    layout, source, folder = KILLED[name], tmp_path / "source", tmp_path / "drafter"
    drafter = layout.write(source)
    # knobs of a native checkpoint; of another library, whose file is not read, what no knob can be
    knobs = {"num_assistant_tokens": 9} if name == "native_with_another_field" else {}
    (source / "generation_config.json").write_text(json.dumps(knobs or {"num_assistant_tokens": 0}))
    before = contents(source)

    def convert() -> None:
        convert_checkpoint(folder, discard_original=discard, **layout.options)

    shutil.copytree(source, folder)
    copies = left_behind(convert, folder, tmp_path / "copies")
    finished, kinds = contents(folder), []
    for copy in of_each_state(copies):
        put_back(copy, folder)
        assert_old_or_new(folder, layout, before, discard)
        kinds.append(is_new(folder, layout))
        assert_loads(folder, drafter, **({} if kinds[-1] else layout.options))
        assert read_checkpoint(str(folder), layout.options).knobs == knobs
        convert()
        assert contents(folder) == finished
    assert kinds == sorted(kinds)  # once it is the new checkpoint, it stays it
    assert len(copies) > 15
    assert kinds.count(False) > 5
    assert kinds.count(True) > 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="watches a forked process")
def test_other_options_after_a_kill_are_refused_or_taken_but_never_lose_the_checkpoint(tmp_path):
    layout, folder = LAYOUTS["specforge_of_two_meanings"], tmp_path / "drafter"
    drafter = layout.write(folder)
    before = contents(folder)
    copies = left_behind(lambda: convert_checkpoint(folder, norm_output=True), folder, tmp_path / "copies")
    converted = [copy for copy in of_each_state(copies) if is_new(copy, layout)]
    assert converted
    for copy in converted:
        put_back(copy, folder)
        with suppress(ValueError):
            convert_checkpoint(folder, norm_output=False)
        assert_old_or_new(folder, layout, before, discard=False)
        loaded = Eagle31DrafterModel.from_pretrained(folder)
        for key, tensor in drafter.state_dict().items():
            assert_close(key, loaded.state_dict()[key], tensor)


# Memory.

MEBIBYTE = 2**20


def resident(field: str) -> int:
    """Returns the bytes of memory that /proc/self/status says."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def held_by(folders: list[Path]) -> int:
    """Returns the most bytes of memory that this process, which is to be a forked one, held beyond those at rest, to
    convert folders."""
    at_rest = resident("VmRSS")
    for folder in folders:
        convert_checkpoint(folder, f"{folder}-converted")
    return resident("VmHWM") - at_rest


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux' process file system")
def test_no_more_than_a_tensor_is_in_memory(tmp_path):
    largest, width, rows = 40 * MEBIBYTE, 512, 20480
    fields = {
        "vocab_size": rows,
        "draft_vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": rows // 2,
        "head_dim": 64,
    }
    config = LAYOUTS["inferact"].config | fields | {"num_attention_heads": 4, "num_key_value_heads": 2}
    layout = replace(LAYOUTS["inferact"], config=config, fields=LAYOUTS["inferact"].fields | fields)
    drafter = layout.build()
    tensors = {name: w.detach() for name, w in drafter.state_dict().items()}
    assert max(w.numel() * w.element_size() for w in tensors.values()) == largest
    assert sum(w.numel() * w.element_size() for w in tensors.values()) > 3.5 * largest
    folders = [tmp_path / file for file in (WEIGHTS, "pytorch_model.bin")]
    for folder in folders:
        folder.mkdir()
        write_weights(folder, tensors, folder.name)
        (folder / "config.json").write_text(json.dumps(config))
    held = forked(held_by, folders)
    assert held < 2 * largest, f"{held / MEBIBYTE:.0f} MiB more than at rest"
    assert read_checkpoint(f"{folders[0]}-converted").is_native
