"""The target's cache: it can be cropped, and remembers no longer than it is told to."""

import pytest
import torch
from close import TARGET_FORWARD, assert_close

from eagle31_hf.cache.adopt import appending, crop


@pytest.mark.parametrize("removed", [0, 1, 3])
@pytest.mark.parametrize("kind", ["llama", "mistral_window_8"])
def test_crop(make_target, prompt, kind, removed):
    target, ids = make_target(kind), torch.arange(15)[None] % 11
    past = target(ids[:, :11]).past_key_values
    with appending(past):
        target(ids[:, 11:], past_key_values=past)
        crop(past, removed)
    assert past.get_seq_length() == 15 - removed
    after = target(torch.tensor([[3]]), past_key_values=past).logits
    whole = torch.cat((ids[:, : 15 - removed], torch.tensor([[3]])), dim=1)
    assert_close("logits of the next token", after, target(whole).logits[:, -1:], TARGET_FORWARD)


def test_recording_ends_with_its_block_also_on_error(make_target, prompt):
    past = make_target("mistral_window_8")(prompt).past_key_values
    past.layers[1].record_past = True
    found = [layer.record_past for layer in past.layers]
    with appending(past):
        assert all(layer.record_past for layer in past.layers)
    assert [layer.record_past for layer in past.layers] == found
    with pytest.raises(KeyError), appending(past):
        raise KeyError
    assert [layer.record_past for layer in past.layers] == found
