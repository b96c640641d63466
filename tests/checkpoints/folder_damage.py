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
from pathlib import Path
from typing import Any

import torch
from damage import damage, damage_header, damage_json, damage_pickle, value

PICKLE, KNOBS = "pytorch_model.bin", "generation_config.json"
PLAIN_KNOBS = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.1, "transformers_version": "5.23.0"}


class Attack:
    """An object whose pickle calls a function when it is loaded, to write a file for instance."""

    def __init__(self, call: Callable, *arguments: Any):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def archived(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/data/0", bytes(64))
    return file.getvalue()


def hostile_pickles(rng: random.Random, marker: Path) -> bytes:
    """Returns a pickle that would write a file, fill memory, or hold something else than tensors."""
    storage = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu\x8a\x06"
        + struct.pack("<q", 2**40)[:6]
        + b"tQ"
    )
    zeros = torch.zeros(4, 4)
    bombs: list[Callable[[], bytes]] = [
        lambda: pickle.dumps({"fc.weight": Attack(open, str(marker), "w")}, 2),
        lambda: pickle.dumps({"fc.weight": Attack(os.system, f"touch {marker}")}, 2),
        lambda: pickle.dumps(Attack(eval, f"open({str(marker)!r}, 'w')"), rng.choice((2, 4))),
        lambda: pickle.dumps({Attack(os.mkdir, str(marker)): 1}, 2),
        lambda: archived(pickle.dumps({"fc.weight": Attack(open, str(marker), "w")}, 2)),
        lambda: archived(pickle.dumps({"fc.weight": Attack(bytearray, 2**34)}, 2)),
        lambda: archived(pickle.dumps({"fc.weight": Attack(torch.Tensor, 2**20, 2**11)}, 2)),
        lambda: archived(pickle.dumps({"fc.weight": Attack(torch.UntypedStorage, 2**33)}, 2)),
        lambda: archived(
            pickle.dumps(
                {
                    "fc.weight": Attack(
                        torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (2**40,), (1,), False
                    )
                },
                2,
            )
        ),
        lambda: archived(
            b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n("
            + storage
            + b"K\x00\x8a\x04\x00\x00\x00\x40\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs."
        ),
        lambda: archived(b"\x80\x02" + rng.choice((b"]", b"}", b"\x8f", b")")) * rng.choice((10**5, 2**21)) + b"."),
        lambda: archived(
            b"\x80\x02ccollections\nOrderedDict\nq\x00" + b"h\x00)R" * rng.choice((10**4, 5 * 10**5)) + b"."
        ),
        lambda: saved(
            {
                "fc.weight": rng.choice(
                    (zeros.to("meta"), torch._neg_view(zeros), zeros.to_sparse(), zeros.to(torch.float8_e4m3fn))
                )
            }
        ),
        lambda: saved({"fc.weight": zeros[:1].expand(2**20, 4)}),
    ]
    return rng.choice(bombs)()


def saved(values: Any) -> bytes:
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


HOSTILE_KEYS: dict[str, tuple[Any, ...]] = {
    "num_labels": (10**9, -1, 2.5),
    "id2label": ({"a": 1}, {str(i): "x" for i in range(10**4)}, []),
    "problem_type": ("x",),
    "attn_implementation": ("someone/kernel", {"": "x"}),
    "_attn_implementation": ("someone/kernel",),
    "_attn_implementation_internal": (3,),
    "experts_implementation": ("someone/kernel",),
    "auto_map": ({"AutoConfig": "modeling.Config", "AutoModel": "modeling.Model"},),
    "quantization_config": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "gptq"}, 3, {}),
    "configuration_files": (["config.9.0.0.json", "config.../../x.json"],),
    "transformers_weights": ("../x", "pytorch_model.bin", 3, "config.json"),
    "vocab_size": (10**12, 2**24, 2**24 + 1),
    "draft_vocab_size": (10**12, 1),
    "hidden_size": (10**12, 2**24),
    "head_dim": (10**9, 2**24, 2),
    "num_hidden_layers": (10**9, 256, 257),
    "num_attention_heads": (10**9, 2**24, 1),
    "num_key_value_heads": (10**9,),
    "max_position_embeddings": (10**18, 2**31),
    "intermediate_size": (10**12,),
    "target_hidden_size": (10**12, 2**24),
    "sliding_window": (2**63, 1),
    "kv_lora_rank": (10**9, 2**24),
    "qk_rope_head_dim": (2**24,),
    "aux_hidden_state_layer_ids": ([10**9], [*range(10**4)], [1, 2, 10**6]),
    "layer_types": (["sliding_attention"] * 10**4, ["full_attention"]),
    "eos_token_id": ([*range(10**4)], -1, 2**63),
    "rms_norm_eps": (1e308, -1.0, 0.0),
    "logit_scale": (1e308, 0.0),
    "return_dict": (False,),
    "output_hidden_states": (True,),
    "is_encoder_decoder": (True,),
    "chunk_size_feed_forward": (10**9,),
    "per_layer_config": ({"0": {"hidden_size": 8}}, [1]),
    "torch_dtype": ("ones", "_dynamo", 3, "float16"),
    "dtype": ({"": "float16"}, "compiler"),
    "tie_word_embeddings": (True,),
    "target_model": ("\x1b[2J", "x" * 10**5),
    "rope_parameters": (
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 10**4,
            "long_factor": [1.0] * 10**4,
            "factor": 2.0,
        },
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e308, "original_max_position_embeddings": 10**18},
        {
            "rope_type": "llama3",
            "rope_theta": 1e-300,
            "factor": 0.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 0,
        },
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1e300},
        {str(i): i for i in range(10**4)},
        {"full_attention": {"rope_type": "default"}},
        [1],
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9},
        {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 1e-9},
    ),
}


def hostile_key(folder: Path, rng: random.Random) -> None:
    path = folder / "config.json"
    if path.is_file():
        with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
            config = json.loads(path.read_bytes())
            for _ in range(rng.choice((1, 1, 3))):
                name = rng.choice(sorted(HOSTILE_KEYS))
                places = [
                    place
                    for place in (config, config.get("transformer_layer_config"), config.get("eagle_config"))
                    if isinstance(place, dict)
                ]
                rng.choice(places)[name] = rng.choice(HOSTILE_KEYS[name])
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
    contents = (
        nested_json(rng),
        long_json(rng),
        b"[1]",
        b"",
        b"null",
        b'{"a": "\\ud800"}',
        json.dumps(value(rng)).encode("utf-8", "replace"),
    )
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
    """Writes a safetensors file whose header is long, or says that it is."""
    entries = {
        f"x{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(rng.choice((10**3, 3 * 10**4)))
    }
    text = json.dumps(
        rng.choice((entries, {"__metadata__": {str(i): "x" for i in range(10**4)}}, {"x" * 10**5: entries["x0"]}))
    ).encode()
    length = rng.choice((len(text), len(text), 2**40, 10**8))
    unlink(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + text)


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
        (
            b"[1]",
            b'{"num_assistant_tokens": 1000000000000}',
            b'{"assistant_confidence_threshold": "x"}',
            json.dumps(value(rng)).encode("utf-8", "replace"),
            json.dumps(PLAIN_KNOBS).encode(),
            b'{"watermarking_config": {"greenlist_ratio": 1e9}, "max_new_tokens": -5, "num_beams": "x"}',
        )
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
