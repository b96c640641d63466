"""The shipped pair: small enough, really trained, and faster in the one way that does not depend on the machine."""

import json
from pathlib import Path

import pytest
import torch

from eagle31_hf import AcceptanceStats, demo, track_acceptance
from eagle31_hf.bench import Shape, profile
from eagle31_hf.demo import HELD_OUT, stdlib

LARGEST_PAIR = 12 * 2**20  # bytes


@pytest.fixture(scope="module")
def pair():
    target, tokenizer = demo.load_target()
    return target, tokenizer, {name: demo.load_drafter(name) for name in demo.DRAFTERS}


def test_the_pair_fits_in_twelve_mebibytes():
    sizes = {
        path: path.stat().st_size
        for path in demo.FOLDER.glob("*/*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {path.parent.name for path in sizes} == {"target", *demo.DRAFTERS}
    assert sum(sizes.values()) <= LARGEST_PAIR


def test_held_out_files_are_never_trained_on(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    from corpus import training_files

    held_out = {(stdlib() / name).read_text(encoding="utf-8") for name in HELD_OUT}
    assert held_out.isdisjoint(training_files())


def test_greedy_text_is_the_targets_own(pair):
    target, tokenizer, drafters = pair
    stats = {name: AcceptanceStats() for name in drafters}
    for prompt in demo.prompts(tokenizer, 2, num_tokens=48):
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": 32}
        alone = target.generate(**inputs, do_sample=False)
        for name, depth in (("eagle3", 1), ("eagle31", 5)):
            knobs = {"assistant_model": drafters[name], "num_assistant_tokens": depth}
            with track_acceptance(stats[name]):
                assert torch.equal(alone, target.generate(**inputs, do_sample=False, **knobs))
    for found in stats.values():
        share = found.accepted_per_position[0] / found.drafted_per_position[0]
        assert 0.3 < share < 1, "a trained drafter is often right, and sometimes wrong"


def test_no_part_of_a_profile_takes_less_than_no_time(pair):
    """The drafter reads the prompt within the target's forward: its seconds are no part of the drafting, of which there
    is none here."""
    target, tokenizer, drafters = pair
    [prompt] = demo.prompts(tokenizer, 1)
    target.generate(
        prompt, assistant_model=drafters["eagle31"], max_new_tokens=2
    )  # the first call tries the target, too
    found = profile(target, drafters["eagle31"], Shape(3), prompt, 2)
    assert min(found["profile"].values()) > 0
    assert 0 < found["overhead"] < 1


def test_drafters_differ_only_in_the_flags_of_eagle31(pair):
    _, _, drafters = pair
    configs = [drafters[name].config.to_dict() for name in demo.DRAFTERS]
    differing = {key for key in configs[0] if configs[0][key] != configs[1].get(key) and key != "_name_or_path"}
    assert differing == {"fc_norm", "norm_output"}
    records = [json.loads((demo.FOLDER / name / "training.json").read_text()) for name in demo.DRAFTERS]
    for key in ("rows", "steps", "tokens_trained", "depth"):
        assert records[0][key] == records[1][key]


def test_prompts_are_distinct_parts_of_held_out_files(pair):
    _, tokenizer, _ = pair
    prompts = demo.prompts(tokenizer, 2 * len(HELD_OUT), num_tokens=32)
    assert all(prompt.shape == (1, 32) for prompt in prompts)
    assert len({tuple(prompt[0].tolist()) for prompt in prompts}) == len(prompts)
    assert {prompt.shape for prompt in demo.prompts(tokenizer, 300)} == {(1, 96)}  # more than the files are long
