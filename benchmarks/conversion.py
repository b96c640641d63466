"""The speed of converting a checkpoint, beside copying the same bytes on the same disk in the same run."""

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from command import add_rounds, progress, run_benchmark
from safetensors.torch import save_file

from eagle31_hf.checkpoints import convert_checkpoint
from eagle31_hf.checkpoints.tensors import expected_tensors
from eagle31_hf.cli.parsing import path, positive
from eagle31_hf.configuration import Eagle31Config
from eagle31_hf.vocab import MAPS

# Llama-3.1-8B's drafter, its MLP widened or narrowed to the wanted size; named as the original release names it.
GEOMETRY: dict[str, Any] = {
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}


def write_checkpoint(folder: Path, megabytes: int, form: str) -> int:
    """A random bf16 EAGLE 3 checkpoint in the original release's layout, `form` "safetensors" or "bin"; its size in
    bytes."""
    fixed = Eagle31Config(**GEOMETRY, fc_norm=False, norm_output=False, intermediate_size=1)
    others = sum(2 * torch.Size(shape).numel() for name, shape in expected_tensors(fixed).items() if name not in MAPS)
    width = max(64, (megabytes * 10**6 - others) // (3 * 4096 * 2) // 64 * 64)
    config = Eagle31Config(**GEOMETRY, fc_norm=False, norm_output=False, intermediate_size=width)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name.replace("layers.0.", "midlayer."): (
            (torch.randn(min(torch.Size(shape).numel(), 2**22), generator=generator) * 0.02)
            .bfloat16()
            .repeat(-(-torch.Size(shape).numel() // 2**22))[: torch.Size(shape).numel()]
            .view(shape)
        )
        for name, shape in expected_tensors(config).items()
        if name not in MAPS
    }
    tensors["d2t"] = torch.arange(32000) * 3
    values = GEOMETRY | {"intermediate_size": width, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(values))
    if form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return sum(path.stat().st_size for path in folder.iterdir())


def copy(source: Path, destination: Path) -> None:
    """The baseline: every file, on the disk when it returns, as a conversion's files are."""
    destination.mkdir()
    for file_path in source.iterdir():
        shutil.copyfile(file_path, destination / file_path.name)
        with open(destination / file_path.name, "rb+") as file:
            os.fsync(file.fileno())


def measure_conversion(megabytes: int = 1000, rounds: int = 3, folder: str | None = None) -> dict[str, Any]:
    """Seconds of copying and of converting, alternating, the fastest round of each; speeds in MB/s (10^6 bytes)."""
    results = []
    for form in ("safetensors", "bin"):
        with TemporaryDirectory(dir=folder) as temporary:
            root = Path(temporary)
            (root / "source").mkdir()
            size = write_checkpoint(root / "source", megabytes, form)
            seconds: dict[str, list[float]] = {"copy": [], "convert": []}
            for _ in range(rounds):
                for name, work in (("copy", copy), ("convert", convert_checkpoint)):
                    began = time.perf_counter()
                    work(root / "source", root / name)
                    seconds[name].append(time.perf_counter() - began)
                    shutil.rmtree(root / name)
            best = {name: min(values) for name, values in seconds.items()}
            results.append(
                {
                    "form": form,
                    "bytes": size,
                    "copy_mb_per_second": size / 1e6 / best["copy"],
                    "convert_mb_per_second": size / 1e6 / best["convert"],
                    "ratio": best["copy"] / best["convert"],
                    "seconds": seconds,
                }
            )
    return {"conversion": results, "environment": {"torch": torch.__version__, "cores": os.cpu_count()}}


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if args.folder is not None and not Path(args.folder).is_dir():
        raise SystemExit(f"--folder: {args.folder} is no folder; expected one that is there.")
    progress(f"converting {args.megabytes} MB of random weights, {args.rounds} rounds beside a plain copy")
    result = measure_conversion(args.megabytes, args.rounds, args.folder)
    lines = ["source       size     copy       convert    convert / copy speed"]
    lines += [
        f"{row['form']:<11}  {row['bytes'] / 1e6:>4.0f} MB  {row['copy_mb_per_second']:>5.0f} MB/s "
        f"{row['convert_mb_per_second']:>6.0f} MB/s {row['ratio']:>9.0%}"
        for row in result["conversion"]
    ]
    return result, "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, "of which the fastest counts")
    parser.add_argument("--megabytes", type=positive, default=1000, help="size of the checkpoint (default: 1000)")
    parser.add_argument("--folder", type=path, help="where to write (default: the system's temporary folder)")


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
