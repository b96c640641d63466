"""vLLM serves an `eagle31` checkpoint as it is, where both are installed: the entry point `vllm.general_plugins` leads
here.

Tensors already carry the names that vLLM's drafter classes load; only config.json has to be read as an export for vLLM
would state it.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from .checkpoints import engine_config
from .configuration import Eagle31Config


class ReadsEagle31:
    """On top of a parser of vLLM: a drafter's config becomes the one vLLM knows, every other config stays what it is."""

    def parse(self, model: str | Path, *args: Any, **kwargs: Any) -> tuple[dict, PreTrainedConfig]:
        """The config as a dict and as an object. Raises ValueError where vLLM cannot run the drafter."""
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
    """vLLM calls this in each of its processes; a second call changes nothing.

    vLLM warns that its parser of config.json is replaced. It is: by a subclass that differs for `eagle31` alone.
    """
    from vllm.transformers_utils.config import get_config_parser, register_config_parser

    parser = type(get_config_parser("hf"))
    if not issubclass(parser, ReadsEagle31):
        register_config_parser("hf")(type("Eagle31ConfigParser", (ReadsEagle31, parser), {"__module__": __name__}))
