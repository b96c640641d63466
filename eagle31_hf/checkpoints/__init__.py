"""Checkpoints of every format: read, converted to the native one, and exported. No model is built here."""

from .convert import convert_checkpoint
from .export import EXPORT_FORMATS, engine_config, export_checkpoint, export_notes, launch_line
from .read import Checkpoint, read_checkpoint

__all__ = [
    "EXPORT_FORMATS",
    "Checkpoint",
    "convert_checkpoint",
    "engine_config",
    "export_checkpoint",
    "export_notes",
    "launch_line",
    "read_checkpoint",
]
