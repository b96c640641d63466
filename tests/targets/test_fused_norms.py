"""Norms of a target as one operation each: which they are, what they compute, and that none is left behind."""

import copy
import pickle
import threading

import pytest
import torch
from close import FORWARD, assert_close
from conftest import VOCAB, build_target
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eagle31_hf.targets.fused_norms import fused_norms, usual_norms

TOKENS = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))


def logits_of(target):
    with torch.no_grad():
        return target(TOKENS, use_cache=False).logits


def calls_within(target, monkeypatch):
    """Returns the target's logits with its norms fused, and how often torch's operation ran."""
    calls, own = [], nn.functional.rms_norm
    monkeypatch.setattr(nn.functional, "rms_norm", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    with fused_norms(target, usual_norms(target)):
        calls.clear()
        return logits_of(target), len(calls)


# two norms a layer, two of queries and keys, and one at the end
@pytest.mark.parametrize(("kind", "a_layer"), [("llama", 2), ("qwen3", 4), ("gemma3_window_8", 0), ("gpt2", 0)])
def test_every_usual_norm_runs_as_one_operation(kind, a_layer, monkeypatch):
    target = build_target(kind)
    wanted = a_layer * target.config.num_hidden_layers + bool(a_layer)
    assert len(usual_norms(target)) == wanted
    found, count = calls_within(target, monkeypatch)
    assert count == wanted
    assert_close("logits", found, logits_of(target), FORWARD)


def test_whatever_the_default_device_is():
    target = build_target("llama")
    expected = len(usual_norms(target))
    with torch.device("meta"):
        assert len(usual_norms(target)) == expected > 0


def test_in_16_bits_the_norm_is_rounded_once():
    norm = LlamaRMSNorm(16).bfloat16()
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    exact = LlamaRMSNorm(16)
    exact.weight.data = norm.weight.data.float()
    with torch.no_grad(), fused_norms(norm, usual_norms(norm)):
        assert norm(x).equal(exact(x.float()).bfloat16())


def test_states_in_another_dtype_than_the_weight_are_normed_as_before():
    norm = LlamaRMSNorm(16)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad(), fused_norms(norm, usual_norms(norm)):
        assert norm(x).dtype == LlamaRMSNorm(16)(x).dtype


class Shifted(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) + x * self.weight


class WithoutEps(LlamaRMSNorm):
    def forward(self, x):
        return self.weight * x * x.square().mean(-1, keepdim=True).rsqrt()


class Gated(LlamaRMSNorm):
    def forward(self, x, gate):
        return super().forward(x) * gate


class Asserting(LlamaRMSNorm):
    def forward(self, x):
        assert x.dim() == 3
        return super().forward(x)


class OfTwo(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x), x


class InFp32(LlamaRMSNorm):
    """One that returns its states in fp32, whatever it is given."""

    def __init__(self, width):
        super().__init__(width)
        self.bfloat16()

    def forward(self, x):
        return super().forward(x).float()


class Scalar(nn.Module):
    eps = 1e-6

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return x * self.weight


class Elsewhere(LlamaRMSNorm):
    """One whose weight another part of the program keeps, and brings when it runs."""

    def __init__(self, width):
        super().__init__(0)


OTHERS = [Shifted, WithoutEps, Gated, Asserting, OfTwo, InFp32, Scalar, Elsewhere]


def test_a_weight_that_is_offloaded_is_left_alone():
    assert usual_norms(LlamaRMSNorm(16).to("meta")) == []


class MayBeGated(LlamaRMSNorm):
    def forward(self, x, gate=1.0):
        return super().forward(x) * gate


def test_what_a_norm_is_given_besides_is_not_dropped():
    norm = MayBeGated(16)
    x = torch.randn(3, 16)
    with torch.no_grad(), fused_norms(norm, usual_norms(norm)):
        assert "forward" in vars(norm)
        assert norm(x, 3.0).equal(MayBeGated(16)(x, 3.0))
        assert norm(x, gate=3.0).equal(MayBeGated(16)(x, 3.0))


def test_a_compiled_layer_stays_compiled_however_often_it_is_read():
    frames, target = [], build_target("llama")

    def counting(graph, inputs):
        def run(*given):
            frames.append(1)
            return graph(*given)

        return run

    torch._dynamo.reset()  # what other tests compiled of the same code counts, too
    for layer in target.model.layers:
        layer.compile(backend=counting)
    norms = usual_norms(target)
    assert [norm.module for norm in norms] == [target.model.norm]
    for _ in range(12):  # torch gives up after eight
        frames.clear()
        with fused_norms(target, norms):
            logits_of(target)
        assert len(frames) >= target.config.num_hidden_layers


def test_a_target_that_is_compiled_as_a_whole_is_left_alone():
    assert usual_norms(torch.compile(build_target("llama"), backend="eager")) == []


@pytest.mark.parametrize("kind", OTHERS)
def test_a_norm_of_another_kind_is_left_alone(kind):
    assert usual_norms(kind(16)) == []


def test_a_norm_whose_forward_was_replaced_is_left_alone():
    norm = LlamaRMSNorm(16)
    norm.forward = lambda x: 2 * x
    assert usual_norms(norm) == []


def test_a_layer_norm_without_bias_is_left_alone():
    assert usual_norms(nn.LayerNorm(16, bias=False)) == []


def test_no_forward_is_left_behind_by_an_error():
    target = build_target("llama")
    with pytest.raises(KeyError), fused_norms(target, usual_norms(target)):
        raise KeyError
    assert not [module for module in target.modules() if "forward" in vars(module)]


def test_what_a_user_put_there_meanwhile_stays():
    norm = LlamaRMSNorm(16)
    with fused_norms(norm, usual_norms(norm)):
        norm.forward = len
    assert norm.forward is len


def test_the_last_of_several_contexts_of_threads_restores():
    target = build_target("llama")
    norms, inside, leave = usual_norms(target), threading.Event(), threading.Event()

    def other():
        with fused_norms(target, norms):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with fused_norms(target, norms):
        thread.start()
        assert inside.wait(60)
    assert all("forward" in vars(norm.module) for norm in norms)
    leave.set()
    thread.join()
    assert not any("forward" in vars(norm.module) for norm in norms)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda target: pickle.loads(pickle.dumps(target))])
def test_a_copy_made_meanwhile_runs_its_own_norms(copied):
    target = build_target("llama")
    with fused_norms(target, usual_norms(target)):
        made = copied(target)
    made.model.norm.weight.data.fill_(2.0)
    target.model.norm.weight.data.fill_(2.0)
    assert_close("logits", logits_of(made), logits_of(target), FORWARD)
