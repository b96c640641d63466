"""Random damage to bytes, JSON, safetensors headers and pickles, chosen by a random generator."""

import json
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**12, 10**30, 10**400)
FRACTIONS = (0.5, 1.0, -0.5, 1e-320, 1e308, -1e308, 3.9, 0.0, -0.0)
TEXTS = (
    "", "\0", "\ud800", "ẞ\u202e🦅", "a" * 5000, "llama", "true", "61", "null", "../x", "/etc/passwd", "yarn",
    "llama3", "longrope", "dynamic", "default", "linear", "sliding_attention", "float8_e4m3fn", "bfloat16", "gelu",
    "I64", "BOOL", "F8_E4M3",
)  # fmt: skip
KEYS = (
    "vocab_size", "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
    "draft_vocab_size", "target_hidden_size", "rope_theta", "rope_scaling", "rope_parameters", "rope_type", "type",
    "factor", "partial_rotary_factor", "dtype", "torch_dtype", "eagle_config", "transformer_layer_config",
    "speculators_config", "speculators_model_type", "verifier", "weights_from", "transformers_weights",
    "quantization_config", "layer_types", "sliding_window", "kv_lora_rank", "q_lora_rank", "architectures",
    "model_type", "eagle_aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids", "aux_hidden_state_layer_ids",
    "producer", "num_aux_hidden_states", "fc_norm", "norm_before_fc", "norm_output", "use_aux_norm", "hidden_act",
    "rms_norm_eps", "eos_token_id", "mrope_section", "attn_implementation", "auto_map", "is_encoder_decoder",
    "id2label", "num_labels", "torchscript", "dtype_plan", "shape", "data_offsets", "__metadata__", "weight_map",
    "metadata", "use_return_dict", "problem_type", "chunk_size_feed_forward",
)  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> Any:
    """Draws a JSON value, mostly one that the reader of some key does not expect."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(FRACTIONS)
    if kind == 3:
        return rng.choice(TEXTS)
    if kind < 6:
        return rng.choice((None, True, False))
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.choice((0, 1, 3, 20)))]
    if kind == 7:
        return {rng.choice(KEYS + TEXTS): value(rng, depth + 1) for _ in range(rng.choice((0, 1, 3)))}
    return [rng.randrange(-3, 70) for _ in range(3)]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Returns every (container, key) in a JSON value."""
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    return [(tree, key) for key, _ in items] + [place for _, child in items for place in places(child)]


def edit(tree: dict, rng: random.Random) -> None:
    """Makes one random change: a value replaced, scaled, nested, dropped or moved to another key, or a key added."""
    all_places = places(tree)
    container, key = rng.choice(all_places) if all_places else (tree, "a")
    other, other_key = rng.choice(all_places) if all_places else (tree, "a")
    action = rng.randrange(7)
    if action == 0 and isinstance(container, dict):
        container.pop(key, None)
    elif action == 1:
        container[key] = rng.choice(
            ([container[key]], {"a": container[key]}, {key if isinstance(key, str) else "b": container[key]})
        )
    elif action == 2 and isinstance(container[key], (int, float)):
        container[key] = container[key] * rng.choice((-1, 0, 2, 3, 1000, 0.5)) if abs(container[key]) < 1e300 else 1
    elif action == 3:
        container[key] = json.loads(json.dumps(other[other_key]))
    elif action == 4 and isinstance(container, dict):
        container[rng.choice(KEYS + TEXTS)] = value(rng)
    elif action == 5 and isinstance(container[key], str):
        text = container[key]
        container[key] = rng.choice(
            (text[:-1], text + text, text.upper(), text.replace(".", "/"), f"model.{text}", f"\0{text}")
        )
    else:
        container[key] = value(rng)


def damage(data: bytes, rng: random.Random, end: int | None = None) -> bytes:
    """Flips bytes, cuts some out, doubles or inserts some before `end`, or cuts off the rest."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(max(1, min(len(changed), end or len(changed))))
        action = rng.randrange(5)
        if action == 0 and changed:
            changed[at] = rng.randrange(256)
        elif action == 1:
            del changed[at : at + rng.choice((1, 2, 8, 64))]
        elif action == 2:
            changed[at:at] = changed[at : at + rng.choice((1, 8, 64))]
        elif action == 3:
            changed[at:at] = rng.choice(
                (b"\x00" * 8, b"\xff" * 8, b"{", b"}", b'"', b"\x80\x02", b"[" * 300, b"1e999", b"NaN")
            )
        elif rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)


def json_text(tree: Any, rng: random.Random) -> bytes:
    """Returns the value as text, sometimes with a key twice or with a number that only text can hold."""
    text = json.dumps(tree)
    if rng.random() < 0.1:
        text = text.replace("{", '{"' + rng.choice(KEYS) + '": ' + json.dumps(value(rng)) + ", ", 1)
    if rng.random() < 0.05:
        text = text.replace("1", rng.choice(("1e999", "NaN", "-Infinity", "9" * 400, "1" * 5000)), 1)
    return damage(text.encode(), rng) if rng.random() < 0.1 else text.encode("utf-8", "surrogatepass")


def damage_json(path: Path, rng: random.Random) -> None:
    tree = json.loads(path.read_text())
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        edit(tree, rng)
    path.write_bytes(json_text(tree, rng))


def damage_header(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    if rng.random() < 0.4:
        path.write_bytes(damage(data, rng, 8 + length))
        return
    header = json.loads(data[8 : 8 + length])
    for _ in range(rng.choice((1, 1, 2, 4))):
        edit(header, rng)
    text = json_text(header, rng)
    path.write_bytes(
        struct.pack("<Q", len(text) if rng.random() < 0.9 else rng.choice(NUMBERS) % 2**64) + text + data[8 + length :]
    )


def damage_pickle(path: Path, rng: random.Random) -> None:
    """Damages the archive, or the pickle in a sound archive."""
    if rng.random() < 0.3:
        path.write_bytes(damage(path.read_bytes(), rng))
        return
    with zipfile.ZipFile(path) as archive:
        files = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name = next(name for name in files if name.endswith("data.pkl"))
    files[name] = damage(files[name], rng)
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in files.items():
            archive.writestr(entry, data)
