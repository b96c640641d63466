"""transformers' own tests of a model class, from the source distribution of the installed version.

They are downloaded once into the user's cache and never part of this repository.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
import types
from pathlib import Path

import transformers
from filelock import FileLock

NAME = "test_modeling_common.py"
PACKAGE = "transformers_tests"
# Of its imports the source distribution lacks these two, base classes for what the drafter is not: exported graphs and
# `generate`.
ABSENT = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
MARKERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "order",
    "torch_compile_test",
)
DOWNLOAD = ("download", "--no-deps", "--no-binary", "transformers", f"transformers=={transformers.__version__}")
INSTALL = ("install", "--no-deps", "parameterized==0.9.0")
PATIENCE = ("--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20")


class NotFetchedError(Exception):
    """The tests are not here and could not be downloaded; says why, and by which commands they are."""


def load() -> types.ModuleType:
    """The module with `ModelTesterMixin`. Raises NotFetchedError where it cannot be downloaded."""
    folder = cache_folder()
    with FileLock(folder / "lock"):
        fetch(folder)
    sys.path.append(str(folder / "lib"))
    package(PACKAGE).__path__ = [str(folder)]
    for path, base in ABSENT.items():
        parent, _, name = path.partition(".")
        package(f"{PACKAGE}.{parent}")
        setattr(package(f"{PACKAGE}.{parent}.{name}"), base, type(base, (), {}))
    return importlib.import_module(f"{PACKAGE}.{NAME.removesuffix('.py')}")


def package(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []
    return sys.modules.setdefault(name, module)


def cache_folder() -> Path:
    """A folder for this version, in the user's cache or, where that cannot be written, beside temporary files."""
    parents = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), Path(tempfile.gettempdir())
    for parent in parents:
        folder = parent / "eagle31_hf" / f"transformers-{transformers.__version__}-tests"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise NotFetchedError(f"none of {', '.join(map(str, parents))} can be written")


def fetch(folder: Path) -> None:
    """Puts the test module, and a package it needs, into `folder` unless they are there."""
    if not (folder / "lib").exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip(*INSTALL, "--target", str(Path(scratch, "lib")))
            Path(scratch, "lib").rename(folder / "lib")
    if not (folder / NAME).exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip(*DOWNLOAD, "--dest", scratch)
            with tarfile.open(next(Path(scratch).glob("transformers-*.tar.gz"))) as archive:
                source = archive.extractfile(f"transformers-{transformers.__version__}/tests/{NAME}")
                Path(scratch, NAME).write_bytes(source.read())
            Path(scratch, NAME).rename(folder / NAME)


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, *PATIENCE], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        command = f"python -m pip {' '.join(arguments[:-2])}"
        raise NotFetchedError(
            f"transformers' own tests could not be fetched ({said}); what fetches them, given a network: {command}"
        )
