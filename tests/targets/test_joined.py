"""Linear layers that read the same input run as one product, once their weights lie side by side."""

import copy

import pytest
import torch
from close import EXACT, assert_close
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from eagle31_hf.quantized import FEW_ROWS, QuantizedLinear
from eagle31_hf.targets.joined import lay_side_by_side, products

SIZES = 12, 4, 8  # outputs of the layers
INPUTS = 16
KINDS = ("plain", "int8", "fp8")


def layers_of(kind: str = "plain", bias: bool = False, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    torch.manual_seed(0)
    plain = [nn.Linear(INPUTS, size, bias=bias, dtype=dtype).eval() for size in SIZES]
    return plain if kind == "plain" else [QuantizedLinear(layer, kind) for layer in plain]


def places(layers: list[nn.Module]) -> list[int]:
    return [layer.weight.data_ptr() for layer in layers]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in ("aten::mm", "aten::addmm", "eagle31::quantized_linear")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_product_gives_what_several_do(kind, bias):
    layers, x = layers_of(kind, bias), torch.randn(2, 3, INPUTS)
    expected = [layer(x) for layer in layers]
    with torch.no_grad(), Products() as apart:
        products(layers, x)
    lay_side_by_side([layers])
    with torch.no_grad(), Products() as joined:
        got = products(layers, x)
    assert (apart.count, joined.count) == (3, 1)
    for one, other, layer in zip(got, expected, layers, strict=True):
        assert_close("product", one, other, 1e-6)
        assert_close("the layer's own", layer(x), other, 1e-6)


def test_many_rows_of_eight_bits_go_through_each_layer():
    layers, x = layers_of("int8"), torch.randn(1, FEW_ROWS + 1, INPUTS)
    expected = [layer(x) for layer in layers]
    lay_side_by_side([layers])
    for got, wanted in zip(products(layers, x), expected, strict=True):
        assert_close("product", got, wanted, 1e-6)


def test_parameters_stay_what_they_are_and_memory_too():
    layers = layers_of(bias=True)
    model = nn.ModuleList(layers)
    parameters, state = list(model.parameters()), copy.deepcopy(model.state_dict())
    lay_side_by_side([layers])
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)
    storages = {layer.weight.untyped_storage().data_ptr(): layer.weight.untyped_storage().nbytes() for layer in layers}
    assert sum(storages.values()) == sum(layer.weight.nbytes for layer in layers)
    assert copy.deepcopy(layers[0]).weight.untyped_storage().nbytes() == layers[0].weight.nbytes


def test_a_weight_that_is_changed_in_place_counts():
    layers, x = layers_of(), torch.randn(1, 2, INPUTS)
    lay_side_by_side([layers])
    with torch.no_grad():
        layers[1].weight.mul_(3)
    assert_close("product", products(layers, x)[1], layers[1](x), 1e-6)


def test_nothing_moves_twice():
    layers = layers_of()
    lay_side_by_side([layers])
    found = places(layers)
    lay_side_by_side([layers])
    assert places(layers) == found


def of_another_dtype(layers: list) -> None:
    layers[1].bfloat16()


def with_a_forward(layers: list) -> None:
    vars(layers[1])["forward"] = lambda x: nn.functional.linear(x, layers[1].weight) + 1


def of_another_class(layers: list) -> None:
    layers[1] = nn.Sequential(layers[1])


def with_a_bias(layers: list) -> None:
    layers[1].bias = nn.Parameter(torch.ones(SIZES[1]))


def in_one_memory_with_others(layers: list) -> None:
    layers[1].weight = nn.Parameter(torch.randn(3 * SIZES[1], INPUTS)[: SIZES[1]])


def of_inference_mode(layers: list) -> None:
    with torch.inference_mode():
        layers[1].weight = nn.Parameter(torch.randn(SIZES[1], INPUTS), requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [of_another_dtype, with_a_forward, of_another_class, with_a_bias, in_one_memory_with_others, of_inference_mode],
)
def test_what_cannot_be_joined_stays_and_runs_by_itself(change):
    layers, x = layers_of(), torch.randn(1, 2, INPUTS)
    change(layers)
    weights = [next(layer.parameters()) for layer in layers]
    found = [weight.data_ptr() for weight in weights]
    lay_side_by_side([layers])
    assert [weight.data_ptr() for weight in weights] == found
    if change is not of_another_dtype:
        for got, layer in zip(products(layers, x), layers, strict=True):
            assert_close("product", got, layer(x), EXACT)


def test_without_memory_all_stays(monkeypatch):
    first, second = layers_of(), layers_of()
    lay_side_by_side([first])
    found = places(second)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "cat", fail)
    lay_side_by_side([first, second])
    assert places(second) == found
    assert all(layer(torch.ones(INPUTS)).isfinite().all() for layer in (*first, *second))
