"""Linear layers that read the same input run as one operation, where they are plain."""

import pytest
import torch
from close import assert_close
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from eagle31_hf.quantized import QuantizedLinear
from eagle31_hf.targets.decoder_layer import products, through_mlp

SIZES = 12, 4, 8  # outputs of the layers
INPUTS = 16


def layers_of(bias: bool = False) -> list:
    torch.manual_seed(0)
    return [nn.Linear(INPUTS, size, bias=bias).eval() for size in SIZES]


class Counted(TorchDispatchMode):
    """Counts the operations of the library, by name."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("eagle31::"):
            self.names.append(func.name().removeprefix("eagle31::"))
        return func(*args, **(kwargs or {}))


def assert_same(layers, names: list[str]) -> None:
    """Asserts that the products are those of the layers, by operations of these names."""
    x = torch.randn(2, 3, INPUTS)
    with torch.no_grad(), Counted() as counted:
        found = products(layers, x)
    assert counted.names == names
    for got, layer in zip(found, layers, strict=True):
        assert_close("product", got, layer(x), 1e-6)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_one_operation_gives_what_several_layers_do(bias):
    assert_same(layers_of(bias), ["joint_linear"])


def with_a_forward(layers: list) -> None:
    vars(layers[1])["forward"] = lambda x: nn.functional.linear(x, layers[1].weight) + 1


def of_another_class(layers: list) -> None:
    layers[1] = nn.Sequential(layers[1])
    layers[1].bias = None


def with_a_bias(layers: list) -> None:
    layers[1].bias = nn.Parameter(torch.ones(SIZES[1]))


@pytest.mark.parametrize("change", [with_a_forward, of_another_class, with_a_bias])
def test_layers_that_are_not_plain_run_one_by_one(change):
    layers = layers_of()
    change(layers)
    assert_same(layers, [])


def test_layers_of_8_bits_run_one_by_one():
    assert_same([QuantizedLinear(layer, "int8") for layer in layers_of()], ["quantized_linear"] * 3)


class Wrapped(torch.Tensor):
    """A tensor whose values are another's, as torchao's are."""

    def __tensor_flatten__(self):
        return [], None


def test_weights_that_no_kernel_can_read_are_left_to_their_layers():
    layers = layers_of()
    layers[1].weight = nn.Parameter(layers[1].weight.detach().as_subclass(Wrapped))
    assert_same(layers, [])


@pytest.mark.parametrize(("bias", "names"), [(False, ["gated_linear", "joint_linear"]),
                                             (True, ["joint_linear", "joint_linear"])])  # fmt: skip
def test_a_gated_mlp(bias, names):
    torch.manual_seed(0)
    mlp = nn.Module()
    mlp.gate_proj, mlp.up_proj = (nn.Linear(INPUTS, 24, bias=bias) for _ in range(2))
    mlp.down_proj, x = nn.Linear(24, INPUTS, bias=False), torch.randn(1, 3, INPUTS)
    with torch.no_grad(), Counted() as counted:
        out = through_mlp(mlp, x)
    assert counted.names == names
    expected = mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert_close("out", out, expected.detach(), 1e-6)
