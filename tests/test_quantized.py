"""Drafters whose linear layers are held in 8 bits: what is quantized and how closely, what of a module stays as it was,
and what such a drafter is refused."""

import copy

import pytest
import torch
from close import FORWARD, assert_close
from factories import VARIANTS, build, inputs, target
from torch import nn

from eagle31_hf import (
    Eagle31DrafterModel,
    Eagle31Trainer,
    Eagle31TrainingArguments,
    export_checkpoint,
    upgrade_to_eagle31,
)
from eagle31_hf.quantized import FEW_ROWS, KINDS, QuantizedLinear, kind_of, quantized

# Of a weight that is quantized, the largest error as a share of its row's largest number: half a step of int8; of fp8
# half of the last step below the largest, which is 32.
ERRORS = {"int8": 0.5 / 127, "fp8": 16 / 448}
OF_KINDS = pytest.mark.parametrize("kind", KINDS)


def layers_of(drafter: nn.Module) -> dict[str, QuantizedLinear]:
    return {name: each for name, each in drafter.named_modules() if isinstance(each, QuantizedLinear)}


def held(layer: QuantizedLinear) -> torch.Tensor:
    return layer.dequantized(torch.float32)


# --- what is quantized ---


@OF_KINDS
@pytest.mark.parametrize("name", VARIANTS)
def test_linear_layers_are_replaced_and_nothing_else(name, kind):
    drafter = build(**VARIANTS[name])
    before = {name: each.weight.detach() for name, each in drafter.named_modules() if type(each) is nn.Linear}
    others = {name: weight for name, weight in drafter.named_parameters() if name.removesuffix(".weight") not in before}
    assert drafter.quantize(kind) is drafter
    assert kind_of(drafter) == kind
    found = layers_of(drafter)
    left = {name for name, each in drafter.named_modules() if type(each) is nn.Linear}
    assert left == {name for name in before if name.endswith("kv_b_proj")}
    assert found.keys() == before.keys() - left
    for where, layer in found.items():
        largest = before[where].abs().amax(dim=1, keepdim=True)
        assert ((held(layer) - before[where]).abs() <= ERRORS[kind] * 1.001 * largest).all(), where
        assert layer.weight.element_size() == 1
        assert_close("scale", layer.scale, largest[:, 0] / KINDS[kind][1], FORWARD)
    assert all(drafter.get_parameter(name) is weight for name, weight in others.items())


@OF_KINDS
def test_a_call_that_failed_half_way_can_be_repeated(monkeypatch, kind):
    drafter, calls = build(), []

    def without_memory(weight, kind):
        calls.append(weight)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("for this test")
        return quantized(weight, kind)

    monkeypatch.setattr("eagle31_hf.quantized.quantized", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        drafter.quantize(kind)
    assert len(layers_of(drafter)) == 2
    drafter.quantize(kind)
    assert not any(type(module) is nn.Linear for module in drafter.modules())


@OF_KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_all_sizes(kind, dtype):
    """Zeros, numbers as small and nearly as large as there are, and one number alone."""
    least = torch.finfo(dtype).smallest_normal if dtype != torch.float32 else 2.0**-140
    weight = torch.zeros(5, 3)
    weight[1:, 1] = torch.tensor([least, torch.finfo(dtype).max / 2, -1.0, 3.0])
    numbers, scale = quantized(weight.to(dtype), kind)
    layer = QuantizedLinear(nn.Linear(3, 5, bias=False), kind)
    layer.weight.data, layer.scale = numbers, scale
    assert scale.tolist()[0] == 1.0
    assert scale.isfinite().all()
    assert (scale > 0).all()
    found = held(layer)
    assert found.isfinite().all()
    assert_close("shares", found[2:, 1] / weight.to(dtype).float()[2:, 1], torch.ones(3), FORWARD)
    assert (found[:1] == 0).all()


@OF_KINDS
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_many_rows_and_few_are_multiplied_alike(rows, kind):
    torch.manual_seed(0)
    plain = nn.Linear(40, 30).requires_grad_(False)
    layer = QuantizedLinear(plain, kind).eval()
    x = torch.randn(rows, 40)
    assert_close("out", layer(x), nn.functional.linear(x, held(layer), plain.bias), FORWARD)
    expected = layer(x.bfloat16().float())
    low = layer.to(torch.bfloat16)(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert_close("in bf16", low.float(), expected, 0.02)


@OF_KINDS
@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle31", "two_layers", "mla"])
def test_a_forward_is_that_of_the_rounded_weights(name, kind):
    drafter = build(**VARIANTS[name])
    rounded = copy.deepcopy(drafter)
    drafter.quantize(kind)
    for where, layer in layers_of(drafter).items():
        rounded.get_parameter(f"{where}.weight").copy_(held(layer))
    tokens, states = inputs(drafter)
    for length in (5, 13):
        out, expected = (
            model(tokens[:, :length], target_hidden_states=states[:, :length]) for model in (drafter, rounded)
        )
        assert_close("logits", out.logits, expected.logits, 2 * FORWARD)


# --- what stays ---


@OF_KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_leave_weights_and_scales(kind, dtype):
    drafter = build(**VARIANTS["two_layers"]).quantize(kind)
    before = {name: (each.weight.clone(), each.scale.clone()) for name, each in layers_of(drafter).items()}
    drafter.to(dtype)
    assert drafter.dtype == drafter.like.dtype == dtype
    for where, layer in layers_of(drafter).items():
        assert torch.equal(layer.weight, before[where][0])
        assert torch.equal(layer.scale, before[where][1])
        assert layer.bias is None or layer.bias.dtype == dtype
    tokens, states = inputs(drafter)
    assert drafter(tokens, target_hidden_states=states.to(dtype)).logits.dtype == dtype


@OF_KINDS
def test_copies_and_states(kind):
    drafter = build().quantize(kind)
    other = build(seed=1).quantize(kind)
    tokens, states = inputs(drafter)
    logits = drafter(tokens, target_hidden_states=states).logits
    other.load_state_dict(drafter.state_dict())
    for same in (copy.deepcopy(drafter), other):
        assert torch.equal(same(tokens, target_hidden_states=states).logits, logits)
    assert copy.deepcopy(drafter).to("meta").fc.scale.dtype == torch.float32


def test_a_state_of_another_kind_is_not_loaded():
    """Nothing of it is: norms neither."""
    made = {None: build(), "int8": build().quantize("int8"), "fp8": build().quantize("fp8")}
    for drafter in made.values():
        before = copy.deepcopy(drafter.state_dict())
        for other in made.values():
            if other is not drafter:
                state = {name: tensor + 1 for name, tensor in other.state_dict().items()}
                for model in (drafter, nn.ModuleDict({"drafter": drafter})):  # as it is, and in another module
                    named = state if model is drafter else {f"drafter.{name}": each for name, each in state.items()}
                    with pytest.raises(ValueError, match=r"expected torch\.\w+, as the drafter's: load a state into"):
                        model.load_state_dict(named, strict=False)
        assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    with pytest.raises(ValueError, match="expected the state of a plain drafter"):
        Eagle31DrafterModel.from_pretrained(None, config=build().config, state_dict=made["int8"].state_dict())


def test_wrapped_layers_are_refused():
    drafter = build()
    drafter.fc = torch.compile(drafter.fc, backend="eager")
    with pytest.raises(ValueError, match="fc is compiled by itself; expected plain modules"):
        drafter.quantize("int8")
    with pytest.raises(ValueError, match=r"kind is \['int8'\]; expected one of 'int8', 'fp8'"):
        build().quantize(["int8"])


def test_under_autocast_sums_are_in_fp32():
    layer = layers_of(build().eval().quantize("int8"))["fc"]
    x = torch.randn(3, layer.in_features)
    with torch.no_grad():
        expected = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), expected)


def test_bytes_of_the_layers():
    drafter = build(hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    count = drafter.num_parameters()
    size = {name: each.weight.nbytes for name, each in drafter.named_modules() if type(each) is nn.Linear}
    drafter.quantize("int8")
    for where, layer in layers_of(drafter).items():
        assert layer.weight.nbytes * 2 == size[where]
    assert drafter.num_parameters() == count
    assert drafter.dtype == torch.bfloat16


@OF_KINDS
@torch.no_grad()
def test_compiled_drafters(kind):
    """Before and after it is quantized, a compiled drafter computes what it computes uncompiled."""
    torch._dynamo.reset()
    drafter = build()
    compiled = torch.compile(drafter, backend="eager")
    tokens, states = inputs(drafter)
    plain = compiled(tokens, target_hidden_states=states).logits
    assert compiled.quantize(kind) is drafter
    logits = compiled(tokens, target_hidden_states=states).logits
    assert_close("logits", logits, drafter(tokens, target_hidden_states=states).logits, FORWARD)
    assert not torch.equal(logits, plain)
    torch._dynamo.reset()


def test_a_head_tied_to_the_embedding_is_untied():
    drafter = build(draft_vocab_size=61)
    drafter.lm_head.weight = drafter.embed_tokens.weight
    table = drafter.embed_tokens.weight
    drafter.quantize("int8")
    assert drafter.embed_tokens.weight is table
    assert drafter.lm_head.weight.dtype == torch.int8


def test_a_shared_head_stays_the_targets_own():
    drafter = build(share_target_head=True, draft_vocab_size=61)
    model = target()
    drafter.load_target_embeddings(model)
    drafter.quantize("int8")
    assert type(model.lm_head) is nn.Linear
    assert drafter.get_output_embeddings() is model.lm_head
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


# --- what is refused ---


def test_kinds():
    drafter = build()
    with pytest.raises(ValueError, match="kind is 'int4'; expected one of 'int8', 'fp8'"):
        drafter.quantize("int4")
    assert kind_of(drafter) is None
    layer = drafter.quantize("int8").fc
    assert drafter.quantize("int8").fc is layer
    with pytest.raises(ValueError, match=r"int8 already; expected plain ones, to hold in fp8: load"):
        drafter.quantize("fp8")


def not_finite(drafter: Eagle31DrafterModel) -> None:
    drafter.lm_head.weight.data[3, 1] = float("nan")


def infinite(drafter: Eagle31DrafterModel) -> None:
    drafter.layers[0].mlp.up_proj.weight.data[0, 0] = float("inf")


def another_class(drafter: Eagle31DrafterModel) -> None:
    torch.nn.utils.parametrizations.weight_norm(drafter.fc)


def hooked(drafter: Eagle31DrafterModel) -> None:
    drafter.fc.register_forward_hook(lambda *args: None)


def on_meta(drafter: Eagle31DrafterModel) -> None:
    drafter.to("meta")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (not_finite, "lm_head holds NaN, or values beyond fp32; expected finite weights"),
        (infinite, "up_proj holds NaN, or values beyond fp32"),
        (another_class, "fc is of ParametrizedLinear; expected a plain nn.Linear"),
        (hooked, "fc has hooks"),
        (on_meta, "on the meta device or offloaded; expected weights on a device"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_quantized_is_left_as_it_is(change, words):
    drafter = build()
    change(drafter)
    with pytest.raises(ValueError, match=words):
        drafter.quantize("int8")
    assert kind_of(drafter) is None


def test_drafters_with_adapters():
    peft = pytest.importorskip("peft")
    drafter = build()
    adapted = peft.get_peft_model(drafter, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="is adapted by PEFT; expected plain modules: merge"):
        drafter.quantize("int8")
    assert adapted.merge_and_unload().quantize("int8").layers[0].self_attn.q_proj.kind == "int8"


@OF_KINDS
def test_nothing_is_written(tmp_path, kind):
    drafter = build().quantize(kind)
    for refused in (
        lambda: drafter.save_pretrained(tmp_path / "saved"),
        lambda: drafter.push_to_hub("someone/somewhere"),
        lambda: export_checkpoint(drafter, tmp_path / "exported"),
    ):
        with pytest.raises(ValueError, match=f"{kind} weights cannot be .*; expected plain weights: load"):
            refused()
    assert not list(tmp_path.iterdir())


def test_it_is_not_upgraded():
    drafter = build(**VARIANTS["eagle3"]).quantize("int8")
    with pytest.raises(ValueError, match="cannot be upgraded"):
        upgrade_to_eagle31(drafter, target(), [torch.arange(50)[None]])


def test_it_is_not_trained(tmp_path):
    drafter = build().quantize("int8")
    arguments = Eagle31TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="int8 weights cannot be trained"):
        Eagle31Trainer(model=drafter, args=arguments, train_dataset=[], target=target())
    assert not list(tmp_path.iterdir())
    tokens, states = inputs(drafter)
    with pytest.raises(RuntimeError, match=r"int8 weights and is in training mode; expected drafter\.eval"):
        drafter.train()(tokens, target_hidden_states=states)
    with torch.no_grad():
        drafter(tokens, target_hidden_states=states)
