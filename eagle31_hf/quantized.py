"""A drafter's linear layers held in 8 bits: on a GPU half the bytes that a draft step reads of them in bf16. The target
verifies what is drafted, so the text stays its own.

K width of a layer's input, N of its output.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .kernels.joint_linear import quantized_linear, weight_values

# kind -> the dtype that holds the weights, and the largest number it has. fp8 is held as bits: torch takes a tensor of
# float8 for one of floating point, and `drafter.to(dtype)` would make it one of 16 bits.
KINDS = {"int8": (torch.int8, 127.0), "fp8": (torch.uint8, 448.0)}
# Up to so many rows the operation runs, which reads the weight once; more, those of a prompt or of a large batch's
# trees, are multiplied by a copy of the weight in their own dtype.
FEW_ROWS = 64
# a small layer, parts of whose weight latent attention multiplies with queries and outputs
READ_AS_WEIGHT = "kv_b_proj"
REMEDY = "load the drafter again, without quantizing it."
UNWRAP = "merge adapters and quantize before compiling."
WRAPPERS = {"base_layer": "adapted by PEFT", "modules_to_save": "adapted by PEFT", "_orig_mod": "compiled by itself"}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class QuantizedLinear(nn.Module):
    """A linear layer (N, K) whose weight is int8, or the bits of float8_e4m3fn in uint8, with a scale (N,) in fp32: the
    largest magnitude of each row divided by the largest number of the kind. Only to draft with: nothing of it is
    trained. Its output has the dtype of its input, under autocast, too."""

    scale: Tensor

    def __init__(self, plain: nn.Linear, kind: str):
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.kind = kind
        weight, scale = quantized(plain.weight, kind)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = None if plain.bias is None else plain.bias.requires_grad_(False)
        self.train(plain.training)

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies x (..., K) by the weight -> (..., N). Raises RuntimeError in training mode, unless gradients
        are off."""
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"the drafter has {self.kind} weights and is in training mode; expected drafter.eval(), to draft. To"
                f" train it, {REMEDY}"
            )
        device = x.device.type
        is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        # a device that has no autocast would refuse torch's context
        with torch.autocast(device, enabled=False) if is_on else nullcontext():
            if x.shape[:-1].numel() <= FEW_ROWS:
                return quantized_linear(x, self.weight, self.scale, self.bias)
            return self.by_copy(x)

    def by_copy(self, x: Tensor) -> Tensor:
        """Computes what `forward` returns with torch's linear layer alone: makes a copy of the weight in the dtype of
        x (..., K), and multiplies by it -> (..., N)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.dequantized(x.dtype), bias)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight (N, K) as numbers of a dtype, rounded once."""
        return weight_values(self.weight).to(dtype).mul_(self.scale[:, None])

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedLinear":
        """Moves or casts the layer as torch does any module, but leaves the scale in fp32: `drafter.to(dtype)` asks
        for the dtype of activations and biases."""
        scale = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != torch.float32:
            self.scale = scale.to(self.scale.device)
        return self

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, kind={self.kind}"


@torch.no_grad()
def quantized(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Rounds a weight (N, K) to 8 bits. Returns the numbers of a kind, as `QuantizedLinear` holds them, and the scales
    (N,) of their rows. A row of zeros has the scale 1."""
    dtype, largest = KINDS[kind]
    weight = weight.contiguous()
    magnitudes = weight.abs().amax(dim=1).float()
    scale = torch.where(magnitudes > 0, magnitudes / largest, 1.0)
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # a row may be that small that its share vanishes
    numbers = (weight.float() / scale[:, None]).clamp(-largest, largest)
    return (numbers.round().to(dtype) if kind == "int8" else numbers.to(torch.float8_e4m3fn).view(dtype)), scale


def quantize(drafter: nn.Module, kind: str) -> None:
    """Replaces the linear layers of a drafter by quantized ones, in place; see `Eagle31PreTrainedModel.quantize`. A
    call that failed half way, for want of memory, goes on where it stopped."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(map(repr, KINDS))}.")
    known = kind_of(drafter)
    if known not in (None, kind):
        raise ValueError(f"the drafter's weights are {known} already; expected plain ones, to hold in {kind}: {REMEDY}")
    _check_plain(drafter)
    for parent, name in [(parent, name) for parent, name, _ in _linears(drafter)]:  # without holding the layers
        if name != READ_AS_WEIGHT:
            setattr(parent, name, QuantizedLinear(getattr(parent, name), kind))


def kind_of(model: nn.Module) -> str | None:
    """Returns the kind that a model's linear layers are quantized to; None where they are not."""
    return next((module.kind for module in model.modules() if isinstance(module, QuantizedLinear)), None)


def refuse_quantized(model: nn.Module, what: str) -> None:
    """Raises ValueError where a drafter is quantized, by us or by transformers; `what` it cannot be for that reason, as
    "saved"."""
    by_others = getattr(model, "quantization_method", None)
    kind = kind_of(model) or getattr(by_others, "value", by_others)
    if kind is not None:
        raise ValueError(f"a drafter with {kind} weights cannot be {what}; expected plain weights: {REMEDY}")


def check_state(model: nn.Module, state: Mapping[str, Any], prefix: str = "") -> None:
    """Raises ValueError where a state dict, whose names begin with `prefix`, holds other kinds of weights than a
    drafter has: 8 bits would be copied into numbers, or numbers cut off to 8 bits."""
    for name, module in model.named_modules():
        given = state.get(f"{prefix}{name}.weight")
        if isinstance(module, nn.Linear | QuantizedLinear) and isinstance(given, Tensor):
            expected = module.weight.dtype
            if given.dtype != expected and not (given.is_floating_point() and expected.is_floating_point):
                raise ValueError(
                    f"the state's {prefix}{name}.weight is {given.dtype}; expected {expected}, as the drafter's: load a"
                    " state into a drafter that is quantized, or not, as that of the state was."
                )


def refuse_quantized_state(state: Mapping[str, Any] | None) -> None:
    """Raises ValueError for the state dict of a quantized drafter, from which none is made."""
    for name, tensor in (state or {}).items():
        if name.endswith(".weight") and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            raise ValueError(f"the state's {name} is {tensor.dtype}; expected the state of a plain drafter: {REMEDY}")


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yields the linear layers of a model, with the modules that hold them and their names in these."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child


def _check_plain(model: nn.Module) -> None:
    """Raises ValueError where a linear layer of a drafter is not one that can be quantized: nothing is changed then."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        wrapper = next((attribute for attribute in WRAPPERS if hasattr(module, attribute)), None)
        if wrapper is not None:
            raise ValueError(f"{names[id(module)]} is {WRAPPERS[wrapper]}; expected plain modules: {UNWRAP}")
    if kind_of(model) is None and not any(True for _ in _linears(model)):
        raise ValueError(f"the drafter has no nn.Linear; expected plain ones, to be held in 8 bits: {REMEDY}")
    for _, _, layer in _linears(model):
        reason = _why_not(layer)
        if reason is not None:
            raise ValueError(f"{names[id(layer)]} {reason}")


def _why_not(layer: nn.Linear) -> str | None:
    """Returns why a linear layer cannot be quantized, and what to do instead; None where it can."""
    if type(layer) is not nn.Linear:
        kind = type(layer).__name__
        return f"is of {kind}; expected a plain nn.Linear: load the drafter without other quantization."
    if layer.weight.numel() == 0:
        return f"is of shape {tuple(layer.weight.shape)}; expected a weight that is not empty."
    if layer.weight.is_meta or hasattr(layer, "_hf_hook"):
        return "is on the meta device or offloaded; expected weights on a device: load the drafter whole."
    if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
        return "has hooks or another forward, which would be lost; expected neither: quantize first."
    if layer.weight.dtype not in FLOATS:
        return f"is of {layer.weight.dtype}; expected one of {', '.join(map(str, FLOATS))}."
    if not layer.weight.abs().amax().float().isfinite():
        return "holds NaN, or values beyond fp32; expected finite weights: load the drafter again."
    return None
