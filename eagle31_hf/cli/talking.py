"""`eagle31 chat`, `app` and `serve`: talk to a target whose answers are drafted, here or from another program."""

import argparse
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers.utils.import_utils import is_serve_available

from ..cache.prefix_cache import MOST_TOKENS, PrefixCache
from ..chat.conversation import Conversation
from ..targets.context import piece_of
from ..web.address import check_address, is_of_this_machine
from .loading import add_pair, knobs_of, load_causal_lm, load_drafter, load_tokenizer, refuse_drafter, sampling_options
from .parsing import Parser, count, integer, path, positive, progress, seed, temperature, words

KEY_VARIABLE = "EAGLE31_API_KEY"
PORT, PAGE_PORT = 8000, 7860  # as transformers' server and Gradio have them
port = integer(1, 65535)


def chat(args: argparse.Namespace) -> int:
    """Chats in the terminal; lines that are piped in are answered one after another."""
    from rich.console import Console

    from ..chat.terminal import Screen, TerminalChat

    conversation = conversations(args)()
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no UTF-8 is refused as words, and the chat goes on
    if is_terminal:
        with suppress(ImportError):  # input() then edits its line, and knows the ones before; not on every system
            import readline  # noqa: F401
    TerminalChat(conversation, Screen(Console(highlight=False)), lambda: input("\n> " if is_terminal else "")).run()
    return 0


def app(args: argparse.Namespace) -> int:
    """Serves the chat as a page until it is stopped."""
    if find_spec("gradio") is None:
        raise ImportError("the page needs gradio: pip install eagle31_hf[app]")
    from ..chat.page import Page

    check_address(args.host, args.port)
    make = conversations(args)
    title = " with ".join(Path(source).name or source for source in (args.target, args.drafter))
    warn_if_reachable(args.host, "serve it through a proxy that asks for a password")
    with closing(Page(make, title)) as page:
        os.environ.setdefault("GRADIO_TEMP_DIR", page.folder.name)  # its copies of saved conversations go with the page
        progress(f"serving {title} at {page.serve(args.host, args.port, args.allowed_host)}")
        threading.Event().wait()  # until a signal ends the program
    return 0


def conversations(args: argparse.Namespace) -> Callable[[], Conversation]:
    """Loads the pair, and returns what makes conversations with it."""
    progress(f"loading {args.target} and {args.drafter}")
    tokenizer = load_tokenizer(args.target)
    target = load_causal_lm(args.target, dtype=args.dtype).to(args.device)
    drafter = load_drafter(args, target)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    options = {"max_new_tokens": args.max_new_tokens, **sampling_options(args)}
    # long prompts are read in pieces: an answer can be stopped between them
    options["prefill_chunk_size"] = piece_of(target, drafter, **knobs_of(args))
    template = dict(args.template_option)
    cached = PrefixCache(target, args.prefix_cache_tokens)
    return lambda: Conversation(target, tokenizer, drafter, knobs_of(args), options, template, args.system, cached)


def serve(args: argparse.Namespace) -> int:
    """Serves until it is stopped."""
    if not is_serve_available():
        raise ImportError("serving needs fastapi, uvicorn, openai and pydantic: pip install eagle31_hf[serve]")
    from ..serving.server import DraftingServer

    check_address(args.host, args.port)
    refuse_drafter(args.target)
    if Path(args.target).exists() and "@" in args.target:
        found = f"--target: {args.target} has an @, behind which transformers' server looks for a revision"
        raise ValueError(f"{found}; expected a folder without.")
    key = os.environ.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    if key is None:
        warn_if_reachable(args.host, f"--api-key KEY (or {KEY_VARIABLE}) asks for one")
    elif not key or not all("!" <= sign <= "~" for sign in key):  # no header could carry it
        said = f"--api-key or {KEY_VARIABLE}: expected a key of ASCII letters, digits and signs, without spaces."
        raise ValueError(said)
    progress(f"loading {args.target} and {args.drafter}")
    DraftingServer(
        args.target,
        lambda target: load_drafter(args, target),
        knobs_of(args),
        progress,
        args.prefix_cache_tokens,
        key,
        args.cors,
        args.allowed_host,
        host=args.host,
        port=args.port,
        device=args.device,
        dtype=args.dtype,
        chat_template_kwargs=json.dumps(dict(args.template_option)),
    )
    return 0


def warn_if_reachable(host: str, remedy: str) -> None:
    """Says so where programs of other machines may ask, and no key is asked for."""
    if not is_of_this_machine(host):
        progress(f"warning: whoever reaches this machine at {host} may use the target, without a key; {remedy}")


def add_chat(parser: Parser) -> None:
    add_pair(parser)
    add_prefix_cache(parser)
    parser.add("--system", words, "a system prompt")
    parser.add_option("--max-new-tokens", positive, 512, "tokens of an answer at most")
    parser.add("--temperature", temperature, "0: greedy (default: as the target samples)")
    parser.add("--seed", seed, "of what is sampled (default: another one each time)")
    parser.add_template_option()
    parser.add_device("cpu")


def add_serve(parser: Parser) -> None:
    add_pair(parser)
    add_prefix_cache(parser)
    add_address(parser, PORT)
    parser.add_flag("--cors", "let web pages of any origin ask")
    what = "answer only requests with this key, as OpenAI's clients send it"
    parser.add("--api-key", words, f"{what} (default: the variable {KEY_VARIABLE})", metavar="KEY")
    parser.add_template_option()
    parser.add_device("cpu")


def add_app(parser: Parser) -> None:
    add_chat(parser)
    add_address(parser, PAGE_PORT)


def add_prefix_cache(parser: Parser) -> None:
    """Adds --prefix-cache-tokens."""
    what = (
        "keep keys and values of the last texts, N tokens and the very last text: what goes on from one reads only what"
        " is new; 0: keep none"
    )
    parser.add_option("--prefix-cache-tokens", count, MOST_TOKENS, what, metavar="N")


def add_address(parser: Parser, default_port: int) -> None:
    """Adds --host, --port and --allowed-host."""
    parser.add_option("--host", path, "localhost", "to listen at")
    parser.add_option("--port", port, default_port)
    known = "always: an IP address, localhost, this machine's name"
    what = f"a name that requests may be sent to, as behind a proxy ({known})"
    parser.add_several("--allowed-host", path, what, "NAME")
