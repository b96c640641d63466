"""The same weights give what the PyPI package speculators computes; `peers/speculators_fixtures.py` wrote the fixtures.

T captured target states, h width, k depth of the chain.
"""

import json
from pathlib import Path

import pytest
import torch
from close import assert_close
from factories import ATTENTIONS, chain
from safetensors import safe_open
from transformers import AutoModel

from eagle31_hf import Eagle31Config, Eagle31DrafterModel
from eagle31_hf.training.unroll import unroll

PARITY, DEPTHS = 1e-5, 7
FIXTURES = sorted((Path(__file__).parent / "fixtures" / "speculators").glob("*.safetensors"))
by_fixture = pytest.mark.parametrize("path", FIXTURES, ids=[path.stem for path in FIXTURES])


def read(path: Path, attention: str = "sdpa") -> tuple[Eagle31DrafterModel, dict[str, torch.Tensor]]:
    """The drafter with the fixture's weights, and everything else in the file."""
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["fixture"])["config"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = {
        name.removeprefix("weights."): tensors.pop(name) for name in list(tensors) if name.startswith("weights.")
    }
    drafter = AutoModel.from_config(Eagle31Config(**config), attn_implementation=attention).eval()
    drafter.load_state_dict({name: w.float() if w.is_floating_point() else w for name, w in weights.items()})
    return drafter, tensors


def test_every_layer_type_norm_flag_and_depth_is_there():
    variants = ("eagle3", "eagle31", "norm_before_fc", "norm_before_residual", "eagle31_norm_before_residual")
    wanted = {
        f"{kind}_{v}_{layers}" for kind in ("llama", "qwen3") for v in variants for layers in ("1_layer", "2_layers")
    }
    assert {path.stem for path in FIXTURES} == wanted


@by_fixture
@torch.no_grad()
def test_fused_states(path):
    drafter, peer = read(path)
    assert_close("fused", drafter.fuse_target_states(peer["target_hidden_states"]), peer["fused"], PARITY)


@pytest.mark.parametrize("attention", ATTENTIONS)
@by_fixture
@torch.no_grad()
def test_the_unroll(path, attention):
    drafter, peer = read(path, attention)
    for k, (normed, state) in enumerate(unroll(drafter, peer["input_ids"], peer["target_hidden_states"], DEPTHS)):
        assert_close(f"logits of depth {k}", drafter.score(normed), peer[f"logits.{k}"], PARITY)
        assert_close(f"states of depth {k}", state, peer[f"states.{k}"], PARITY)


@by_fixture
@torch.no_grad()
def test_the_chain_with_a_cache(path):
    drafter, peer = read(path)
    num_slots = peer["target_hidden_states"].shape[1]
    for slot in range(num_slots):
        steps = chain(drafter, peer["input_ids"], peer["target_hidden_states"], slot, min(DEPTHS, num_slots - slot))
        for k, (logits, state) in enumerate(steps):
            assert_close(f"logits of slot {slot} at depth {k}", logits, peer[f"logits.{k}"][:, slot], PARITY)
            assert_close(f"state of slot {slot} at depth {k}", state, peer[f"states.{k}"][:, slot], PARITY)
