"""The one measure of acceptance, against counting by hand around generate()."""

import pytest
import torch
from conftest import build_drafter, build_target

from eagle31_hf import track_acceptance
from eagle31_hf.diagnostics.acceptance import measure_acceptance

PROMPTS = [torch.tensor([[1, 2, 3, 5, 8]]), torch.tensor([[7, 1, 0, 2], [3, 3, 4, 9]])]
TREE = {"num_assistant_tokens": 3, "draft_tree_top_k": 2, "draft_tree_total_tokens": 6}


@pytest.mark.parametrize("drafting", [3, TREE], ids=["depth", "tree"])
def test_counts_are_those_of_generate(drafting):
    target = build_target("qwen3")
    drafter = build_drafter(target)
    found = measure_acceptance(target, drafter, iter(PROMPTS), drafting, 12)
    options = {"num_assistant_tokens": drafting} if drafting == 3 else drafting
    with track_acceptance() as stats:
        for prompt in PROMPTS:
            mask = torch.ones_like(prompt)
            target.generate(
                prompt, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=12, **options
            )
    assert found.as_dict() == stats.as_dict()
    assert found.target_forwards > 0


def test_no_prompts_are_no_counts():
    target = build_target("qwen3")
    assert measure_acceptance(target, build_drafter(target), [], 3, 12).target_forwards == 0
