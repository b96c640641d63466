"""EAGLE 3.1 speculative decoding for transformers.

`import eagle31_hf` makes `target.generate(**inputs, assistant_model=drafter)` understand an `Eagle31DrafterModel`.
"""

from transformers import AutoConfig, AutoModel

from .checkpoints import convert_checkpoint, export_checkpoint
from .configuration import Eagle31Config
from .generation.chain import Eagle31CandidateGenerator
from .generation.hook import install, uninstall
from .generation.statistics import AcceptanceStats, track_acceptance
from .modeling import Eagle31DrafterModel, Eagle31DrafterOutput
from .upgrade import UpgradeReport, upgrade_to_eagle31
from .version import __version__

__all__ = [
    "AcceptanceStats",
    "Eagle31CandidateGenerator",
    "Eagle31Config",
    "Eagle31DrafterModel",
    "Eagle31DrafterOutput",
    "UpgradeReport",
    "__version__",
    "convert_checkpoint",
    "export_checkpoint",
    "install",
    "track_acceptance",
    "uninstall",
    "upgrade_to_eagle31",
]

AutoConfig.register("eagle31", Eagle31Config)
AutoModel.register(Eagle31Config, Eagle31DrafterModel)
install()
