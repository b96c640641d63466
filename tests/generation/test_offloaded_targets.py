"""Targets whose weights lie elsewhere until they are used: the text is the target's own, or the call is refused before
it begins."""

import accelerate
import pytest
import torch
from close import assert_close
from conftest import WIDTH, build_drafter, build_target
from draftings import CHAIN_OR_TREE
from observers import speculate

from eagle31_hf import Eagle31DrafterModel, upgrade_to_eagle31
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.store import parts_of
from eagle31_hf.training.target import TargetReader

GREEDY = {"max_new_tokens": 10, "do_sample": False}
BY_LAYER = {"model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
OFFLOADS = {
    "cpu": lambda target, folder: accelerate.cpu_offload(target, execution_device="cpu"),
    "disk": lambda target, folder: accelerate.disk_offload(target, str(folder), execution_device="cpu"),
    "embedding_on_disk": lambda target, folder: dispatch(
        target, {"model.embed_tokens": "disk", "lm_head": "cpu"}, folder
    ),
    "head_on_disk": lambda target, folder: dispatch(target, {"model.embed_tokens": "cpu", "lm_head": "disk"}, folder),
}


def dispatch(target, devices: dict[str, str], folder) -> None:
    accelerate.dispatch_model(target, BY_LAYER | devices, main_device="cpu", offload_dir=str(folder))


@pytest.fixture
def offloaded(tmp_path):
    """`offloaded(how, name, **target)` -> an offloaded target, a drafter fitted to it before, and the target's own
    text."""

    def make(how, name="eagle31", kind="llama", **fields):
        target = build_target(kind, **fields)
        drafter, prompt = build_drafter(target, name), torch.tensor([[1, 2, 3, 5, 8]])
        expected = target.generate(prompt, **GREEDY)
        OFFLOADS[how](target, tmp_path)
        return target, drafter, prompt, expected

    return make


@pytest.mark.parametrize(("how", "name"), [*((how, "target_head") for how in OFFLOADS), ("cpu", "own_embedding")])
def test_the_text_is_the_targets(offloaded, how, name):
    target, drafter, prompt, expected = offloaded(how, name)
    assert any(weight.is_meta for weight in target.parameters())
    own = build_target()
    for drafting in CHAIN_OR_TREE.values():
        output, stats = speculate(target, drafter, prompt, **GREEDY, **drafting)
        assert_close("text", output, expected)
        _, same = speculate(own, drafter, prompt, **GREEDY, **drafting)
        assert stats.accepted_per_round == same.accepted_per_round, "it matters where the target's tables lie"
    assert drafter.get_input_embeddings() is not None
    assert any(weight.is_meta for weight in target.parameters()), "the target was brought back"


@pytest.mark.parametrize("how", ["cpu", "embedding_on_disk"])
def test_a_tied_embedding(offloaded, how):
    target, drafter, prompt, expected = offloaded(how, "target_head", tie_word_embeddings=True)
    assert_close("text", speculate(target, drafter, prompt, **GREEDY)[0], expected)


def test_rows_of_a_scaled_table_stay_unscaled(offloaded):
    whole = build_target("gemma3_window_8")
    target, drafter, prompt, expected = offloaded("cpu", kind="gemma3_window_8")
    drafter.load_target_embeddings(target)
    assert_close("rows", drafter.embed(prompt), whole.get_input_embeddings().weight[prompt])
    assert_close("text", speculate(target, drafter, prompt, **GREEDY, **CHAIN_OR_TREE["chain"])[0], expected)


def test_an_offloaded_drafter(make_target, prompt, tmp_path):
    target = make_target()
    drafter, expected = build_drafter(target), target.generate(prompt, **GREEDY)
    _, same = speculate(target, drafter, prompt, **GREEDY, **CHAIN_OR_TREE["tree"])
    accelerate.cpu_offload(drafter, execution_device="cpu")
    output, stats = speculate(target, drafter, prompt, **GREEDY, **CHAIN_OR_TREE["tree"])
    assert_close("text", output, expected)
    assert stats.accepted_per_round == same.accepted_per_round


@pytest.mark.parametrize("which", ["target", "drafter", "loaded_with_its_parent"])
def test_what_nothing_loads_is_refused(target, drafter, prompt, which):
    message = "the target's embedding, which the drafter shares, is on the meta device"
    if which == "target":
        target = build_target().to("meta")
    # a hook on the decoder loads the embedding, one on the embedding there is none
    elif which == "loaded_with_its_parent":
        target = accelerate.cpu_offload(build_target(), execution_device="cpu", preload_module_classes=["LlamaModel"])
    else:  # as .to(target.device) does where the target is offloaded
        drafter, message = build_drafter(target).to("meta"), "the drafter is on the meta device"
    with pytest.raises(ValueError, match=f"{message}, and nothing loads it.*expected weights on a device"):
        target.generate(prompt, assistant_model=drafter, **GREEDY)


# Training and upgrading read the same tables.


def test_an_offloaded_target_trains_as_a_whole_one(offloaded):
    whole = build_target()
    target, drafter, prompt, _ = offloaded("cpu")
    documents = torch.ones_like(prompt)
    layer_ids = drafter.config.resolve_layer_ids(7)
    one, other = (TargetReader(model, layer_ids) for model in (target, whole))
    assert one.scoring == other.scoring
    for name, found, expected in zip(
        ("states", "last"), one.read(prompt, documents), other.read(prompt, documents), strict=True
    ):
        assert_close(name, found, expected)
    last = other.read(prompt, documents)[1][0]
    assert_close("logits", one.logits(last), other.logits(last))
    for name, weight in parts_of(target).items():
        assert_close(name, weight, parts_of(whole)[name].detach())
    ours, theirs = (new_drafter(model).state_dict() for model in (target, whole))
    for name, weight in theirs.items():
        assert_close(name, ours[name], weight)


def test_upgrading_with_an_offloaded_head(offloaded):
    fields = {"fc_norm": False, "norm_output": False, "share_target_head": True, "share_target_embeddings": True}
    target, drafter, _, _ = offloaded("disk", "target_head")
    drafter = Eagle31DrafterModel(type(drafter.config)(**drafter.config.to_dict() | fields)).eval()
    texts = [torch.arange(40)[None] % 11]
    upgraded, same = (upgrade_to_eagle31(drafter, model, texts, max_new_tokens=4) for model in (target, build_target()))
    assert upgraded.lm_head.weight.shape == (11, WIDTH)
    for name, weight in same.state_dict().items():
        assert_close(name, upgraded.state_dict()[name], weight)
