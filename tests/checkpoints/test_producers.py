"""Parity with other producers: drafters that their code saved load, and compute what that code computed.

`peers/producer_fixtures.py` wrote both. T captured target states, k depth of the chain.
"""

import json
from pathlib import Path

import pytest
import torch
from close import assert_close
from safetensors import safe_open
from torch import Tensor, nn
from transformers import DynamicCache

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.checkpoints import convert_checkpoint, read_checkpoint

PARITY, DEPTHS = 1e-5, 4
FORMATS = Path(__file__).parents[1] / "fixtures" / "formats"
CASES = sorted(folder.name for folder in FORMATS.iterdir() if folder.is_dir())
by_case = pytest.mark.parametrize("case", CASES)
IDENTIFIED = {
    "specforge": "SpecForge", "speculators": "speculators", "modelopt": "NVIDIA ModelOpt", "nemo": "NeMo Automodel",
    "angelslim": "AngelSlim",
}  # fmt: skip


def golden(case: str) -> tuple[dict, dict[str, Tensor]]:
    """Returns the loader's arguments, the config to expect, and the producer's results."""
    with safe_open(FORMATS / f"{case}.golden.safetensors", "pt") as file:
        return json.loads(file.metadata()["fixture"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def load(source: Path, fixture: dict, peer: dict[str, Tensor]) -> Eagle31DrafterModel:
    """Loads the drafter in fp32, with the target's table where it has none."""
    drafter = Eagle31DrafterModel.from_pretrained(source, dtype=torch.float32, **fixture["arguments"])
    if "embed" in peer:
        drafter.set_input_embeddings(nn.Embedding.from_pretrained(peer["embed"].float()))
    return drafter


@torch.no_grad()
def assert_parity(drafter: Eagle31DrafterModel, peer: dict[str, Tensor]) -> None:
    """Compares the steps of a chain from every token: target states up to it at once, then given tokens one by one, on
    the drafter's own state."""
    tokens, states = peer["input_ids"], peer["target_hidden_states"]
    for slot in range(states.shape[1]):
        cache, rows, source = DynamicCache(), tokens[:, : slot + 1], {"target_hidden_states": states[:, : slot + 1]}
        for k in range(DEPTHS):
            if slot >= peer[f"logits.{k}"].shape[1]:
                break
            out = drafter(rows, **source, past_key_values=cache)
            assert_close(f"logits of slot {slot} at depth {k}", out.logits[:, -1], peer[f"logits.{k}"][:, slot], PARITY)
            assert_close(
                f"state of slot {slot} at depth {k}", out.last_hidden_state[:, -1], peer[f"state.{k}"][:, slot], PARITY
            )
            rows, source = tokens[:, slot + 1 + k : slot + 2 + k], {"hidden_states": out.last_hidden_state[:, -1:]}


def test_every_producer_that_can_be_run_is_there():
    assert {case.partition("-")[0] for case in CASES} == set(IDENTIFIED)
    assert {path.name.partition(".")[0] for path in FORMATS.iterdir()} == set(CASES)


@by_case
def test_the_config_is_understood(case):
    fixture, peer = golden(case)
    drafter = Eagle31DrafterModel.from_pretrained(FORMATS / case, dtype=torch.float32, **fixture["arguments"])
    assert drafter.checkpoint.format == IDENTIFIED[case.partition("-")[0]]
    assert {name: getattr(drafter.config, name) for name in fixture["expected"]} == fixture["expected"]
    ids = drafter.draft_to_target_ids()
    assert_close("target ids", torch.arange(len(peer["target_ids"])) if ids is None else ids, peer["target_ids"])


@by_case
def test_logits_and_states_at_every_depth_and_the_same_drafter_after_conversion(case, tmp_path):
    fixture, peer = golden(case)
    drafter = load(FORMATS / case, fixture, peer)
    assert_parity(drafter, peer)
    convert_checkpoint(str(FORMATS / case), tmp_path / "native", **fixture["arguments"])
    assert read_checkpoint(str(tmp_path / "native")).is_native
    converted = load(tmp_path / "native", {"arguments": {}}, peer)
    assert converted.config.to_diff_dict() == drafter.config.to_diff_dict()
    assert converted.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert_close(name, converted.state_dict()[name], tensor)
