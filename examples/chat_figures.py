"""Measures drafters of a chat model on the six question sets of EAGLE's papers: how much is accepted, and the tokens a
second beside the target alone, transformers' own speculation and vLLM.

    git clone https://github.com/SafeAILab/EAGLE
    python examples/chat_figures.py --target HuggingFaceTB/SmolLM2-135M-Instruct --drafter EAGLE31 --compare EAGLE3 \\
        --questions EAGLE/eagle/data --work work --vllm-python VLLM/bin/python --output docs/figures/chat.json

Every set in fp32 and in bf16 is a report of `eagle31 bench acceptance`, in WORK/SET-DTYPE; in bf16 also of prompts as
they should not be, temperature 1 and contexts up to 4,096 tokens. vLLM decodes the same prompts, where its Python is
given. The same line again goes on where it was stopped, and other lines add their sets and dtypes. OUTPUT gets what the
tables of docs/benchmarks.md show (`python docs/tables.py`).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from eagle31_hf.cli import main as eagle31
from eagle31_hf.storage.folders import replace_json

SETS = {
    "mt_bench": "MT-Bench", "humaneval": "HumanEval", "gsm8k": "GSM8K", "alpaca": "Alpaca", "qa": "Natural Questions",
    "sum": "CNN/DM",
}  # fmt: skip
ANSWERS = ("--max-new-tokens", "96")
WAYS = ("--depths", "2", "3", "5", "--trees", "24")
DTYPES = {
    "float32": ("--no-perturbations", "--rivals", "prompt-lookup", "assisted-loop"),
    "bfloat16": ("--rivals", "prompt-lookup", "--temperatures", "1", "--lengths", "512", "1024", "2048", "4096"),
}
VLLM = ("--depths", "2", "3", "--trees", "--no-perturbations", "--engine", "vllm", "--engine-python")
KEPT_FACTS = ("processor", "cores", "threads", "torch", "transformers", "new tokens a prompt", "prompts")


def report(folder: Path, *options: object) -> None:
    """Runs `eagle31 bench acceptance` into a folder, where that has not been done."""
    if (folder / "report.json").exists():
        return
    print(folder.name, flush=True)
    resumed = ("--resume",) if folder.exists() else ()
    if status := eagle31(["bench", "acceptance", "--output", str(folder), *map(str, options), *resumed]):
        raise SystemExit(status)


def table(found: dict[str, Any], title: str) -> list[list[Any]]:
    """The rows of the first table of a report's section."""
    return next(section["tables"][0]["rows"] for section in found["sections"] if section["title"] == title)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of a report that the tables show."""
    shown = {(who, way): float(speed.split()[0]) for who, way, speed, *_ in table(found, "Speed")}
    drafters = {}
    for label, conditions in found["figures"].items():
        served = conditions["as served"]
        drafters[label] = {
            "ways": {
                way: {
                    "tokens_per_second": round(each["tokens_per_second"]["value"], 1),
                    "accepted_length": round(each["accepted_length"]["value"], 3),
                    "same_text": each["same_text"],
                    "prompts": each["prompts"],
                }
                for way, each in served.items()
            },
            "conditions": {
                name: round(next(iter(ways.values()))["accepted_length"]["value"], 3)
                for name, ways in conditions.items()
                if name != "as served"
            },
        }
    for position, *shares in table(found, "Acceptance by position"):
        for label, share in zip(drafters, shares, strict=True):
            drafters[label].setdefault("by_position", []).append(None if share is None else round(share, 3))
            assert len(drafters[label]["by_position"]) == position
    others = {who: speed for (who, way), speed in shown.items() if who not in drafters}
    facts = {name: found["facts"][name] for name in KEPT_FACTS if name in found["facts"]}
    return {"facts": facts, "others": others, "drafters": drafters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub repository of the model")
    parser.add_argument("--drafter", required=True, help="of an EAGLE 3.1 drafter")
    parser.add_argument("--compare", nargs="*", default=[], help="others beside it")
    parser.add_argument("--questions", type=Path, required=True, help="`eagle/data` of EAGLE's repository")
    parser.add_argument("--work", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--output", type=Path, help="file of the figures (default: WORK/chat.json)")
    parser.add_argument("--vllm-python", help="the Python that vLLM is installed for (default: it is left out)")
    parser.add_argument("--num-prompts", default="8", help="of a set (default: 8)")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=[*SETS])
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=[*DTYPES])
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    models = ("--target", args.target, "--drafter", args.drafter)
    models += ("--compare", *args.compare) if args.compare else ()
    for name in args.sets:
        prompts = ("--prompts", args.questions / name / "question.jsonl", "--num-prompts", args.num_prompts)
        for dtype in args.dtypes:
            given = (*models, *prompts, *ANSWERS, "--dtype", dtype)
            report(args.work / f"{name}-{dtype}", *given, *WAYS, *DTYPES[dtype])
            if args.vllm_python:
                report(args.work / f"{name}-{dtype}-vllm", *given, *VLLM, args.vllm_python)
    found = {file.parent.name: figures(json.loads(file.read_text())) for file in args.work.glob("*/report.json")}
    replace_json(args.output or args.work / "chat.json", found)


if __name__ == "__main__":
    main()
