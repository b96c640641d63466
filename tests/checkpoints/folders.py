"""Helpers for a checkpoint's folder: contents, comparison with a drafter, copies with other fields or tensors."""

import json
from pathlib import Path

from close import assert_close
from safetensors.torch import load_file, save_file
from writers import LAYOUTS

from eagle31_hf import Eagle31DrafterModel

SPECFORGE, WEIGHTS = LAYOUTS["specforge"], "model.safetensors"


def contents(folder: Path) -> dict[str, bytes]:
    """Returns path -> bytes of every file under the folder; empty folders are names that end in a slash."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return files | {f"{p.relative_to(folder)}/": b"" for p in folder.rglob("*") if p.is_dir() and not any(p.iterdir())}


def assert_loads(folder: Path, drafter: Eagle31DrafterModel, **options) -> None:
    loaded = Eagle31DrafterModel.from_pretrained(folder, **options)
    assert set(loaded.state_dict()) == set(drafter.state_dict())
    for name, tensor in drafter.state_dict().items():
        assert_close(name, loaded.state_dict()[name], tensor)
    for name in (
        "fc_norm",
        "norm_output",
        "aux_hidden_state_layer_ids",
        "rope_parameters",
        "num_hidden_layers",
        "qk_norm",
    ):
        assert_close(name, getattr(loaded.config, name), getattr(drafter.config, name))


def edited(folder: Path, tensors: dict | None = None, **config) -> Path:
    """Changes the checkpoint in `folder`: tensors and config keys are replaced, or, where None, left out."""
    if tensors:
        weights = load_file(folder / "model.safetensors") | tensors
        save_file(
            {name: w for name, w in weights.items() if w is not None}, folder / "model.safetensors", {"format": "pt"}
        )
    stated = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in stated.items() if value is not None}))
    return folder
