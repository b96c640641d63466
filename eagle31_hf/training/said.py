"""Finds the text of an answer after its prompt, under templates that render the answered chat otherwise than the prompt
as it is served."""

from collections.abc import Callable
from typing import Any

from .alike_texts import num_alike
from .skipped import Skipped

OTHERWISE = "template refused it: it renders a prompt otherwise once it is answered"
Render = Callable[[list[dict[str, Any]], bool], str]  # renders messages; with what asks for an answer, or without


def said_after(render: Render, messages: list[dict[str, Any]]) -> str | None:
    """Returns what the last of messages adds to the prompt of those before it.

    Templates render a message otherwise where it is the last, and leave out what a prompt ends with (a thought begun,
    or an empty one): None for the latter, where what differs is said. Raises Skipped where nothing tells what is said.
    """
    asked = messages[:-1]
    prompt, answered = render(asked, True), render(messages, False)
    begin = num_alike(prompt, answered)
    if begin == len(prompt):
        return answered[begin:]
    header = len(render(asked, False))  # where that of the answer begins; it is empty where templates have none
    words = num_alike(prompt, render([*asked[:-1], asked[-1] | {"content": "\0"}], True))
    # What is said comes after the prompt from its last words on, or after the header of the answer alone.
    for start in (words, max(begin, header)):
        sign = prompt[start:]
        mark = sign.strip()
        if mark and start >= begin:
            count = prompt[begin:].count(mark)  # earlier messages may be alike
            before, *others = answered[begin:].split(mark, count)
            if len(others) == count and (begin < header or not before.strip()):
                return others[-1].removeprefix(sign[len(sign.rstrip()) :])
    if begin < header and (header < len(prompt) or words >= begin):
        raise Skipped(OTHERWISE)
    return None
