"""A round makes the host wait for the device as seldom as can be, and launches no more than it did: counted on a
pretend accelerator, in a process of its own, whose torch knows that device."""

import pytest
import torch
from programs import called, forked
from transformers import pytorch_utils

MOST_WAITS = {
    "chain": 2,
    "tree": 3,
    "sampled chain": 2,
    "sampled tree": 3,
    "chain, batch of 4": 4,
    "tree, batch of 4": 4,
    "sampled chain, batch of 4": 4,
}
MOST_LAUNCHES = {"chain": 1634, "tree": 1882}  # a Llama of 32 layers: those of the loop before it had tensors only
pytestmark = pytest.mark.skipif(torch.__version__ < "2.9", reason="the pretend device needs torch 2.9")


@pytest.fixture(scope="module")
def figures() -> dict:
    return forked(called, "host_waits", "figures")


@pytest.mark.parametrize("way", MOST_WAITS)
def test_waits_of_a_round(figures, way):
    assert figures[way]["waits"] <= MOST_WAITS[way], figures[way]["lines"]


def test_auto_waits_once_more_for_every_level_it_decides_on(figures):
    assert figures["auto"]["waits"] <= 3 + figures["auto"]["decisions"], figures["auto"]["lines"]


@pytest.mark.parametrize("way", MOST_LAUNCHES)
def test_launches_of_a_round(figures, way):
    assert figures[way]["launches"] <= MOST_LAUNCHES[way]


@pytest.mark.skipif(not hasattr(pytorch_utils, "move_to_device"), reason="transformers moves no inputs")
def test_inputs_may_lie_on_the_host_while_the_models_lie_elsewhere():
    for way, (ours, alone) in forked(called, "host_waits", "with_inputs_on_the_host").items():
        assert ours == alone, way
