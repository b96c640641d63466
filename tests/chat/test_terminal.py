"""The chat in a terminal, by the lines a user types; answers are of the demo pair."""

import io
import json
import os
import re
import resource
import signal
import sys

import pytest
from chat.conversations import TEMPLATE, conversation
from hostile import SPELLED, STEERING, steering_in, steering_target
from rich.console import Console
from transformers import AutoTokenizer

from eagle31_hf import demo
from eagle31_hf.chat.conversation import Figures, Piece
from eagle31_hf.chat.terminal import COMMANDS, Screen, TerminalChat, interruptible
from eagle31_hf.cli import main

WORDS = "class Parser(object):"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def typed(*lines, in_terminal=False, chat=None, width=60):
    """What is on the console after these lines."""
    chat = chat or conversation()
    out = io.StringIO()
    left = iter(lines)

    def read():
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    console = Console(
        file=out, force_terminal=in_terminal, width=width, color_system="standard" if in_terminal else None
    )
    TerminalChat(chat, Screen(console), read).run()
    return out.getvalue(), chat


def test_an_answer_and_its_figures():
    shown, chat = typed(WORDS, "/exit", "never read")
    answer = chat.answers[0]
    assert answer.text in shown
    assert f"{answer.figures.tokens} tokens, " in shown
    assert f"{answer.figures.accepted} of {answer.figures.drafted} drafted tokens accepted" in shown
    assert len(chat.messages) == 2


def test_in_a_terminal_accepted_tokens_are_underlined_and_lines_written_once():
    shown, chat = typed(WORDS, in_terminal=True)
    answer = chat.answers[0]
    underlined = "".join(re.findall(r"\x1b\[4;32m(.*?)\x1b\[0m", shown))
    accepted = "".join(piece.text for piece in answer.pieces if piece.is_accepted)
    assert set(accepted.split()) & set(underlined.split())
    last = answer.text.rstrip("\n").splitlines()[-1]
    assert last in ESCAPES.sub("", shown)
    for line in answer.text.splitlines()[:-1]:
        if line.strip() and answer.text.count(line) == 1:
            complete = ESCAPES.sub("", shown).replace("\r", "\n").splitlines()
            assert [each.rstrip() for each in complete].count(line) >= 1
    unmarked, _ = typed("/marks", WORDS, in_terminal=True)
    assert "\x1b[4;32m" not in unmarked


def test_the_drafter_is_compared_with_the_target_alone():
    shown, chat = typed(WORDS, "/compare")
    assert shown.count(chat.answers[0].text) == 2
    assert "times as fast; the same text" in shown
    assert "nothing drafted" in shown
    nothing, _ = typed("/compare")
    assert "! nothing has been asked yet" in nothing


def test_a_text_that_differs_is_said():
    chat = conversation()
    typed(WORDS, chat=chat)
    chat.answers[-1].ids[-1] += 1
    shown, _ = typed("/compare", chat=chat)
    assert "ANOTHER TEXT" in shown
    chat.options["do_sample"] = True
    assert "as it is sampled" in typed("/compare", chat=chat)[0]


def test_how_drafts_are_made():
    shown, chat = typed("/depth 3", WORDS, "/tree 12", "/tree 20 5", WORDS, "/auto", WORDS)
    assert "num_assistant_tokens=3, draft_tree_top_k=4, draft_tree_total_tokens=12" in shown
    assert "num_assistant_tokens=5, draft_tree_top_k=4, draft_tree_total_tokens=20" in shown
    assert chat.knobs == dict.fromkeys(("num_assistant_tokens", "draft_tree_top_k", "draft_tree_total_tokens"), "auto")
    chain, tree, _ = chat.answers
    assert chain.figures.drafted <= 3 * chain.figures.forwards
    assert tree.figures.drafted > 3 * tree.figures.forwards


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/foo", "! /foo: there is no such command; expected one of /compare"),
        ("/depth", "! /depth: got 0 words after it; expected /depth TOKENS."),
        ("/depth 3 4", "! /depth: got 2 words"),
        ("/depth x", "! /depth: got 'x'; expected a number from 1 to 16."),
        ("/depth 17", "! /depth: got '17'"),
        ("/depth 0", "! /depth: got '0'"),
        ("/tree 9999", "! /tree: got '9999'; expected a number from 2 to 64."),
        ("/tree 1", "! /tree: got '1'"),
        ('/save "x', "! /save: a quotation mark is not closed; expected two of them."),
        ("/save /nowhere/at/all", "! /save: /nowhere/at/all cannot be written (No such file or directory)"),
        ("/save ~nobody.here/x", "! /save: ~nobody.here/x cannot be written"),
        ("/caf\udce9", "! character 5"),
        ("caf\udce9", "! character 4 of the words is no UTF-8"),
        ("x = 1\n" * 3000, "expected fewer than 2048"),
    ],
)
def test_what_is_refused_and_the_chat_goes_on(line, told):
    shown, chat = typed(line, "/marks")
    assert told in shown
    assert "not marked" in shown
    assert chat.knobs == {"num_assistant_tokens": 4}


def test_a_conversation_is_saved_and_never_written_over(tmp_path):
    file = tmp_path / "a chat.json"
    shown, chat = typed(WORDS, f'/save "{file}"', "/clear", WORDS, f'/save "{file}"')
    assert "all is forgotten" in shown
    assert "is there already; expected a new name" in shown
    assert json.loads(file.read_text())["messages"][0]["content"] == WORDS
    assert len(chat.messages) == 2


def test_half_a_conversation_is_not_left_behind(tmp_path):
    """A limit on the size of files stands for a full disk."""
    file = tmp_path / "chat.json"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        shown, _ = typed(WORDS, f"/save {file}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "cannot be written (File too large)" in shown
    assert not file.exists()


def test_every_command_is_in_the_help():
    shown, _ = typed("/help", width=200)
    for name, command in COMMANDS.items():
        assert f"{name} " in shown
        assert command.meaning in shown


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on():
    chat = conversation()
    before, show = signal.getsignal(signal.SIGINT), Screen.show

    class Impatient(Screen):
        def show(self, pieces, figures):
            show(self, pieces, figures)
            if figures.tokens == 1:
                os.kill(os.getpid(), signal.SIGINT)

    out = io.StringIO()
    lines = [WORDS, "/help"]

    def read():
        if not lines:
            raise EOFError
        return lines.pop(0)

    TerminalChat(chat, Impatient(Console(file=out)), read).run()
    assert "stopped; " in out.getvalue()
    assert "/compare" in out.getvalue()
    assert chat.answers[0].was_stopped
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_what_it_did_before():
    """As a command it ends in one line."""
    told = []
    usual = signal.signal(signal.SIGINT, lambda *_: told.append("ended"))
    try:
        with interruptible(lambda: told.append("asked to stop")):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert told == ["asked to stop", "ended"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("CUDA out of memory.\nTried to allocate")])
def test_an_answer_that_breaks_off_leaves_the_terminal_as_it_was(error):
    """A second Ctrl-C ends the chat; where memory is short it goes on, and nothing that was said is lost."""
    chat, out = conversation(), io.StringIO()
    screen = Screen(Console(file=out, force_terminal=True, width=60))
    terminal = TerminalChat(chat, screen, iter([WORDS]).__next__)
    terminal.take(WORDS)
    shown = screen.show

    def show(pieces, figures):
        shown(pieces, figures)
        raise error

    screen.show = show
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        terminal.take(WORDS)
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h"), "the cursor is left hidden"
    assert len(chat.messages) == 2
    lines = [WORDS]

    def read():
        if lines:
            return lines.pop()
        raise EOFError

    terminal.read = read
    if isinstance(error, RuntimeError):
        terminal.run()
        assert "! CUDA out of memory." in out.getvalue()
        assert len(chat.messages) == 2


def test_lines_that_are_piped_in(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{WORDS}\n/compare\n"))
    pair = ["--target", str(demo.FOLDER / "target"), "--drafter", str(demo.FOLDER / "eagle31")]
    assert main(["chat", *pair, "--dtype", "float32", "--max-new-tokens", "12", "--temperature", "0"]) == 0
    shown = capsys.readouterr().out
    assert "no chat template" in shown
    assert "the same text" in shown


@pytest.mark.parametrize("in_terminal", [False, True])
def test_what_would_steer_the_terminal_is_shown(tmp_path, in_terminal):
    """In answers, in errors and in what is said of files; the file of a conversation has the text as it is."""
    chat, file = conversation(), tmp_path / "said.json"
    chat.tokenizer = AutoTokenizer.from_pretrained(steering_target(tmp_path / "target"))
    chat.tokenizer.chat_template = TEMPLATE
    shown, _ = typed(
        WORDS, "/compare", "/no\x1b[2J\x07such", f"/save {file}", chat=chat, in_terminal=in_terminal, width=400
    )
    own = ESCAPES.sub("", shown).replace("\r", "") if in_terminal else shown
    assert not steering_in(own)
    assert "\x1b[2J" not in shown
    assert STEERING in chat.answers[0].text
    assert own.count(SPELLED) >= 2 * chat.answers[0].text.count(STEERING)
    assert r"! /no\x1b[2J\x07such: there is no such command" in own
    assert json.loads(file.read_text())["messages"][1]["content"] == chat.answers[0].text
    assert ("\x1b[4;32m" in shown) == in_terminal  # accepted tokens are marked all the same


def test_a_piece_is_shown_whatever_it_holds():
    """Each control character alone, those that rich drops among them; a line's end in two pieces."""
    out = io.StringIO()
    screen = Screen(Console(file=out, width=60))
    for text in [*map(chr, range(32)), "\x7f", "\x9b", "a\r\nb", "c\r", "\nd"]:
        screen.show([Piece(text, False)], Figures())
    assert not steering_in(out.getvalue())
    spelled = [ascii(chr(number))[1:-1] for number in range(32) if number not in (9, 10)]
    assert "".join(out.getvalue().split()) == "".join([*spelled, r"\x7f\x9babc\rd"])
