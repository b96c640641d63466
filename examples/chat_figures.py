"""Measures drafters of a chat model on the six question sets of EAGLE's papers: how much is accepted, and the tokens a
second beside the target alone, transformers' own speculation and vLLM.

    git clone https://github.com/SafeAILab/EAGLE
    python examples/chat_figures.py --target HuggingFaceTB/SmolLM2-135M-Instruct --drafter EAGLE31 --compare EAGLE3 \\
        --questions EAGLE/eagle/data --work work --vllm-python VLLM/bin/python

Every set in fp32 and in bf16 is a report of `eagle31 bench acceptance`, in WORK/SET-DTYPE; in bf16 also of a second
turn, prompts as they should not be, temperature 1 and contexts up to 4,096 tokens. vLLM decodes the same prompts, where
its Python is given. The same line again goes on where it was stopped. `python docs/tables.py --record chat < WORK/
figures.json` keeps what docs/benchmarks.md shows.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from eagle31_hf.bench import environment
from eagle31_hf.cli import main as eagle31

SETS = {
    "MT-Bench": "mt_bench", "HumanEval": "humaneval", "GSM8K": "gsm8k", "Alpaca": "alpaca", "Natural Questions": "qa",
    "CNN/DM": "sum",
}  # fmt: skip
ANSWERS = ("--max-new-tokens", "96")
WAYS = ("--depths", "2", "3", "5", "--trees", "24")
MORE = ("--temperatures", "1", "--lengths", "512", "1024", "2048", "4096")
DTYPES = {
    "float32": ("--no-perturbations", "--rivals", "prompt-lookup", "assisted-loop"),
    "bfloat16": ("--rivals", "prompt-lookup", "assisted-loop", *MORE),
}
VLLM = ("--no-perturbations", "--engine", "vllm", "--engine-python")


def report(folder: Path, *options: object) -> dict[str, Any]:
    """Runs `eagle31 bench acceptance` into a folder, where that has not been done; returns its report.json."""
    file = folder / "report.json"
    if not file.exists():
        resumed = ("--resume",) if folder.exists() else ()
        print(folder.name, flush=True)
        if eagle31(["bench", "acceptance", "--output", str(folder), *map(str, options), *resumed]):
            raise SystemExit(f"{folder} could not be made")
    return json.loads(file.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub repository of the model")
    parser.add_argument("--drafter", required=True, help="of an EAGLE 3.1 drafter")
    parser.add_argument("--compare", nargs="*", default=[], help="others beside it")
    parser.add_argument("--questions", type=Path, required=True, help="`eagle/data` of EAGLE's repository")
    parser.add_argument("--work", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--vllm-python", help="the Python that vLLM is installed for (default: it is left out)")
    parser.add_argument("--num-prompts", default="8", help="of a set (default: 8)")
    parser.add_argument("--sets", nargs="+", choices=SETS.values(), default=list(SETS.values()))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    models = ("--target", args.target, "--drafter", args.drafter)
    models += ("--compare", *args.compare) if args.compare else ()
    for name in args.sets:
        prompts = ("--prompts", args.questions / name / "question.jsonl", "--num-prompts", args.num_prompts)
        for dtype in args.dtypes:
            given = (*models, *prompts, *ANSWERS, *WAYS, "--dtype", dtype)
            report(args.work / f"{name}-{dtype}", *given, *DTYPES[dtype])
            if args.vllm_python:
                report(args.work / f"{name}-{dtype}-vllm", *given, *VLLM, args.vllm_python)
    found = {folder.parent.name: json.loads(folder.read_text()) for folder in args.work.glob("*/report.json")}
    figures = {"environment": environment(), "reports": found}
    (args.work / "figures.json").write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
