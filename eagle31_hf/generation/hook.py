"""Makes `target.generate(assistant_model=drafter)` enter this library's loop. Installed by `import eagle31_hf`.

Three methods of `GenerationMixin` are wrapped on the class. Each wrapper acts only where the assistant is an
`Eagle31DrafterModel`, however wrapped, and leaves every other call as it was. A fourth, of `AutoConfig`, only notes the
call's keyword arguments for `Eagle31Config`. Installing twice changes nothing; `uninstall` restores what was found.
"""

import functools
from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, GenerationMixin

from ..checkpoints.knobs import KNOBS
from ..configuration import hub_options
from ..modeling import drafter_in
from .planning.plan import resolve_settings
from .refusals import check_request
from .request import Request, speculative_decoding


def _extract_generation_mode_kwargs(
    original: Callable, self, custom_generate, kwargs: dict[str, Any], synced_gpus, assistant_model, streamer
):
    """Unwraps the drafter, and takes the knobs out of generate's keyword arguments before its config can fill in stock
    defaults."""
    drafter = drafter_in(assistant_model)
    result = original(
        self, custom_generate, kwargs, synced_gpus, assistant_model if drafter is None else drafter, streamer
    )
    if drafter is not None and "assistant_model" in result:  # a callable custom_generate is handed none
        result["knobs"] = {name: kwargs.pop(name) for name in KNOBS if name in kwargs}
    return result


def _validate_generation_mode(
    original: Callable, self, generation_mode, generation_config, generation_mode_kwargs: dict[str, Any]
):
    """Our own checks in place of transformers', which would demand equal vocabulary sizes and let beams pass."""
    drafter = drafter_in(generation_mode_kwargs.get("assistant_model"))
    if drafter is None:
        return original(self, generation_mode, generation_config, generation_mode_kwargs)
    check_request(self, drafter, generation_config, generation_mode)
    resolve_settings(drafter, generation_config, generation_mode_kwargs["knobs"])
    return None


def _assisted_decoding(original: Callable, self, *args, inputs_tensor=None, assistant_model=None, **kwargs):
    """`inputs_tensor` is named because `generate` looks for it in the signature."""
    drafter = drafter_in(assistant_model)
    if drafter is None:
        return original(self, *args, inputs_tensor=inputs_tensor, assistant_model=assistant_model, **kwargs)
    # stop strings were prepared with it; the drafter speaks the target's ids
    for name in ("tokenizer", "assistant_tokenizer"):
        kwargs.pop(name, None)
    return speculative_decoding(Request(self, drafter, *args, **kwargs))


def from_pretrained(original: Callable, cls, *args, **kwargs):
    """Keeps the Hub options for `Eagle31Config.from_dict`, which may have more to fetch: AutoConfig drops them once it
    has config.json."""
    with hub_options(kwargs):
        return original(cls, *args, **kwargs)


WRAPPERS = (
    (GenerationMixin, _extract_generation_mode_kwargs),
    (GenerationMixin, _validate_generation_mode),
    (GenerationMixin, _assisted_decoding),
    (AutoConfig, from_pretrained),
)


def install() -> None:
    """Wraps the methods; a second call does nothing."""
    for owner, wrapper in WRAPPERS:
        if _original(owner, wrapper) is None:
            setattr(owner, wrapper.__name__, _wrap(wrapper, vars(owner)[wrapper.__name__]))


def uninstall() -> None:
    """Restores the methods found by `install`; without it does nothing."""
    for owner, wrapper in WRAPPERS:
        original = _original(owner, wrapper)
        if original is not None:
            setattr(owner, wrapper.__name__, original)


def _original(owner: type, wrapper: Callable) -> Any:
    """The method `install` found, None while it is not installed."""
    return getattr(getattr(owner, wrapper.__name__), "_eagle31_original", None)


def _wrap(wrapper: Callable, original: Any) -> Any:
    """`wrapper` in place of a method or class method, with its signature."""
    is_classmethod = isinstance(original, classmethod)
    function = original.__func__ if is_classmethod else original

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        return wrapper(function, self, *args, **kwargs)

    method._eagle31_original = original  # type: ignore[attr-defined]
    return classmethod(method) if is_classmethod else method
