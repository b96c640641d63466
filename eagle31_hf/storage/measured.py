"""Figures that were measured on this machine, kept between processes in the user's cache folder."""

import json
import os
import platform
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from .folders import replacing

FOLDER = "eagle31_hf"  # in HF_HOME
CPUINFO = Path("/proc/cpuinfo")


def cache_folder(*names: str) -> Path:
    """Returns a path in this library's part of the user's cache folder."""
    return Path(constants.HF_HOME, FOLDER, *names)


class Measured:
    """Figures by key, in a JSON file in the cache folder, whose `name` may begin with folders.

    A file that cannot be read counts as empty, and where none can be written the figures last as long as the process:
    they can always be measured again.
    """

    def __init__(self, name: str):
        self._name = name
        self._figures: dict[str, Any] | None = None
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        """The file."""
        return cache_folder(f"{self._name}.json")

    def get(self, key: str) -> Any:
        """Returns the figures of a key, None where there are none."""
        with self._lock:
            if self._figures is None:
                self._figures = self._read()
            return self._figures.get(key)

    def put(self, key: str, figures: Any) -> None:
        """Keeps the figures of a key, beside those that the file has by now; of two processes that write at the same
        moment the later one wins."""
        with self._lock:
            self._figures = {**(self._figures or {}), **self._read(), key: figures}
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(self.path) as staged:  # without a sync to disk, which takes longer than a round
                    staged.write_text(json.dumps(self._figures, indent=1, sort_keys=True), encoding="utf-8")

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def machine() -> str:
    """Returns what times on the CPU depend on besides the program: the processor, its instructions that may be used,
    torch, and its threads."""
    capability, most = torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA")
    used = f"{_processor()}, {capability}{f' and {most}' if most else ''}"
    return f"{used}, torch {torch.__version__}, {torch.get_num_threads()} threads"


@cache
def _processor() -> str:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
