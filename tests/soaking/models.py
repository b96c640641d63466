"""Targets, what users wrap them in, and drafters beside them: the first three axes of the soak.

A wrapper takes a target of its own, to do with as it likes, and returns what the user calls `generate` on, or None
where it cannot wrap it.
"""

import tempfile
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from importlib.util import find_spec

import conftest
import families
import torch
from torch import nn
from transformers import PreTrainedModel

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.targets.layers import decoder_layers

ATTENTIONS = families.ATTENTIONS
KEPT = 48  # models kept for later runs
REFUSED = {name for name, family in families.FAMILIES.items() if families.REFUSED in (family.chain, family.tree)}
REFUSED |= {name for name, family in families.FAMILIES.items() if family.bug and families.LOSSLESS in family.bug.words}
FAMILIES = [*conftest.TARGETS, *(name for name in families.FAMILIES if name not in REFUSED)]


@lru_cache(KEPT)
def bare_target(family: str, attention: str) -> PreTrainedModel:
    """Of this attention implementation, or of the other where the family has not this one."""
    if family in conftest.TARGETS:
        return conftest.build_target(family, attention)
    try:
        return families.build_target.__wrapped__(family, attention)
    except families.NotThereError:
        return families.build_target.__wrapped__(family, "eager")


@lru_cache(KEPT)
def target_of(family: str, attention: str, wrapper: str) -> PreTrainedModel:
    """What the user calls; the bare target where this wrapper cannot wrap it."""
    bare = bare_target(family, attention)
    if wrapper == "none" or any(wrapper in names for names in ABSENT.values()):
        return bare
    torch.manual_seed(2)
    wrapped = WRAPPERS[wrapper](deepcopy(bare))
    return bare if wrapped is None else wrapped


@lru_cache(KEPT)
def drafter_of(family: str, drafter: str, attention: str) -> Eagle31DrafterModel:
    """Knows the text the bare target says after `conftest.PROMPT`, errors included."""
    target = bare_target(family, "eager")
    width = target.get_input_embeddings().weight.shape[1]
    sizes = {"target_hidden_size": width} if drafter == "own_embedding" else {"hidden_size": width}
    if drafter == "padded_vocabulary":
        sizes["vocab_size"] = target.config.get_text_config().vocab_size + 5
    built = conftest.build_drafter(target, drafter, attention, **sizes)
    built.requires_grad_(False)
    return built


def forget_models() -> None:
    for function in (bare_target, target_of, drafter_of, conftest.greedy_text):
        function.cache_clear()


# --- wrappers ---


class Anything:
    """Mixed into a target's class: a forward that shows none of its arguments."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def as_subclass(target: PreTrainedModel) -> PreTrainedModel:
    target.__class__ = type(type(target).__name__, (Anything, type(target)), {})
    return target


def with_adapter(
    config: Callable[[PreTrainedModel], object], then: Callable[[nn.Module], nn.Module] = lambda model: model
):
    """A wrapper: the target with this adapter of peft, of random weights."""

    def wrap(target: PreTrainedModel) -> nn.Module | None:
        import peft

        chosen = config(target)
        if chosen is None:
            return None
        model = peft.get_peft_model(target, chosen).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name or "ia3_" in name:
                    weight.add_(0.05 * torch.randn(weight.shape))
        return then(model)

    return wrap


def lora(target: PreTrainedModel):
    from peft import LoraConfig

    return (
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        if has(target, "q_proj", "v_proj")
        else None
    )


def ia3(target: PreTrainedModel):
    from peft import IA3Config

    if not has(target, "k_proj", "v_proj", "down_proj"):
        return None
    return IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )


def has(target: nn.Module, *names: str) -> bool:
    """Whether the decoder has linear layers of all these names."""
    found = {
        name.rpartition(".")[2] for name, module in decoder_layers(target).named_modules() if type(module) is nn.Linear
    }
    return found >= set(names)


def second_adapter(model):
    model.add_adapter("second", deepcopy(model.peft_config["default"]))
    model.set_adapter("second")
    return model


def disabled(model):
    model.base_model.disable_adapter_layers()
    return model


def compiled(target: PreTrainedModel) -> nn.Module:
    return torch.compile(target, backend="eager")


def compiled_in_place(target: PreTrainedModel) -> PreTrainedModel:
    target.compile(backend="eager")
    return target


def compiled_forward(target: PreTrainedModel) -> PreTrainedModel:
    target.forward = torch.compile(target.forward, backend="eager")
    return target


def offloaded_to_cpu(target: PreTrainedModel) -> PreTrainedModel:
    from accelerate import cpu_offload

    return cpu_offload(target, execution_device=torch.device("cpu"))


def offloaded_to_disk(target: PreTrainedModel) -> PreTrainedModel:
    from accelerate import disk_offload

    folder = tempfile.TemporaryDirectory()
    weakref.finalize(target, folder.cleanup)
    return disk_offload(target, folder.name, execution_device=torch.device("cpu"))


def hooked(target: PreTrainedModel) -> PreTrainedModel:
    """By accelerate, on every module, as `device_map` does."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for module in target.modules():
        add_hook_to_module(module, AlignDevicesHook(torch.device("cpu"), io_same_device=True))
    return target


def quantized(kind: str, **options) -> Callable[[PreTrainedModel], PreTrainedModel | None]:
    """A wrapper: the linear layers of the target's decoder replaced by bitsandbytes' of this kind."""

    def wrap(target: PreTrainedModel) -> PreTrainedModel | None:
        import bitsandbytes

        linears = [
            (parent, name, child)
            for parent in decoder_layers(target).modules()
            for name, child in parent.named_children()
            if type(child) is nn.Linear
        ]
        for parent, name, child in linears:
            layer = getattr(bitsandbytes.nn, kind)(
                child.in_features, child.out_features, child.bias is not None, **options
            )
            layer.load_state_dict(child.state_dict())
            setattr(parent, name, layer.to("cpu").requires_grad_(False))
        return target if linears else None

    return wrap


WRAPPERS: dict[str, Callable[[PreTrainedModel], nn.Module | None] | None] = {
    "none": None,
    "any arguments": as_subclass,
    "lora": with_adapter(lora),
    "lora, merged": with_adapter(lora, lambda model: model.merge_and_unload()),
    "lora, disabled": with_adapter(lora, disabled),
    "lora, two": with_adapter(lora, second_adapter),
    "ia3": with_adapter(ia3),
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "compiled forward": compiled_forward,
    "offloaded to cpu": offloaded_to_cpu,
    "offloaded to disk": offloaded_to_disk,
    "hooked": hooked,
    "8 bit": quantized("Linear8bitLt", has_fp16_weights=False),
    "4 bit": quantized("Linear4bit", compute_dtype=torch.float32, quant_type="nf4"),
}
NEEDS = {"peft": ("lora", "ia3"), "bitsandbytes": ("8 bit", "4 bit")}
ABSENT = {  # by package, the wrappers that cannot be had
    package: [name for name in WRAPPERS if name.startswith(words)]
    for package, words in NEEDS.items()
    if find_spec(package) is None
}
torch._dynamo.config.cache_size_limit = 2  # recompilations, of seconds each; what comes after runs as it is
