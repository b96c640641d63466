"""Measures drafters of a chat model on the six question sets of EAGLE's papers: how much is accepted, and the tokens a
second beside the target alone, transformers' own speculation and vLLM.

    git clone https://github.com/SafeAILab/EAGLE
    python examples/chat_figures.py --target HuggingFaceTB/SmolLM2-135M-Instruct \\
        --eagle31 model_cards/SmolLM2-135M-Instruct-eagle31 --questions EAGLE/eagle/data --work work \\
        --vllm-python VLLM/bin/python --output docs/figures/chat.json

Every set in fp32 and in bf16 is a report of `eagle31 bench acceptance`, in WORK/SET-DTYPE; in bf16 also of malformed
prompts, temperature 1 and, of articles, contexts up to 4,096 tokens. vLLM, where its Python is given, decodes the
prompts of all sets of a line in one report, since it takes a minute to start. The same line again goes on where it was
stopped, and other lines, one after the other, add their sets and dtypes. OUTPUT gets what the tables of
docs/benchmarks.md show (`python docs/tables.py`).
"""

import argparse
import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from eagle31_hf.cli import main as eagle31
from eagle31_hf.storage.folders import replace_json

SETS = {
    "mt_bench": "MT-Bench", "humaneval": "HumanEval", "gsm8k": "GSM8K", "alpaca": "Alpaca", "qa": "Natural Questions",
    "sum": "CNN/DM",
}  # fmt: skip
WAYS = ("--depths", "2", "3", "5", "--trees", "24")
DTYPES = {
    "float32": ("--no-perturbations", "--rivals", "prompt-lookup", "assisted-loop"),
    "bfloat16": ("--rivals", "prompt-lookup", "--temperatures", "1"),
}
# Contexts are made of a set's own prompts: only articles are long enough.
CONTEXTS = {("sum", "bfloat16"): ("--lengths", "512", "1024", "2048", "4096")}
ALL = "all"  # of the sets that are asked for, in the names of vLLM's reports
VLLM = ("--depths", "2", "3", "--trees", "--no-perturbations", "--python")
KEPT_FACTS = ("processor", "cores", "threads", "torch", "transformers", "new tokens a prompt", "prompts")


def ours(arguments: list[str]) -> int:
    return eagle31(["bench", "acceptance", *arguments])


def report(
    folder: Path, names: dict[str, str], *options: object, run: Callable[[list[str]], int] = ours
) -> dict[str, Any]:
    """Runs `eagle31 bench acceptance`, or the same of vLLM, into a folder; what has been measured there, of the same
    models, is not measured again. Returns the figures that the tables show."""
    print(folder.name, flush=True)
    resumed = ("--resume",) if folder.exists() else ()
    if status := run(["--output", str(folder), *map(str, options), *resumed]):
        raise SystemExit(status)
    return figures(json.loads((folder / "report.json").read_text(encoding="utf-8")), names)


def table(found: dict[str, Any], title: str) -> list[list[Any]]:
    """The rows of the first table of a report's section."""
    return next(section["tables"][0]["rows"] for section in found["sections"] if section["title"] == title)


def figures(found: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The figures of a report that the tables show. `names`: of the drafters, by the report's labels, in its order."""
    shown = {(who, way): float(speed.split()[0]) for who, way, speed, *_ in table(found, "Speed")}
    drafters = {}
    for label, drafter in names.items():
        conditions = found["figures"][label]
        served = conditions["as served"]
        drafters[drafter] = {
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
    others = {who: speed for (who, way), speed in shown.items() if who not in names}
    facts = {name: found["facts"][name] for name in KEPT_FACTS if name in found["facts"]}
    return {"facts": facts, "others": others, "drafters": drafters}


def first_lines(file: Path, count: int) -> list[str]:
    """The first questions of a set, a line each."""
    with file.open(encoding="utf-8") as lines:
        return [line.rstrip("\n") + "\n" for line in islice(lines, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub repository of the model")
    parser.add_argument("--eagle31", required=True, help="folder or Hub repository of an EAGLE 3.1 drafter")
    parser.add_argument("--eagle3", help="of an EAGLE 3 drafter to measure beside it (default: none)")
    parser.add_argument("--questions", type=Path, required=True, help="`eagle/data` of EAGLE's repository")
    parser.add_argument("--work", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--output", type=Path, help="file of the figures (default: WORK/chat.json)")
    parser.add_argument("--vllm-python", help="the Python that vLLM is installed for (default: it is left out)")
    parser.add_argument(
        "--num-prompts", default="8", help="of a set (default: 8; five are too few for contexts of 4,096)"
    )
    parser.add_argument("--max-new-tokens", default="64", help="a prompt (default: 64)")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=[*SETS])
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=[*DTYPES])
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    output = args.output or args.work / "chat.json"
    found = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    models = ("--target", args.target, "--drafter", args.eagle31, "--max-new-tokens", args.max_new_tokens)
    names = {Path(args.eagle31).name: "EAGLE 3.1"}
    compared: tuple[str, ...] = ()
    if args.eagle3:
        if Path(args.eagle3).name in names:
            parser.error(f"both drafters are named {Path(args.eagle3).name}; expected folders of two names")
        names[Path(args.eagle3).name] = "EAGLE 3"
        compared = ("--compare", args.eagle3)
    files = {name: args.questions / name / "question.jsonl" for name in args.sets}
    for dtype in args.dtypes:
        given = (*models, "--dtype", dtype, "--num-prompts")
        for name, file in files.items():
            key, options = f"{name}-{dtype}", (*WAYS, *DTYPES[dtype], *CONTEXTS.get((name, dtype), ()))
            prompts = (args.num_prompts, "--prompts", file, *compared)
            found[key] = report(args.work / key, names, *given, *prompts, *options)
            replace_json(output, found)
        if args.vllm_python:
            key, questions = f"{ALL}-{dtype}-vllm", args.work / "questions.jsonl"
            lines = [line for file in files.values() for line in first_lines(file, int(args.num_prompts))]
            questions.write_text("".join(lines), encoding="utf-8")
            prompts = (len(lines), "--prompts", questions)
            sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
            from vllm_acceptance import main as vllm

            options = (*given, *prompts, *VLLM, args.vllm_python)
            found[key] = report(args.work / key, {Path(args.eagle31).name: "EAGLE 3.1"}, *options, run=vllm)
            replace_json(output, found)


if __name__ == "__main__":
    main()
