"""A store of hidden states: bytes a second written and read, beside `cat` on the same files.

Reading counts the bytes of the files; what is read the first time is verified as well. The files are in the page cache:
a disk that is slower than these figures is what counts then.
"""

import argparse
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from command import run_benchmark

from eagle31_hf.bench import environment_of
from eagle31_hf.cli.parsing import positive
from eagle31_hf.training.store import HiddenStateStore, Manifest, open_store, shard_path, write_shard

TOKENS, LAYERS = 1024, [2, 18, 33]  # of an example
SHARDS = 2


def measure_store(dtype: str, width: int, count: int, folder: Path) -> dict[str, Any]:
    """Returns bytes a second of writing, of reading an example after the other, at first and again, and of `cat`."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, (len(LAYERS) + 1) * width, generator=generator).bfloat16()
    example = {"input_ids": torch.arange(TOKENS), "answers": torch.ones(TOKENS, dtype=torch.bool)}
    example |= {"states": states[:, width:].clone(), "last_states": states[:, :width].clone()}
    manifest = Manifest("", "", "", {}, width, SHARDS * count, count, layer_ids=LAYERS, dtype=dtype)
    open_store(folder, manifest)
    paths = [shard_path(folder, index) for index in range(SHARDS)]
    found = {"written": seconds_of(lambda: [write_shard(folder, i, [example] * count, {}) for i in range(SHARDS)])}
    for name in ("read and verified", "read again"):
        found[name] = seconds_of(lambda: deque(map(HiddenStateStore(folder).__getitem__, range(SHARDS * count)), 0))
    found["cat"] = seconds_of(lambda: subprocess.run(["cat", *paths], stdout=subprocess.DEVNULL, check=True))
    copied = f"cat {paths[0]} > {folder / 'copy'} && sync {folder / 'copy'}"
    found["cat into a file"] = SHARDS * seconds_of(lambda: subprocess.run(copied, shell=True, check=True))
    size = sum(path.stat().st_size for path in paths)
    return {"dtype": dtype, "bytes": size, **{name: size / seconds for name, seconds in found.items()}}


def seconds_of(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        runs = [measure_store(dtype, args.width, args.examples, folder / dtype) for dtype in ("bfloat16", "fp8")]
    finally:
        shutil.rmtree(folder)
    names = [name for name in runs[0] if name not in ("dtype", "bytes")]
    lines = [f"{'MB/s':<10}" + "".join(f"{name:>19}" for name in names)]
    lines += [f"{run['dtype']:<10}" + "".join(f"{run[name] / 1e6:>19,.0f}" for name in names) for run in runs]
    sizes = {"width": args.width, "examples": args.examples}
    return {"runs": runs, "environment": environment_of(torch.device("cpu"), "bfloat16") | sizes}, "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=positive, default=4096, help="of the target (default: 4,096)")
    parser.add_argument("--examples", type=positive, default=48, help=f"of {TOKENS:,} tokens a shard (default: 48)")
    parser.add_argument("--folder", type=Path, help="where the store is made, and removed (default: the system's)")


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
