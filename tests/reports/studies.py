"""A drift study of tiny models."""

import json
from functools import partial

from conftest import VOCAB, build_drafter, build_target, letters

from eagle31_hf.reports.drift_study import DriftStudy
from eagle31_hf.reports.prompts import Prompts, Renderer

DEPTH = 3
SETTINGS = {"depth": DEPTH, "max_new_tokens": 5, "lengths": (24, 40), "has_interventions": True}
NAMES = ("<mine> & yours", "other")  # a page must not take the first for an element


def tiny_prompts(folder, count=4):
    """Prompts of tokens, of different lengths; those of other prompts make a context longer."""
    path = folder / "prompts.jsonl"
    rows = [[(i * 7 + k * 3) % 11 for k in range(9 + i)] for i in range(count)]
    path.write_text("".join(json.dumps({"input_ids": row, "answers": [0] * len(row)}) + "\n" for row in rows))
    renderer = Renderer(letters(unk_token="k"), 16, VOCAB, {})
    return Prompts(str(path), renderer, count, 160, SETTINGS["max_new_tokens"])


def study_of(folder, journal, settings=SETTINGS):
    """Measures an EAGLE 3.1 and an EAGLE 3 drafter with random weights."""
    target = build_target("qwen3")
    study = DriftStudy(target, tiny_prompts(folder), journal, **settings)
    kinds = ({}, {"norm_output": False, "fc_norm": False})
    loads = [partial(build_drafter, target, **kind) for kind in kinds]
    return [study.measure(label, load) for label, load in zip(NAMES, loads, strict=True)]
