"""A default device of torch (`torch.set_default_device`) changes nothing: tensors of the host say that they are.

Where the default is CUDA, a tensor made without a device lies on the GPU, and what is done with tensors of the host
fails. Here the default is the meta device, which any computation with the host's tensors refuses."""

from contextlib import nullcontext

import pytest
import torch
from families import DRAFTINGS, build_batch, build_drafter, build_target
from transformers import DynamicCache

from eagle31_hf import track_acceptance
from eagle31_hf.cache.states import HAS_METHODS
from eagle31_hf.generation.captured.seam import Uncaptured, seams

SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 12}
WAYS = {
    "chain": DRAFTINGS["chain"],
    "tree": DRAFTINGS["tree"],
    "sampled chain": DRAFTINGS["chain"] | SAMPLED,
    "sampled tree": DRAFTINGS["tree"] | SAMPLED,
    "auto": {"num_assistant_tokens": "auto"},
}


# Rounds of targets with states run eagerly.
CASES = [("Llama", way, is_captured) for way in WAYS for is_captured in (False, True)]
CASES += [("LFM2", "tree", False)]
CASES += [("Qwen3.5", "chain", False), ("Qwen3.5", "sampled chain", False)] if HAS_METHODS else []


@pytest.mark.parametrize(("name", "way", "is_captured"), CASES)
def test_text_is_the_same_beside_a_default_device(name, way, is_captured):
    texts = []
    for default in (nullcontext(), torch.device("meta")):  # each with models that nothing was found out about yet
        target, drafter = build_target(name, "sdpa"), build_drafter(name)
        inputs = build_batch(name) | {"past_key_values": DynamicCache(config=target.config)}
        torch.manual_seed(3)
        with default, seams(lambda device: Uncaptured()) if is_captured else nullcontext(), track_acceptance() as stats:
            ids = target.generate(**inputs, **WAYS[way], max_new_tokens=12, assistant_model=drafter)
        texts.append(ids.tolist())
        assert stats.drafted_per_position or way == "auto"
    assert texts[0] == texts[1]
