"""EAGLE 3.1 speculative decoding for transformers.

`import eagle31_hf` makes `target.generate(**inputs, assistant_model=drafter)` understand an `Eagle31DrafterModel`.
"""

from typing import TYPE_CHECKING, Any

from . import starting  # noqa: F401 -- first: the imports below take seconds, and may be stopped

# isort: split

from transformers import AutoConfig, AutoModel

from .acceptance import AcceptanceStats, track_acceptance
from .checkpoints import convert_checkpoint, export_checkpoint
from .configuration import Eagle31Config
from .generation.candidate_generator import Eagle31CandidateGenerator
from .generation.hook import install, uninstall
from .generation.request import decode_with
from .modeling import Eagle31DrafterModel, Eagle31DrafterOutput
from .upgrade import UpgradeReport, upgrade_to_eagle31
from .version import __version__

if TYPE_CHECKING:
    from .training.arguments import Eagle31TrainingArguments
    from .training.trainer import Eagle31Trainer

__all__ = [
    "AcceptanceStats",
    "Eagle31CandidateGenerator",
    "Eagle31Config",
    "Eagle31DrafterModel",
    "Eagle31DrafterOutput",
    "Eagle31Trainer",
    "Eagle31TrainingArguments",
    "UpgradeReport",
    "__version__",
    "convert_checkpoint",
    "export_checkpoint",
    "install",
    "track_acceptance",
    "uninstall",
    "upgrade_to_eagle31",
]

# transformers' Trainer takes seconds to import, which who only decodes need not wait for.
LAZY = {"Eagle31Trainer": "trainer", "Eagle31TrainingArguments": "arguments"}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".training.{LAZY[name]}", __name__), name)


AutoConfig.register("eagle31", Eagle31Config)
AutoModel.register(Eagle31Config, Eagle31DrafterModel)
Eagle31DrafterModel.decoding_method = staticmethod(decode_with)
install()
