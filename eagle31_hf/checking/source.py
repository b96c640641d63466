"""A target by its config alone: what was named, its class in transformers, its size. No weights are read, no
repository's code is run."""

import os
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from ..checkpoints.files import WEIGHT_NAMES, read_index
from ..checkpoints.infer import CONTRADICTIONS
from ..checkpoints.producers import drafter_sign
from ..checkpoints.sources import find_config
from ..json_file import MAX_BYTES, read_json
from .shrink import LAYER_COUNTS, NOT_READ

MOST_LAYERS, MOST_IDS = 2000, 2**24  # more than any target has: configs are untrusted
MAPPINGS = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
# of weights in files with other names than usual, as a trainer or the model's own code may give them
OTHER_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class TargetSource:
    """A target as it was named. `model_class` is None where `why_unknown` says why transformers has none for it.

    `attention`: the implementation its model was loaded with, None for transformers' own choice; `num_bytes`: of its
    weights, where they are here.
    """

    name: str
    config: PreTrainedConfig | None
    model_class: type[PreTrainedModel] | None = None
    why_unknown: str | None = None
    attention: str | None = None
    num_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def decoder(self) -> Any:
        """The config of the text decoder, in a multimodal target one of several."""
        return self.config.get_text_config(decoder=True)

    @cached_property
    def outline(self) -> PreTrainedModel | None:
        """The whole target, its weights without any memory; None where it cannot be built so."""
        try:
            with torch.device("meta"):
                return build(self.model_class, self.config)
        except Exception:  # a class may fail in any way; the report then lacks what the outline tells
            return None

    @property
    def num_parameters(self) -> int | None:
        """Parameters of the whole target, None where there is no outline."""
        return None if self.outline is None else sum(parameter.numel() for parameter in self.outline.parameters())


def read_target(target: Any, revision: str | None = None) -> TargetSource:
    """Reads a target: a model, a config, a folder, a config file, or a Hub repository, of which only config.json is
    fetched.

    Raises OSError where there is none or the Hub cannot be reached, ValueError for a config that is unsound or a
    drafter's.
    """
    if isinstance(target, PreTrainedConfig):
        return _of_config(target.name_or_path or target.model_type, target, getattr(target, "architectures", None))
    if isinstance(target, torch.nn.Module):
        return _of_model(target)
    name = os.path.expanduser(str(target))
    path = Path(name) if os.path.isfile(name) else Path(find_config(name, "target", revision=revision))
    source = _of_values(name, _readable(read_json(path, constants=True)), path)
    return replace(source, num_bytes=_weight_bytes(path.parent)) if os.path.exists(name) else source


def _of_model(model: Any) -> TargetSource:
    model = model.get_base_model() if hasattr(model, "get_base_model") else getattr(model, "_orig_mod", model)
    if not isinstance(model, PreTrainedModel):
        found = f"target is a {type(model).__name__}"
        raise ValueError(f"{found}; expected a transformers model, its config, a folder or a Hub repository.")
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    name = model.name_or_path or type(model).__name__
    return TargetSource(
        name, model.config, type(model), attention=str(model.config._attn_implementation), num_bytes=num_bytes
    )


def _of_values(name: str, values: dict[str, Any], path: Path) -> TargetSource:
    kind, sign = values.get("model_type"), drafter_sign(values)
    if sign is not None:
        found = f"{name}: is a drafter ({sign})"
        raise ValueError(f"{found}; expected the target first, then the drafter: eagle31 check TARGET {name}")
    if not isinstance(kind, str):
        found = f"{path}: model_type is {kind!r}"
        raise ValueError(f"{found}; expected the name of an architecture, as transformers writes it.")
    if kind not in CONFIG_MAPPING:
        why = f"transformers {transformers.__version__} does not know the architecture {kind}; a newer one may"
        if values.get("auto_map"):
            why = (
                f"its architecture, {kind}, is code in its repository (auto_map), which transformers"
                f" {transformers.__version__} does not have and which is not run here; where you trust it, load the"
                " model with trust_remote_code=True and ask check_target(model)"
            )
        return TargetSource(name, None, why_unknown=why)
    _check_sizes(values, path)
    try:
        config = CONFIG_MAPPING[kind].from_dict(values)
    except CONTRADICTIONS as error:
        raise ValueError(f"{path}: {str(error)[:500]}") from error
    source = _of_config(name, config, values.get("architectures"))
    if values.get("auto_map"):
        source.notes.append(
            f"transformers' own {kind} is meant; the repository's code (auto_map), taken with trust_remote_code, was"
            " not looked at"
        )
    return source


def _readable(value: Any) -> Any:
    """The value without fields of NOT_READ, in which transformers has written {"__float__": "Infinity"} for what JSON
    has no number for."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("NaN", "Infinity", "-Infinity"):
            return float(value["__float__"])
        return {name: _readable(each) for name, each in value.items() if name not in NOT_READ}
    return [_readable(each) for each in value] if isinstance(value, list) else value


def _check_sizes(values: dict[str, Any], path: Path) -> None:
    """Raises ValueError for sizes that no target has, before a config class makes lists of that length."""
    for name, value in values.items():
        most = MOST_LAYERS if name in LAYER_COUNTS else MOST_IDS if name == "vocab_size" else 2**40
        if isinstance(value, dict):
            _check_sizes(value, path)
        elif isinstance(value, int) and value > most:
            raise ValueError(f"{path}: {name} is {value}; expected at most {most}.")


def _of_config(name: str, config: PreTrainedConfig, architectures: Any) -> TargetSource:
    model_class = model_class_of(config, architectures)
    reason = None if model_class else f"transformers has no model for {config.model_type} that generates text"
    return TargetSource(name, config, model_class, reason)


def model_class_of(config: PreTrainedConfig, architectures: Any = None) -> Any:
    """The class that the checkpoint names where it can generate, else that of the first auto class in MAPPINGS, else
    None."""
    for architecture in architectures if isinstance(architectures, list) else ():
        named = getattr(transformers, str(architecture), None) if str(architecture).isidentifier() else None
        if isinstance(named, type) and issubclass(named, PreTrainedModel) and named.can_generate():
            return named
    for mapping in MAPPINGS:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return None


def _weight_bytes(folder: Path) -> int | None:
    """Bytes of the files transformers reads weights from, a copy in another layout (Mistral's consolidated.safetensors)
    not among them; else of all that look like weights. None unless all are there, and where their index is larger than
    what is read: some targets have hundreds of thousands of tensors. Raises ValueError for an index that is unsound."""
    usual = next((folder / name for name in WEIGHT_NAMES if (folder / name).is_file()), None)
    if usual is None:
        files = next((files for pattern in OTHER_WEIGHTS if (files := [*folder.glob(pattern)])), [])
    elif usual.name.endswith("index.json"):
        if usual.stat().st_size > MAX_BYTES:
            return None
        files = [folder / name for name in set(read_index(usual).values())]
    else:
        files = [usual]
    return sum(file.stat().st_size for file in files) if files and all(file.is_file() for file in files) else None


def build(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, attention: str | None = None
) -> PreTrainedModel:
    """A model with random weights, which has a copy of the config: a model writes to its own. Of a multimodal config,
    a class of the decoder alone gets the decoder's."""
    wanted = getattr(model_class, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        config = config.get_text_config(decoder=True)
    options = {} if attention is None else {"attn_implementation": attention}
    return model_class._from_config(deepcopy(config), **options).eval()
