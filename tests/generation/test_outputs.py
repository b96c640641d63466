"""What `return_dict_in_generate` gives of sampled texts, and what it leaves out; `test_cases.py` has the values."""

import pytest
import torch
from draftings import TREE
from observers import speculate

FIELDS = ("scores", "logits", "hidden_states")  # beside which drafts are made
LENGTH = 17


def shapes(value):
    return tuple(shapes(part) for part in value) if isinstance(value, tuple) else tuple(value.shape)


@pytest.mark.parametrize("name", [*FIELDS, "attentions"])
def test_sampled_outputs_have_the_shapes_of_plain_generate(make_target, make_drafter, prompt, name):
    target = make_target("llama", "eager")
    kwargs = {
        "max_new_tokens": LENGTH,
        "do_sample": True,
        "top_k": 4,
        "return_dict_in_generate": True,
        f"output_{name}": True,
    }
    torch.manual_seed(0)
    output, _ = speculate(target, make_drafter(target, "eagle31", "eager"), prompt, **kwargs, num_assistant_tokens=5)
    assert shapes(getattr(output, name)) == shapes(getattr(target.generate(prompt, **kwargs), name))
    others = {*FIELDS, "attentions"} - {name}
    assert all(getattr(output, other) is None for other in others), "what nobody asked for"


def test_a_tensor_unless_a_dict_is_asked_for(target, drafter, prompt):
    output, _ = speculate(
        target, drafter, prompt, max_new_tokens=LENGTH, do_sample=False, output_scores=True, num_assistant_tokens=5
    )
    assert isinstance(output, torch.Tensor)


def test_memory_of_rejected_drafts_is_not_kept(target, drafter, prompt):
    """Whoever keeps the outputs keeps what they are views of: at most the logits of one round."""
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output, _ = speculate(target, drafter, prompt, max_new_tokens=LENGTH, do_sample=False, **TREE, **asked)
    kept = [*output.scores, *output.logits]
    assert all(each.untyped_storage().nbytes() <= 4 * 4 * each.numel() for each in kept)
