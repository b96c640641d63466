"""Calibration to EAGLE 3.1: exact where it can be, closest where it cannot, and as good a drafter as before on the demo
pair."""

import pytest
import torch
from close import FORWARD, assert_close
from factories import EAGLE3, VARIANTS, WIDTH, build, inputs, target

from eagle31_hf import Eagle31DrafterModel, demo, upgrade_to_eagle31
from eagle31_hf.demo import HELD_OUT, held_out_file

KINDS = {
    "eagle3": EAGLE3,
    "norm_before_fc": {"fc_norm": False, "norm_before_fc": True, "norm_output": False},
    "fc_norm_only": {"norm_output": False},
    "norm_output_only": {"fc_norm": False},
    "fc_bias": EAGLE3 | {"fc_bias": True},
    "shared_head": EAGLE3 | {"draft_vocab_size": 61, "share_target_head": True, "share_target_embeddings": True},
    "mla": EAGLE3 | VARIANTS["mla"],
}
TEXTS = [torch.randint(0, 61, (1, 40), generator=torch.Generator().manual_seed(i)) for i in range(6)]
TARGET = target()  # drafters that share its tables do not keep it
SHORT = {"num_prompts": 2, "max_new_tokens": 6}


def upgraded(drafter, **options) -> Eagle31DrafterModel:
    return upgrade_to_eagle31(drafter, TARGET, TEXTS, **SHORT | options)


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_the_result_is_an_eagle31_drafter_and_the_original_is_untouched(fields, tmp_path):
    drafter = build(**fields)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    result = upgraded(drafter)
    assert (result.config.fc_norm, result.config.norm_output, result.config.norm_before_fc) == (True, True, False)
    assert not result.config.share_target_head
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert result.upgrade_report.before.target_forwards > 0
    assert result.upgrade_report.after.target_forwards > 0
    result.save_pretrained(tmp_path)
    loaded = Eagle31DrafterModel.from_pretrained(tmp_path)
    for name, tensor in result.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert "by calibration on 240 tokens" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("fields", [KINDS["eagle3"], KINDS["shared_head"]], ids=["own_head", "shared_head"])
@torch.no_grad()
def test_logits_of_a_given_state_stay(fields):
    drafter = build(**fields)
    result = upgraded(drafter)
    tokens, _ = inputs(drafter)
    state = torch.randn(2, tokens.shape[1], WIDTH, generator=torch.Generator().manual_seed(3))
    scale = drafter(tokens, hidden_states=state).logits.abs().max()
    one, other = (model(tokens, hidden_states=state).logits / scale for model in (drafter, result))
    assert_close("logits", other, one, FORWARD)


@torch.no_grad()
def test_a_channel_that_is_0_in_all_states_is_left_as_it_is():
    drafter = build(**EAGLE3)
    layer = drafter.layers[0]
    for matrix in (drafter.fc, layer.self_attn.o_proj, layer.mlp.down_proj):
        matrix.weight[3] = 0.0
    result = upgraded(drafter)
    assert result.norm.weight[3] == 1.0
    assert result.lm_head.weight.isfinite().all()


@torch.no_grad()
def test_what_norms_can_express_is_found_exactly():
    drafter, expected = build(**EAGLE3), build(fc_norm=True, norm_output=False)
    fused = expected.fuse_target_states
    drafter.fuse_target_states = fused  # an "EAGLE 3" drafter whose fused states norms can reproduce
    result = upgraded(drafter)
    assert result.upgrade_report.fused_movement < 0.02
    assert result.upgrade_report.fused_movement < result.upgrade_report.fused_movement_scalar / 5


@torch.no_grad()
def test_the_fit_is_better_than_one_scale_a_state_and_than_no_fit():
    drafter = build(**EAGLE3)
    result = upgraded(drafter)
    report = result.upgrade_report
    assert report.fused_movement <= report.fused_movement_scalar
    _, states = inputs(drafter)
    goal = drafter.fuse_target_states(states)
    for norm in result.fc_norm:
        norm.weight.fill_(1.0)
    unfitted = ((result.fuse_target_states(states) - goal).norm(dim=-1) / goal.norm(dim=-1)).mean()
    assert report.fused_movement < unfitted


def test_the_report_is_for_people_and_for_machines():
    report = upgraded(build(**EAGLE3)).upgrade_report
    assert "accepted length" in report.summary()
    assert ("fine-tune it" in report.summary()) == report.needs_fine_tuning
    values = report.as_dict()
    assert len(values["before"]["accepted_per_position"]) == len(values["after"]["accepted_per_position"])
    assert values["needs_fine_tuning"] is report.needs_fine_tuning


@pytest.mark.parametrize(
    ("drafter", "texts", "message"),
    [
        ({}, TEXTS, "EAGLE 3.1 already"),
        (EAGLE3, TEXTS[:1][:0], "0 tokens"),
        (EAGLE3, [TEXTS[0][:, :9]], "9 tokens in rows"),
        (EAGLE3, [TEXTS[0][0]], r"expected strings or token ids of shape \(1, T\)"),
        (EAGLE3, [3], "texts hold a int"),
    ],
    ids=["eagle31", "no_text", "too_little", "one_dimension", "no_text_at_all"],
)
def test_what_cannot_be_upgraded_is_refused(drafter, texts, message):
    with pytest.raises(ValueError, match=message):
        upgrade_to_eagle31(build(**drafter), target(), texts)


def test_the_demo_drafter_drafts_as_well_as_before():
    model, tokenizer = demo.load_target()
    texts = [held_out_file(name)[2000:3200] for name in HELD_OUT[:4]]
    result = upgrade_to_eagle31(
        demo.load_drafter("eagle3"),
        model,
        texts,
        tokenizer=tokenizer,
        num_assistant_tokens=5,
        num_prompts=2,
        max_new_tokens=24,
    )
    report = result.upgrade_report
    assert report.fused_movement < 0.25
    assert report.after.mean_accepted_length > 0.9 * report.before.mean_accepted_length
