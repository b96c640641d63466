"""A plugin by which vLLM, installed beside this library, serves a native checkpoint as it is.

vLLM finds it by the entry point `vllm.general_plugins`. Tensors already have the names that vLLM's drafter classes
load; only config.json is read as an export for vLLM would state it.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from .checkpoints import engine_config
from .configuration import Eagle31Config


class ReadsEagle31:
    """Mixin for vLLM's parser of config.json: a drafter's config becomes one that vLLM knows, others stay the same."""

    def parse(self, model: str | Path, *args: Any, **kwargs: Any) -> tuple[dict, PreTrainedConfig]:
        """Returns the config as a dict and as an object. Raises ValueError where vLLM cannot run the drafter."""
        values, config = super().parse(model, *args, **kwargs)
        if not isinstance(config, Eagle31Config):
            return values, config
        if values.get("weights_from") is not None:
            raise ValueError(
                f"{model}: config.json only points to weights, weights_from {values['weights_from']}; vLLM needs them"
                f" beside it. Serve the folder that `eagle31 convert {model} FOLDER` writes."
            )
        values = engine_config(config, format="vllm")
        return values, AutoConfig.for_model(**values)


def register() -> None:
    """Replaces vLLM's parser of config.json by a subclass that differs for `eagle31` alone.

    vLLM calls this in each of its processes, and warns of the replacement; a second call changes nothing.
    """
    from vllm.transformers_utils.config import get_config_parser, register_config_parser

    parser = type(get_config_parser("hf"))
    if not issubclass(parser, ReadsEagle31):
        register_config_parser("hf")(type("Eagle31ConfigParser", (ReadsEagle31, parser), {"__module__": __name__}))
