"""Compiles every kernel for GPUs that are not here, and says what it needs there: registers, spills, shared memory,
whether it loads 16 bytes at once, and, of kernels that widen weights, how many instructions a weight takes.

    python tests/kernels/compile_ahead.py [--json] [--only NAME]

A kernel's cases stand in `CASES` of `tests/kernels/cases_X.py`: name -> Case.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Compute capability -> bytes of shared memory that a block may opt in to.
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
AMD = "gfx942"
AMD_SHARED = 65_536
MOST_INSTRUCTIONS = 5  # a weight and lane: an H100 issues some 30 T a second, and reads 3.3 T bytes
# PTX that reads 16 bytes at once: ptxas neither splits such a load nor makes one of several. Taking SASS apart takes
# as long as compiling, and is left to the kernels whose instructions are counted.
WIDE_LOAD = re.compile(r"ld\.global\S*\.(?:v4\.[bfu]32|v2\.[bfu]64)|cp\.async\.c[ag]\S*[^\n]*, (?:0x10|16)\b")
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A kernel at real sizes. `types` by argument: "*bf16", "*i64", "i32", "fp32"; every other argument is a
    constant of `constants`. Pointers, strides and what `divisible` names are multiples of 16, as they are at real
    sizes, and Triton compiles for such. `options`: num_warps, num_stages. `is_wide`: it must load 16 bytes at once.
    `weights_a_pass`: weights that its loop widens in a pass, where they may take MOST_INSTRUCTIONS each.
    `shared`: bytes of shared memory of the GPUs that it is for, 0: all. `of_amd`: the case in its place on AMD's."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)
    is_wide: bool = False
    divisible: tuple[str, ...] = ()
    weights_a_pass: int = 0
    shared: int = 0
    of_amd: "Case | None" = None


def compiled(case: Case, target: GPUTarget) -> Any:
    """The kernel compiled for a target."""
    names = case.kernel.arg_names
    aligned = [n for n, kind in case.types.items() if kind.startswith("*") or "stride" in n or n in case.divisible]
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(n),): value for n, value in case.constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    return triton.compile(source, target=target, options=case.options)


def of_nvidia(case: Case, capability: int) -> dict[str, Any]:
    """Returns what the kernel needs on an NVIDIA GPU; `problems` names what it must not."""
    done = compiled(case, GPUTarget("cuda", capability, 32))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(done.asm["cubin"])
        usage = said_of("-res-usage", file.name)
        code = said_of("-sass", file.name) if case.weights_a_pass else ""
    found: dict[str, Any] = {kind: int(count) for kind, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    found["shared"] = done.metadata.shared
    found["wide loads"] = len(WIDE_LOAD.findall(done.asm["ptx"]))
    if case.weights_a_pass:
        lanes = 32 * case.options["num_warps"]
        found["instructions a weight"] = round(loop_length(code) * lanes / case.weights_a_pass, 2)
    found["problems"] = [
        *(["too many instructions a weight"] if found.get("instructions a weight", 0) > MOST_INSTRUCTIONS else []),
        *(["spills"] if found["STACK"] or found["LOCAL"] else []),
        *(["too much shared memory"] if found["shared"] > SHARED[capability] else []),
        *(["no 16-byte load"] if case.is_wide and not found["wide loads"] else []),
    ]
    return found


def said_of(flag: str, path: str) -> str:
    """What NVIDIA's tool says of a compiled kernel."""
    return subprocess.run([TOOL, flag, path], capture_output=True, text=True, check=True).stdout


def loop_length(code: str) -> int:
    """Returns the instructions of the loop of SASS with the most that has matrix products in it."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)]
    jumps = [(at, re.search(r"BRA\S*\s+0x([0-9a-f]+)", text)) for at, text in lines]
    backward = [(int(jump[1], 16), at) for at, jump in jumps if jump and int(jump[1], 16) < at]
    loops = [[text for at, text in lines if begin <= at <= end] for begin, end in backward]
    return max((len(loop) for loop in loops if any("MMA" in text for text in loop)), default=0)


def of_amd(case: Case) -> dict[str, Any]:
    """Returns what the kernel needs on an AMD GPU."""
    case = case.of_amd or case
    if "BY_PTX" in case.constants:
        case = replace(case, constants=case.constants | {"BY_PTX": False})
    done = compiled(case, GPUTarget("hip", AMD, 64))
    counts = re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", done.asm["amdgcn"])
    found: dict[str, Any] = {kind: int(count) for kind, count in counts}
    found["shared"] = done.metadata.shared
    spills = found.get("vgpr_spill_count", 0) + found.get("sgpr_spill_count", 0)
    found["problems"] = [
        *(["spills"] if spills else []),
        *(["too much shared memory"] if found["shared"] > AMD_SHARED else []),
    ]
    return found


def gpus(case: Case, number: int | None) -> dict[str, Callable[[Case], dict[str, Any]]]:
    """The GPUs to compile a case for, by name: all that it is for, or of the `number`-th case sm_90 and one other."""
    every = {f"sm_{k}": partial(of_nvidia, capability=k) for k in SHARED if case.shared in (0, SHARED[k])}
    every |= {AMD: of_amd} if case.shared in (0, AMD_SHARED) else {}
    others = [name for name in every if name != "sm_90"]
    if number is None or not others:
        return every
    chosen = {"sm_90", others[number % len(others)]}
    return {name: of for name, of in every.items() if name in chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sparse", action="store_true", help="each case for sm_90, and for one other GPU in turn")
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    cases = {}
    for path in sorted(HERE.glob("cases_*.py")):
        cases |= import_module(path.stem).CASES
    found = {}
    for number, (name, case) in enumerate(cases.items()):
        if name.startswith(args.only):
            found[name] = {gpu: of(case) for gpu, of in gpus(case, number if args.sparse else None).items()}
            if not args.json:
                for target, figures in found[name].items():
                    print(f"{name:40} {target:8} {figures}")
    if args.json:
        json.dump(found, sys.stdout)


if __name__ == "__main__":
    sys.modules.setdefault("compile_ahead", sys.modules["__main__"])  # which the cases import Case from
    main()
