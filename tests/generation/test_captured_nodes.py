"""A captured round has few nodes and nothing that makes the host wait: counted on a pretend accelerator, in a process
of its own, whose torch knows that device."""

import pytest
import torch
from programs import called, forked

MOST_IN_VERIFY = {"Llama": 303, "Qwen3": 335}  # of 32 and of 36 layers
MOST_IN_STEP, MOST_IN_LEVEL = 11, 17
MORE_IN_8_BITS = 5  # its weights are read one by one, and its gate runs as torch does
MOST_IN_LAYOUT, MOST_IN_READING = 6, 18
WAYS = ["Llama bf16 eagle31", "Qwen3 bf16 eagle3", "Llama fp32 fp8"]
pytestmark = pytest.mark.skipif(torch.__version__ < "2.9", reason="the pretend device needs torch 2.9")


@pytest.fixture(scope="module")
def figures() -> dict:
    return forked(called, "captured_nodes", "all_figures")


@pytest.mark.parametrize("way", WAYS)
def test_nodes_of_a_round(figures, way):
    found = figures[way]
    most = MOST_IN_VERIFY[way.split()[0]]
    more = MORE_IN_8_BITS if way.split()[2] in ("int8", "fp8") else 0
    assert found["layer"] == 8
    assert max(found["verify"], found["verify a tree"]) <= most, found["lines"]["verify"]
    assert found["step"] <= MOST_IN_STEP + more, found["lines"]["a step"]
    assert found["level"] <= MOST_IN_LEVEL + more, found["lines"]["a level"]
    assert found["layout"] <= MOST_IN_LAYOUT, found["lines"]["layout"]
    assert found["reading"] <= MOST_IN_READING + more, found["lines"]["reading"]


@pytest.mark.parametrize("way", [*WAYS, "Qwen3-Next", "LFM2"])
def test_the_host_reads_once_a_round_and_waits_for_nothing_in_it(figures, way):
    assert figures[way]["waits"] == {}
    assert figures[way]["copies"] == 1
