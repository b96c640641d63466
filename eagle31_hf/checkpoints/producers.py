"""The producers of EAGLE 3 checkpoints, and the signs in config and tensor names by which each is recognized."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..configuration import Eagle31Config
from .files import CheckpointFiles
from .keys import eagle_config


@dataclass(frozen=True)
class Producer:
    """A library or model family that writes checkpoints, and the ways in which these differ from others.

    `detect` returns the sign by which a checkpoint is this producer's, or None. `convention` is how it counts the layer
    ids it nests in `eagle_config` (see `layer_ids`), None where it has counted in both ways.
    """

    name: str
    detect: Callable[[CheckpointFiles], str | None]
    convention: str | None = None
    norm_output_had_two_meanings: bool = False


def architecture(config: dict[str, Any]) -> str:
    """Returns the first of the config's architectures, "" where it names none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def drafter_sign(config: dict[str, Any]) -> str | None:
    """Returns the key and value by which a config.json is a drafter's; None for that of a target."""
    if config.get("model_type") == Eagle31Config.model_type:
        return f"model_type {Eagle31Config.model_type!r}"
    if "speculators_model_type" in config:
        return f"speculators_model_type {str(config['speculators_model_type'])[:80]!r}"
    names = config.get("architectures")
    for name in map(str, names if isinstance(names, list) else [names]):
        # NVIDIA's Eagle models, which read images, are targets.
        if "eagle" in name.lower() and not name.endswith("ForConditionalGeneration"):
            return f"architecture {name[:80]!r}"
    return None


def has_key(*keys: str, nested: bool = False) -> Callable[[CheckpointFiles], str | None]:
    """Returns a detector of any of these keys in config.json, or with `nested` also in its eagle_config."""

    def detect(files: CheckpointFiles) -> str | None:
        places = [files.config, eagle_config(files.config)] if nested else [files.config]
        found = next((key for key in keys for place in places if key in place), None)
        return None if found is None else f"config.json has {found}"

    return detect


def _native(files: CheckpointFiles) -> str | None:
    return "config.json says model_type eagle31" if files.config.get("model_type") == "eagle31" else None


def _torchspec(files: CheckpointFiles) -> str | None:
    found = next((key for key in files.metadata if key.startswith("torchspec")), None)
    return f"the weights' header has {found}" if found else has_key("_torchspec_version")(files)


def _torchspec_mla(files: CheckpointFiles) -> str | None:
    return _torchspec(files) if any("kv_a_proj_with_mqa" in name for name in files.tensors) else None


def _modelopt(files: CheckpointFiles) -> str | None:
    producer = files.config.get("producer")
    if isinstance(producer, dict) and producer.get("name") == "modelopt":
        return "config.json names the producer modelopt"
    return has_key("use_mtp_layernorm", "use_last_layernorm", "use_input_layernorm_in_first_layer", nested=True)(files)


def _nemo(files: CheckpointFiles) -> str | None:
    if "DraftModel" in architecture(files.config):
        return f"config.json names the architecture {architecture(files.config)}"
    is_prefixed = any(name.startswith("model.layers.0.") for name in files.tensors)
    return "tensors are named model.layers.0.*" if is_prefixed else None


def _angelslim(files: CheckpointFiles) -> str | None:
    if architecture(files.config) == "Eagle3LlamaForCausalLM":
        return "config.json names the architecture Eagle3LlamaForCausalLM"
    lists_ids = "eagle_aux_hidden_state_layer_ids" in files.config and "eagle_config" not in files.config
    if lists_ids and _has_midlayer(files):
        return "tensors are named midlayer.* and config.json lists layer ids at its top level"
    return has_key("aux_hidden_states_layer_ids", "eagle_aux_injection_mode")(files)


def _original(files: CheckpointFiles) -> str | None:
    is_pickle = any(file.suffix == ".bin" for file in files.weight_files)
    is_plain = architecture(files.config) == "LlamaForCausalLM"
    if not _has_midlayer(files) or "eagle_config" in files.config or not (is_pickle or is_plain):
        return None
    where = "in a pickle" if is_pickle else "under a plain LlamaForCausalLM"
    return f"tensors are named midlayer.* {where}, config.json has no eagle_config"


def _specforge(files: CheckpointFiles) -> str | None:
    if architecture(files.config) == "LlamaForCausalLMEagle3" and _has_midlayer(files) and "t2d" in files.tensors:
        return "LlamaForCausalLMEagle3 with tensors named midlayer.* and t2d"
    return None


def _has_midlayer(files: CheckpointFiles) -> bool:
    return any(name.startswith("midlayer.") for name in files.tensors)


NATIVE = "eagle31_hf"
SPECULATORS = "speculators"
EXPORTED_BY = "exported_by"
PRODUCERS = (
    Producer(NATIVE, _native, "boundary"),
    Producer("eagle31_hf export", has_key(EXPORTED_BY), "boundary"),
    Producer(
        SPECULATORS, has_key("speculators_config", "speculators_model_type", "transformer_layer_config"), "boundary"
    ),
    Producer("TorchSpec (MLA)", _torchspec_mla),  # LightSeek's Kimi heads count either way
    Producer("TorchSpec", _torchspec, "output"),
    # These three train what neither engines nor this library compute (nvidia-modelopt 0.47, nemo-automodel 0.7,
    # angelslim 0.5): ModelOpt norms the fused state with input_layernorm, too; NeMo's MLA has a YaRN temperature of its
    # own; AngelSlim rotates at base 10000, whatever rope_theta says.
    Producer("NVIDIA ModelOpt", _modelopt),
    Producer("NeMo Automodel", _nemo, "output"),
    Producer("AngelSlim", _angelslim, "boundary"),
    Producer("nebius", has_key("truncated_vocab_size")),
    Producer("original EAGLE 3 release", _original, "output"),
    Producer("SpecForge", _specforge, "output", norm_output_had_two_meanings=True),
    Producer(
        "vLLM / SGLang layout",
        lambda files: "fc.weight and layers.0.hidden_norm.weight, and no sign of a certain trainer",
    ),
)


def identify(files: CheckpointFiles) -> tuple[Producer, str]:
    """Returns the first of PRODUCERS whose sign is there, and the sign."""
    signs = ((producer, producer.detect(files)) for producer in PRODUCERS)
    return next((producer, sign) for producer, sign in signs if sign is not None)  # the last row takes everything
