"""vLLM reads an `eagle31` checkpoint as it is, wherever this package is installed beside it.

`vllm serve TARGET --speculative-config '{"method": "eagle3", "model": DRAFTER, "num_speculative_tokens": K}'`: vLLM's own drafter
classes run it. Tensors already carry the names vLLM expects, only `config.json` is read differently.
"""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from .checkpoints import engine_config
from .configuration import Eagle31Config


class ReadsEagle31:
    """On top of vLLM's reader of `config.json`: a drafter's config becomes the one an export for vLLM would hold."""

    def parse(self, *args: Any, **kwargs: Any) -> tuple[dict, PreTrainedConfig]:
        """The config as a dict and as an object. Raises ValueError where vLLM cannot run the drafter."""
        values, config = super().parse(*args, **kwargs)  # type: ignore[misc]
        if not isinstance(config, Eagle31Config):
            return values, config
        values = engine_config(config, format="vllm")
        return values, AutoConfig.for_model(**values)


def register() -> None:
    """The entry point that vLLM calls in each of its processes; a second call changes nothing."""
    from vllm.transformers_utils.config import get_config_parser, register_config_parser

    parser = type(get_config_parser("hf"))
    if not issubclass(parser, ReadsEagle31):
        register_config_parser("hf")(type("Eagle31ConfigParser", (ReadsEagle31, parser), {}))
