"""Parity with the original EAGLE 3 code, on a checkpoint it wrote: random weights, fp32, width 96, 128 of 500 ids.

`golden.safetensors` holds the target's table `embed`, captured `features` (B, T, 3 * 96) and `input_ids` (B, T + 1) of
a first round; `logits` and pre-norm `out_hidden` of the plain forward.
"""

from pathlib import Path

import pytest
import torch
from close import FORWARD, assert_close
from safetensors.torch import load_file
from torch import nn

from eagle31_hf import Eagle31DrafterModel, convert_checkpoint

FOLDER = Path(__file__).parents[1] / "fixtures" / "original-eagle3"


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(FOLDER / "golden.safetensors")


@pytest.fixture(scope="module", params=["as_it_is", "converted"])
def drafter(request, golden, tmp_path_factory) -> Eagle31DrafterModel:
    folder = FOLDER
    if request.param == "converted":
        folder = tmp_path_factory.mktemp("converted")
        convert_checkpoint(FOLDER, folder)
    drafter = Eagle31DrafterModel.from_pretrained(folder)
    drafter.set_input_embeddings(nn.Embedding.from_pretrained(golden["embed"]))
    return drafter


@torch.no_grad()
def test_logits_and_states_are_the_original_codes(drafter, golden):
    out = drafter(golden["input_ids"][:, 1:], target_hidden_states=golden["features"])
    assert_close("states", out.last_hidden_state, golden["out_hidden"], FORWARD)
    assert_close("logits", out.logits, golden["logits"], FORWARD)


@torch.no_grad()
def test_the_same_with_a_cache_row_by_row(drafter, golden):
    past, rows = None, []
    for t in range(golden["features"].shape[1]):
        out = drafter(
            golden["input_ids"][:, t + 1 : t + 2],
            target_hidden_states=golden["features"][:, t : t + 1],
            past_key_values=past,
            use_cache=True,
        )
        past = out.past_key_values
        rows.append(out)
    assert_close("logits", torch.cat([row.logits for row in rows], dim=1), golden["logits"], FORWARD)
    assert_close("states", torch.cat([row.last_hidden_state for row in rows], dim=1), golden["out_hidden"], FORWARD)


def test_the_original_is_told_by_its_files(drafter):
    assert drafter.config.aux_hidden_state_layer_ids is None
    assert (drafter.config.fc_norm, drafter.config.norm_output, drafter.config.norm_before_residual) == (
        False,
        False,
        False,
    )
    assert drafter.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
