"""The name of a cache among the arguments and results of a model: `cache` from transformers 5.24 on, before that
`past_key_values`, or `cache_params` of Mamba's models."""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

OLD_NAMES = ("past_key_values", "cache_params")
IS_RENAMED = "cache" in CausalLMOutputWithPast.__dataclass_fields__
NAMES = ("cache",) if IS_RENAMED else OLD_NAMES  # of generate()'s arguments and of outputs
CACHE = NAMES[0]  # of most models


def cache_argument(forward: Any, cache: Cache) -> dict[str, Cache]:
    """The cache as a keyword argument of a model's forward. A model whose code is not transformers' own may still call
    it by an old name."""
    parameters = inspect.signature(forward).parameters
    name = next((name for name in ("cache", *OLD_NAMES) if name in parameters), CACHE)
    return {name: cache}


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among generate()'s keyword arguments or a model's results; None where there is none."""
    return next((arguments[name] for name in NAMES if name in arguments), None)
