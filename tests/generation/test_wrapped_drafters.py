"""A drafter that others have wrapped drafts as it does alone, with what the wrapper adds; what cannot draft is refused
at once."""

import pytest
import torch
from close import assert_close
from conftest import build_drafter
from draftings import CHAIN, TREE
from observers import speculate
from torch import nn

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.modeling import drafter_in

GREEDY = {"max_new_tokens": 16, "do_sample": False}
SHORT = {"max_new_tokens": 5, "do_sample": False, "num_assistant_tokens": 2}


class Subclass(Eagle31DrafterModel):
    pass


def as_subclass(drafter: Eagle31DrafterModel) -> Eagle31DrafterModel:
    other = Subclass(drafter.config).eval()
    other.load_state_dict(drafter.state_dict())
    return other


WRAPPERS = {
    "data_parallel": nn.DataParallel,
    "compiled_around_data_parallel": lambda drafter: torch.compile(nn.DataParallel(drafter), backend="eager"),
    "subclass": as_subclass,
    "training_mode": lambda drafter: drafter.train(),
}


@pytest.mark.parametrize("drafting", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_drafter_drafts_as_alone(target, prompt, wrapper, drafting):
    drafter = build_drafter(target)
    expected, stats = speculate(target, drafter, prompt, **GREEDY, **drafting)
    output, same = speculate(target, wrapper(drafter), prompt, **GREEDY, **drafting)
    assert_close("text", output, expected)
    assert same.accepted_per_round == stats.accepted_per_round


def test_an_accelerator_prepares_a_drafter(target, prompt):
    from accelerate import Accelerator

    drafter = build_drafter(target)
    expected, stats = speculate(target, drafter, prompt, **GREEDY, **CHAIN)
    output, same = speculate(
        target, Accelerator(cpu=True, mixed_precision="no").prepare(drafter), prompt, **GREEDY, **CHAIN
    )
    assert_close("text", output, expected)
    assert same.accepted_per_round == stats.accepted_per_round


@pytest.fixture
def fresh_compiler():
    """What is compiled in a process counts against one limit, whichever drafter it was for."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_forward_is_the_one_that_runs(target, prompt):
    """A short text: every shape that is new is traced again, for seconds."""
    drafter, runs = build_drafter(target), []
    expected, stats = speculate(target, drafter, prompt, **SHORT)

    def backend(graph: torch.fx.GraphModule, inputs: list):
        return lambda *args: runs.append(graph) or graph(*args)

    compiled = torch.compile(drafter, backend=backend, dynamic=True)
    output, same = speculate(target, compiled, prompt, **SHORT)
    assert_close("text", output, expected)
    assert same.accepted_per_round == stats.accepted_per_round
    # of how many steps depends on how often torch has recompiled the function before: past a limit it runs it as it is
    assert runs
    num_runs = len(runs)  # its methods are the drafter's own
    assert_close("text of its decode", target.generate(prompt, custom_generate=compiled.decode, **SHORT), expected)
    assert len(runs) == num_runs


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", ["wrapped", "in_place"])
def test_a_compiled_drafter_reads_the_target_it_is_tied_to(make_target, prompt, how):
    targets = make_target(), make_target("llama", initializer_range=0.4)
    drafter, plain = build_drafter(targets[0], "target_head"), build_drafter(targets[0], "target_head")
    compiled = torch.compile(drafter, backend="eager")
    if how == "in_place":
        drafter.compile(backend="eager")
        compiled = drafter
    states = torch.randn(1, prompt.shape[1], 3 * drafter.config.hidden_size, generator=torch.Generator().manual_seed(0))
    options = {"target_hidden_states": states, "attention_mask": dict.fromkeys(drafter.config.layer_types)}
    found = []
    with torch.no_grad():
        for i in (0, 1, 0):
            drafter.load_target_embeddings(targets[i])
            plain.load_target_embeddings(targets[i])
            found.append(plain(prompt, **options).logits)
            assert_close(f"logits for target {i}", compiled(prompt, **options).logits, found[-1], 1e-5)
    assert not torch.equal(found[0], found[1])


def test_an_adapted_drafter_drafts_with_its_adapter(target, prompt):
    peft = pytest.importorskip("peft")
    drafter = build_drafter(target)
    expected, stats = speculate(target, drafter, prompt, **GREEDY, **CHAIN)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        drafter, peft.LoraConfig(target_modules=["fc"], r=8, lora_alpha=64, init_lora_weights=False)
    )
    output, other = speculate(target, adapted, prompt, **GREEDY, **CHAIN)
    assert_close("text", output, expected)
    assert other.accepted_per_round != stats.accepted_per_round, "the adapter changes nothing"
    with adapted.disable_adapter():
        output, same = speculate(target, adapted, prompt, **GREEDY, **CHAIN)
    assert_close("text without the adapter", output, expected)
    assert same.accepted_per_round == stats.accepted_per_round


def test_virtual_tokens_are_refused(target, prompt):
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(num_virtual_tokens=2, num_layers=1, token_dim=36, num_attention_heads=2)
    adapted = peft.PeftModel(build_drafter(target), config)
    with pytest.raises(ValueError, match="virtual tokens have no target states"):
        target.generate(prompt, assistant_model=adapted, **GREEDY)


def test_a_drafter_in_anything_else_is_refused(target, drafter, prompt):
    with pytest.raises(
        ValueError, match="assistant_model is a Sequential around a drafter; expected the drafter itself"
    ):
        target.generate(prompt, assistant_model=nn.Sequential(drafter), **GREEDY)


def test_what_holds_no_drafter_is_left_alone(target):
    for other in (None, "a name", target, nn.DataParallel(target), torch.compile(target, backend="eager")):
        assert drafter_in(other) is None
