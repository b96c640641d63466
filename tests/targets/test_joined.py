"""Linear layers that read the same input run as one product, by a copy of their weights."""

import gc

import pytest
import torch
from close import EXACT, assert_close
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from eagle31_hf.quantized import FEW_ROWS, QuantizedLinear
from eagle31_hf.targets import joined as module
from eagle31_hf.targets.joined import join, products, separate

SIZES = 12, 4, 8  # outputs of the layers
INPUTS = 16
NO_LIMIT = float("inf")


def layers_of(kind: str = "plain", bias: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    plain = [nn.Linear(INPUTS, size, bias=bias).eval() for size in SIZES]
    return plain if kind == "plain" else [QuantizedLinear(layer, kind) for layer in plain]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in ("aten::mm", "aten::addmm", "eagle31::quantized_linear")
        return func(*args, **(kwargs or {}))


def num_products(layers, x) -> int:
    with torch.no_grad(), Products() as counted:
        products(layers, x)
    return counted.count


def assert_same(layers, x) -> None:
    for got, layer in zip(products(layers, x), layers, strict=True):
        assert_close("product", got, layer(x), 1e-6)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", ["plain", "int8", "fp8"])
def test_one_product_gives_what_several_do(kind, bias):
    layers, x = layers_of(kind, bias), torch.randn(2, 3, INPUTS)
    assert num_products(layers, x) == 3
    join([layers], NO_LIMIT)
    assert num_products(layers, x) == 1
    assert_same(layers, x)


def test_many_rows_of_eight_bits_go_through_each_layer():
    layers, x = layers_of("int8"), torch.randn(1, FEW_ROWS + 1, INPUTS)
    join([layers], NO_LIMIT)
    for got, layer in zip(products(layers, x), layers, strict=True):
        assert_close("product", got, layer(x), EXACT)


def test_the_layers_stay_what_they_are():
    layers = layers_of(bias=True)
    found = [
        (parameter, parameter.data_ptr(), parameter.detach().clone())
        for parameter in nn.ModuleList(layers).parameters()
    ]
    join([layers], NO_LIMIT)
    for parameter, (one, place, values) in zip(nn.ModuleList(layers).parameters(), found, strict=True):
        assert parameter is one
        assert parameter.data_ptr() == place
        assert torch.equal(parameter, values)


def change_in_place(layers) -> None:
    with torch.no_grad():
        layers[1].weight.mul_(3)


def change_unseen(layers) -> None:
    layers[1].weight.data.mul_(3)


def load(layers) -> None:
    layers[1].load_state_dict({"weight": torch.ones_like(layers[1].weight)})


@pytest.mark.parametrize("change", [change_in_place, change_unseen, load])
def test_the_next_call_reads_weights_that_have_changed_at_the_same_place(change):
    layers, x = layers_of(), torch.randn(1, 2, INPUTS)
    (before,) = join([layers], NO_LIMIT)
    place = before.place
    change(layers)
    (after,) = join([layers], NO_LIMIT)
    assert after.place == place
    assert_same(layers, x)


def replace(layers) -> None:
    layers[1].weight = nn.Parameter(torch.randn(SIZES[1], INPUTS))


def cast(layers) -> None:
    for layer in layers:
        layer.double()


@pytest.mark.parametrize("change", [replace, cast])
def test_a_copy_of_other_weights_is_not_used_and_made_anew(change):
    layers = layers_of()
    (before,) = join([layers], NO_LIMIT)
    change(layers)
    x = torch.randn(1, 2, INPUTS, dtype=layers[0].weight.dtype)
    assert num_products(layers, x) == 3
    (after,) = join([layers], NO_LIMIT)
    assert after is not before
    assert num_products(layers, x) == 1
    assert_same(layers, x)


def of_another_dtype(layers: list) -> None:
    layers[1].bfloat16()


def with_a_forward(layers: list) -> None:
    vars(layers[1])["forward"] = lambda x: nn.functional.linear(x, layers[1].weight) + 1


def of_another_class(layers: list) -> None:
    layers[1] = nn.Sequential(layers[1])


def with_a_bias(layers: list) -> None:
    layers[1].bias = nn.Parameter(torch.ones(SIZES[1]))


@pytest.mark.parametrize("change", [of_another_dtype, with_a_forward, of_another_class, with_a_bias])
def test_what_cannot_be_joined_runs_by_itself(change):
    layers, x = layers_of(), torch.randn(1, 2, INPUTS)
    join([layers], NO_LIMIT)
    change(layers)
    assert join([layers], NO_LIMIT) == []
    if change is not of_another_dtype:
        assert_same(layers, x)


def test_copies_take_no_more_memory_than_they_may():
    first, second = layers_of(), layers_of()
    size = sum(layer.weight.nbytes for layer in first)
    assert [one.num_bytes for one in join([first, second], 1.5 * size)] == [size]
    assert num_products(second, torch.randn(1, 2, INPUTS)) == 3
    assert len(join([first, second], size)) == 2, "what is there already is not counted"


def test_without_memory_the_layers_run_one_by_one(monkeypatch):
    layers = layers_of()

    def fail(parts):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(module, "_room", fail)
    assert join([layers], NO_LIMIT) == []
    assert_same(layers, torch.randn(1, 2, INPUTS))


def test_a_copy_is_given_up_with_its_layers_or_when_it_is_asked_for():
    layers, others = layers_of(), layers_of()
    join([layers, others], NO_LIMIT)
    count = len(module._joined)
    separate([layers])
    assert num_products(layers, torch.randn(1, 2, INPUTS)) == 3
    del others
    gc.collect()
    assert len(module._joined) == count - 2
