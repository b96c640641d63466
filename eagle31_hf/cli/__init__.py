"""`eagle31`, the program: a table of commands and their functions.

Exit status 0: done; 1: something failed; 2: the user's input was at fault. Ctrl-C, SIGTERM and a closed output end the
process by their signal.
"""

import argparse
import contextlib
import logging
import sys
from importlib import import_module

from ..version import __version__
from . import endings
from .parsing import Parser, progress

# name: (module here that has the command's function, `name`, and `add_name` for its arguments; one line of help;
# arguments of the example)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "demo": ("run", "watch a trained pair decode the same text faster; offline", "--profile"),
    "generate": ("run", "stream a completion with any target and drafter",
        '--target Qwen/Qwen3-8B --drafter ./my-drafter --chat "Why is the sky blue?"'),
    "chat": ("talking", "chat with a target in the terminal, drafted tokens marked as they are accepted",
        "--target Qwen/Qwen3-8B --drafter ./my-drafter"),
    "app": ("talking", "the same chat as a page for a browser, by Gradio",
        "--target Qwen/Qwen3-8B --drafter ./my-drafter"),
    "serve": ("talking", "serve a target with its drafter as OpenAI's API, by transformers' own server",
        "--target Qwen/Qwen3-8B --drafter ./my-drafter --device cuda --dtype bfloat16"),
    "check": ("checking",
        ("say what will work with a target, and whether a drafter fits it, before anything large is downloaded (0:"
        " works, 1: does not)"),
        "Qwen/Qwen3-8B RedHatAI/Qwen3-8B-speculator.eagle3"),
    "info": ("checkpoints", "say what a drafter's checkpoint is, which format it has, and why it was read so",
        "RedHatAI/Qwen3-8B-speculator.eagle3"),
    "convert": ("checkpoints",
        "convert an EAGLE 3 or 3.1 checkpoint of any format to the native one, in place unless a destination is named",
        "./my-drafter"),
    "export": ("checkpoints",
        "write a drafter as vLLM, SGLang or speculators read it, and print the line that serves it",
        "./my-drafter ./my-drafter-vllm --format vllm"),
    "publish": ("checkpoints",
        "upload a native drafter, or a config that points to its weights, with a model card",
        "model_cards/EAGLE3-LLaMA3.1-Instruct-8B --repo-id me/EAGLE3-LLaMA3.1-Instruct-8B"),
    "bench": ("diagnosing", "report on drafters beside the target alone, on your prompts",
        "acceptance --target Qwen/Qwen3-8B --drafter ./my-drafter --prompts prompts.jsonl"),
    "drift": ("diagnosing",
        "report on drafters by depth: states, attention, acceptance, in longer contexts too, and what to do about them",
        "--target Qwen/Qwen3-8B --drafter ./my-drafter --prompts prompts.jsonl --output report"),
    "prepare-data": ("preparation",
        "turn chats or texts into training data, in the target's own words and with its states where asked",
        "--target Qwen/Qwen3-8B --data sharegpt.jsonl --output prepared --regenerate"),
    "train": ("training", "train a drafter for a causal language model",
        "--target Qwen/Qwen3-8B --data prepared --output my-drafter --draft-vocab-size 32000 --bf16 --device cuda"),
    "upgrade": ("checkpoints", "turn an EAGLE 3 drafter into an EAGLE 3.1 one by calibration on texts",
        "--target Qwen/Qwen3-8B --drafter ./my-drafter --texts texts.jsonl --output ./upgraded"),
}  # fmt: skip


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of all commands. `only`: the command that is to be run; the others then take no arguments,
    since what each imports takes seconds."""
    main_parser = Parser(prog="eagle31", description="EAGLE 3.1 speculative decoding for transformers.")
    main_parser.add_argument("--version", action="version", version=f"eagle31_hf {__version__}")
    commands = main_parser.add_subparsers(required=True, metavar="command")
    for name, (module, line, example) in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line, epilog=f"example: eagle31 {name} {example}")
        if only in (name, None):
            function, of_command = name.replace("-", "_"), import_module(f".{module}", __name__)
            getattr(of_command, f"add_{function}")(command)
            command.set_defaults(function=getattr(of_command, function))
    return main_parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the program, or, with `arguments`, one command within the caller's process, whose signals stay its own.

    Returns the exit status.
    """
    if arguments is not None:
        return answer(arguments)
    if not any(word.startswith("--load-in") for word in sys.argv):
        # Others import bitsandbytes, which on some processors warns of a kernel that only 4-bit weights would need.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return endings.as_program(lambda: answer(sys.argv[1:]))


def answer(arguments: list[str]) -> int:
    """Parses the arguments and runs the command. An error that is expected becomes one line on stderr, any other is
    raised. Returns the exit status."""
    args = None
    try:
        args = parser(arguments[0] if arguments else "").parse_args(arguments)
        args.out = sys.stdout
        # with --json, lines that libraries print must not be on stdout
        with contextlib.redirect_stdout(sys.stderr if getattr(args, "json", False) else sys.stdout):
            status = args.function(args)
        if args.out is not None:
            args.out.flush()
        return status
    except endings.Stopped as stop:
        progress(f"stopped by {stop}. {'Nothing was done.' if args is None else endings.outlook(args)}")
        raise
    except Exception as error:
        explained = endings.explain(error, args)
        if explained is None:
            raise
        print(explained[0], file=sys.stderr)
        return explained[1]
