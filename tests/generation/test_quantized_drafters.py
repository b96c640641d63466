"""Drafters with weights in 8 bits: the text stays the target's own, eagerly and in captured rounds, which are fused as
with any drafter and captured anew once it is quantized; and hardly fewer drafts are accepted."""

import copy
import json

import pytest
import torch
from conftest import PROMPT, build_drafter, build_target
from draftings import CHAIN, TREE
from draftings import CHAIN_OR_TREE as PLANS
from recorded import Recorded

from eagle31_hf import AcceptanceStats, Eagle31DrafterModel, demo, track_acceptance
from eagle31_hf.cli import main
from eagle31_hf.generation.captured.fused_drafter import can_fuse
from eagle31_hf.generation.captured.kept import fingerprint
from eagle31_hf.generation.captured.seam import Uncaptured, seams
from eagle31_hf.quantized import KINDS

SEAMS = {"eager": None, "as tensors": Uncaptured()}
SAMPLED = {"do_sample": True, "top_k": 7, "temperature": 0.8}
DRAFTERS = ("eagle31", "pruned", "two_layers", "target_head", "mla")
LEAST_KEPT = 0.94  # of the accepted length of the demo pair


pytestmark = pytest.mark.usefixtures("nothing_is_kept")


def decode(target, drafter: Eagle31DrafterModel, seam, **options) -> tuple[torch.Tensor, AcceptanceStats]:
    ids = torch.tensor(PROMPT)
    asked = {"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    with seams(lambda device: seam), track_acceptance() as stats:
        return target.generate(**asked | {"pad_token_id": 6} | options, assistant_model=drafter), stats


# Each drafter in both kinds, each kind in chains and trees, eagerly and in captured rounds.
INT8, FP8 = KINDS
CASES = [((INT8, FP8)[i % 2], name, "chain", "eager") for i, name in enumerate(DRAFTERS)]
CASES += [((FP8, INT8)[i % 2], name, "tree", "as tensors") for i, name in enumerate(DRAFTERS)]


@pytest.mark.parametrize(("kind", "name", "plan", "seam"), CASES)
def test_text_is_the_targets_own(make_target, make_drafter, fused_widths, kind, name, plan, seam):
    target = make_target()
    drafter = copy.deepcopy(make_drafter(target, name)).quantize(kind)
    text, stats = decode(target, drafter, SEAMS[seam], **PLANS[plan])
    assert torch.equal(text, decode(target, None, None)[0])
    assert sum(stats.accepted_per_position) > 0 or name == "target_head"  # which is not fitted
    if SEAMS[seam] is not None:
        assert set(stats.executions) == {f"as {Uncaptured.name}"}
        assert can_fuse(drafter) == bool(fused_widths) == (name != "mla")


def test_sampled_text_is_one_whatever_is_drafted(make_target, make_drafter):
    target = make_target()
    plain = make_drafter(target)
    drafter = copy.deepcopy(plain).quantize("int8")
    torch.manual_seed(3)
    expected, _ = decode(target, plain, None, **SAMPLED, **TREE)
    for seam, plan in ((None, TREE), (Uncaptured(), TREE), (Uncaptured(), CHAIN)):
        torch.manual_seed(3)
        assert torch.equal(decode(target, drafter, seam, **SAMPLED, **plan)[0], expected)


def test_rounds_are_captured_anew_once_a_drafter_is_quantized():
    """The memory that a recording reads is gone by then."""
    target = build_target()
    drafter, seam = build_drafter(target), Recorded()
    before = fingerprint(drafter)
    texts = [decode(target, drafter, seam, **CHAIN)[0]]
    assert seam.captures == 2
    drafter.quantize("fp8")
    assert fingerprint(drafter) != before
    for _ in range(2):
        text, stats = decode(target, drafter, seam, **CHAIN)
        assert set(stats.executions) == {f"as {Recorded.name}"}
        texts.append(text)
    assert seam.captures == 4
    expected = decode(target, None, None)[0]
    assert all(torch.equal(text, expected) for text in texts)


def test_a_compiled_drafter_drafts(make_target, make_drafter):
    torch._dynamo.reset()
    target = make_target()
    drafter = copy.deepcopy(make_drafter(target)).quantize("fp8")
    text, stats = decode(target, torch.compile(drafter, backend="eager"), None, **CHAIN)
    assert torch.equal(text, decode(target, None, None)[0])
    assert sum(stats.accepted_per_position) > 0
    torch._dynamo.reset()


def test_accepted_length_of_the_demo_pair():
    target, tokenizer = demo.load_target()
    plain, prompts = demo.load_drafter("eagle31"), demo.prompts(tokenizer, 2)

    def accepted_length(drafter: Eagle31DrafterModel) -> float:
        with track_acceptance() as stats:
            for prompt in prompts:
                asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 32, "do_sample": False}
                target.generate(prompt, **asked, assistant_model=drafter, num_assistant_tokens=5)
        return stats.mean_accepted_length

    least = LEAST_KEPT * accepted_length(plain)
    for kind in KINDS:
        assert accepted_length(copy.deepcopy(plain).quantize(kind)) >= least, kind


def test_on_the_command_line(capsys, monkeypatch):
    asked = ["generate", "--target", str(demo.FOLDER / "target"), "--drafter", str(demo.FOLDER / "eagle31"), "--json"]
    asked += ["--max-new-tokens", "12", "--num-assistant-tokens", "4"]
    quantize, kinds, texts = Eagle31DrafterModel.quantize, [], []
    monkeypatch.setattr(Eagle31DrafterModel, "quantize", lambda self, kind: kinds.append(kind) or quantize(self, kind))
    for extra in ([], ["--drafter-weights", "fp8"]):
        assert main([*asked, *extra, "def add(a, b):"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]
    assert kinds == ["fp8"]
    assert main([*asked, "--drafter-weights", "int4", "def add(a, b):"]) == 2
    assert "invalid choice: 'int4'" in capsys.readouterr().err
