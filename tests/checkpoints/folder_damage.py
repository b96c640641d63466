"""Ways to damage a checkpoint's folder or make it do harm, chosen by a random generator: see
`tests/fuzz_checkpoints.py`."""

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from damage import damage, damage_header, damage_json, damage_pickle, value
from hostile_files import (
    BOMBS,
    KEYS,
    NAMES,
    NATIVE_KEYS,
    NO_VALUES,
    NOT_CONFIGS,
    NOT_PICKLES,
    NOT_SAFETENSORS,
    PICKLED,
    UNREAD,
    Attack,
    archived,
    stored,
)
from hostile_files import KNOBS as HOSTILE_KNOBS

PICKLE, KNOBS = "pytorch_model.bin", "generation_config.json"
PLAIN_KNOBS = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.1, "transformers_version": "5.23.0"}
FACTORS = [1.0] * 10**4
BOUNDS = {"low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 0}
ROPES: tuple[Any, ...] = (
    {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": FACTORS, "long_factor": FACTORS, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e308, "original_max_position_embeddings": 10**18},
    {"rope_type": "llama3", "rope_theta": 1e-300, "factor": 0.0, **BOUNDS},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1e300},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9},
    {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 1e-9},
    {str(i): i for i in range(10**4)},
    [1],
)
HOSTILE_FIELDS: list[dict[str, Any]] = [
    *({name: value} for name, value in UNREAD.items()),
    *(fields for fields, _ in (*KEYS.values(), *NATIVE_KEYS.values())),
    *({"rope_parameters": rope} for rope in ROPES),
]


def hostile_pickles(rng: random.Random, marker: Path) -> bytes:
    """Returns a pickle that would write a file or fill memory, holds something else than tensors, or is none."""
    attack = rng.choice((Attack(marker), Attack.of(os.system, f"touch {marker}"), Attack.of(os.mkdir, str(marker))))
    attacking = pickle.dumps(rng.choice(({"fc.weight": attack}, {attack: 1}, attack)), 2)
    others = rng.choice((*BOMBS.values(), *NOT_PICKLES.values()))
    kinds: list[Callable[[], bytes]] = [
        lambda: attacking,
        lambda: archived(attacking),
        lambda: archived(others),
        lambda: saved(rng.choice([*PICKLED.values()])[0]),
    ]
    return rng.choice(kinds)()


def saved(values: Any) -> bytes:
    """As PyTorch saves them; where it does not, as it saves nothing."""
    file = io.BytesIO()
    try:
        torch.save(values, file)
    except Exception:  # of kinds of tensors that a version cannot write
        return saved({})
    return file.getvalue()


def hostile_key(folder: Path, rng: random.Random) -> None:
    path = folder / "config.json"
    if path.is_file():
        with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
            config = json.loads(path.read_bytes())
            for _ in range(rng.choice((1, 1, 3))):
                places = [
                    place
                    for place in (config, config.get("transformer_layer_config"), config.get("eagle_config"))
                    if isinstance(place, dict)
                ]
                rng.choice(places).update(deepcopy(rng.choice(HOSTILE_FIELDS)))
            path.write_text(json.dumps(config))


def nested_json(rng: random.Random) -> bytes:
    depth, sign = rng.choice((40, 900, 990, 5000)), rng.choice((b"[]", b"{}"))
    opening = sign[:1] if sign == b"[]" else b'{"a":'
    return b'{"a": ' + opening * depth + (b"" if sign == b"[]" else b"1") + sign[1:] * depth + b"}"


def long_json(rng: random.Random) -> bytes:
    count = rng.choice((10**3, 10**5, 10**5, 10**6))
    parts = {
        "list": b"[" + b"1," * count + b"1]",
        "text": b'"' + b"a" * count + b'"',
        "dict": json.dumps({str(i): i for i in range(count // 10)}).encode(),
        "lists": b"[" + b"[]," * (count // 2) + b"1]",
        "number": b"1" * count,
    }
    return b'{"model_type": "eagle31", "extra": ' + parts[rng.choice(sorted(parts))] + b"}"


def replace_json(folder: Path, rng: random.Random) -> None:
    names = [path.name for path in folder.glob("*.json")] or ["config.json"]
    none = rng.choice([*NOT_CONFIGS.values(), *HOSTILE_KNOBS.values()])[0]
    made = json.dumps(value(rng)).encode("utf-8", "replace")
    contents = (nested_json(rng), long_json(rng), none, none, b'{"a": "\\ud800"}', made)
    path = folder / rng.choice([*names, KNOBS])
    if path.is_file() or not path.exists():  # writing to a pipe would wait
        path.write_bytes(rng.choice(contents))


def damage_any(folder: Path, rng: random.Random) -> None:
    """Truncates a file, overwrites it with random bytes, or damages it as its format allows."""
    files = files_of(folder)
    if not files:
        return
    path = rng.choice(files)
    ways: dict[str, Callable[[Path, random.Random], None]] = {
        ".json": damage_json,
        ".bin": damage_pickle,
        ".safetensors": damage_header,
    }
    action = rng.randrange(8)
    data = path.read_bytes()
    if action == 0:
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif action == 1:
        path.write_bytes(rng.randbytes(rng.choice((0, 1, 8, 100, 5000))))
    elif action == 2:
        path.write_bytes(damage(data, rng))
    elif path.suffix in ways:
        with contextlib.suppress(
            ValueError,
            TypeError,
            LookupError,
            StopIteration,
            RecursionError,
            struct.error,
            zipfile.BadZipFile,
            OverflowError,
        ):
            ways[path.suffix](path, rng)


def long_header(folder: Path, rng: random.Random) -> None:
    """Writes what is no safetensors file, or one whose header is long, or says that it is."""
    header = dict.fromkeys(rng.choice([*NAMES.values()]), NO_VALUES)
    long = stored(header, 0, rng.choice((None, None, 2**40, 10**8)))
    unlink(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(rng.choice((long, rng.choice([*NOT_SAFETENSORS.values()]))))


def unlink(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def odd_file(folder: Path, rng: random.Random) -> None:
    """Puts a folder, a pipe, a device or a link where a file is expected, or a link where a folder is made."""
    names = [path.name for path in files_of(folder)] + [
        KNOBS,
        "eagle_meta.pt",
        "adapter_config.json",
        "original",
        "eagle31-converting",
    ]
    path = folder / rng.choice(names)
    unlink(path)
    kind = rng.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    else:
        path.symlink_to(rng.choice(("/dev/zero", "/dev/null", path.name, "gone", "..")))


def added_file(folder: Path, rng: random.Random, marker: Path) -> None:
    code = f"open({str(marker)!r}, 'w')\nclass Config: pass\nclass Model: pass\n".encode()
    knobs = rng.choice(
        (rng.choice([*HOSTILE_KNOBS.values()])[0], json.dumps(rng.choice((PLAIN_KNOBS, value(rng)))).encode())
    )
    files: dict[str, Callable[[], bytes]] = {
        KNOBS: lambda: knobs,
        "modeling.py": lambda: code,
        "configuration.py": lambda: code,
        "eagle_meta.pt": lambda: hostile_pickles(rng, marker),
        "adapter_config.json": lambda: b'{"base_model_name_or_path": "/etc"}',
        PICKLE: lambda: hostile_pickles(rng, marker),
        "README.md": lambda: rng.randbytes(99),
        "model.safetensors.index.json": (
            lambda: json.dumps(
                {"metadata": {}, "weight_map": {"fc.weight": rng.choice((PICKLE, "config.json", "../x"))}}
            ).encode()
        ),
        "tokenizer.json": lambda: nested_json(rng),
        "original/conversion.json": lambda: json.dumps({"weight_files": rng.choice((["../x"], 3, ["a"]))}).encode(),
        "eagle31-converting/model.safetensors": lambda: rng.randbytes(50),
        "pytorch_model.bin.index.json": lambda: b"{}",
    }
    name = rng.choice(sorted(files))
    path = folder / name
    if path.parent.is_symlink() or (path.parent.exists() and not path.parent.is_dir()):
        return
    path.parent.mkdir(exist_ok=True)
    unlink(path)
    path.write_bytes(files[name]())


def hostile_weights(folder: Path, rng: random.Random, marker: Path) -> None:
    for path in files_of(folder):
        if path.suffix == ".safetensors" or path.name.endswith(".index.json"):
            path.unlink()
    unlink(folder / PICKLE)
    (folder / PICKLE).write_bytes(hostile_pickles(rng, marker))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())


def mutate(folder: Path, rng: random.Random, marker: Path) -> str:
    """Makes one to three changes, and returns their kinds."""
    kinds: dict[str, Callable[[], None]] = {
        "damage": lambda: damage_any(folder, rng),
        "key": lambda: hostile_key(folder, rng),
        "json": lambda: replace_json(folder, rng),
        "header": lambda: long_header(folder, rng),
        "odd": lambda: odd_file(folder, rng),
        "added": lambda: added_file(folder, rng, marker),
        "pickle": lambda: hostile_weights(folder, rng, marker),
    }
    weights = {"damage": 8, "key": 8, "json": 2, "header": 1, "odd": 2, "added": 3, "pickle": 2}
    chosen = rng.choices(list(weights), list(weights.values()), k=rng.choice((1, 1, 1, 2, 3)))
    for kind in chosen:
        with contextlib.suppress(OSError):  # an earlier change has put a folder or a pipe there
            kinds[kind]()
    return chosen[0]
