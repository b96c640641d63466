"""The machine: versions and clocks, the bandwidth of copies, and the speed of a large matmul. What later figures are
measured against."""

import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import torch

from eagle31_hf.bench import synchronize

from .run import Row, Run, Task
from .timing import elapsed

PACKAGES = ("triton", "numpy", "accelerate", "liger-kernel", "flash-attn")
ASKED = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")


def machine(run: Run) -> Iterator[Task]:
    yield "device", lambda: described(run)
    yield "copy", lambda: copied(run)
    yield "matmul", lambda: multiplied(run)


def described(run: Run) -> Row:
    """The device, its clocks as the driver reports them, and versions."""
    row: Row = {"device": run.device.type, "versions": dict(filter(None, map(_version, PACKAGES)))}
    if not run.is_gpu:
        return row
    properties = torch.cuda.get_device_properties(run.device)
    row |= {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }
    row["clocks"] = _clocks()
    return row


def _version(package: str) -> tuple[str, str] | None:
    try:
        return package, version(package)
    except PackageNotFoundError:
        return None


def _clocks() -> dict[str, str]:
    """Asks nvidia-smi for the state of the GPU, such as its clocks, and returns the answers; changes no setting."""
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return {"unknown": type(error).__name__}
    return dict(zip(ASKED, (value.strip() for value in line.split(",")), strict=False))


def bandwidth(run: Run) -> float:
    """Bytes a second that a copy moves, those it reads and those it writes, measured once in a run."""
    if "bandwidth" not in run.found:
        copied(run)
    return run.found["bandwidth"]


def copied(run: Run) -> Row:
    """A copy within the device's memory, the median of ten."""
    source = torch.zeros(run.sizes.copied_bytes // 2, dtype=torch.uint8, device=run.device)
    goal = torch.empty_like(source)
    seconds = _seconds(run, lambda: goal.copy_(source))
    moved = 2 * source.numel()
    run.found["bandwidth"] = moved / seconds
    return {"bytes": moved, "ms": 1000 * seconds, "gb_per_second": moved / seconds / 1e9}


def multiplied(run: Run) -> Row:
    """A matmul of two random matrices; of zeros it would draw less power, and be faster."""
    size, dtype = run.sizes.matmul, run.dtype
    a, b = (torch.randn(size, size, device=run.device).to(dtype) for _ in range(2))
    seconds = _seconds(run, lambda: a @ b)
    return {"size": size, "dtype": str(dtype), "ms": 1000 * seconds, "tflops": 2 * size**3 / seconds / 1e12}


def _seconds(run: Run, work) -> float:
    work()
    if run.is_gpu:
        return elapsed(work, repeats=10) / 1000
    taken = []
    for _ in range(10):
        synchronize()
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return median(taken)
