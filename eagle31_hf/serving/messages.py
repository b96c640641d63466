"""The messages of a chat, and the tools a target may call, as clients send them: checked, and built anew of the fields
that transformers' handlers read, so that nothing else reaches the chat template or what loads images."""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

from ..images import open_image
from .fields import RequestError, expect, shown

ROLE = re.compile(r"[A-Za-z][\w-]{0,31}")
ANSWERING = ("assistant", "tool", "function")  # roles whose content may be null
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # where text stands
IMAGE_PARTS = ("image_url", "input_image")
# An address would have the server fetch an image, from a network or a disk that only the server can read.
IMAGE = re.compile(r"data:image/[\w.+-]+;base64,([A-Za-z0-9+/=\s]+)")
MOST_PIXELS = 16 * 2**20  # of an image: a file of kilobytes may unpack to gigabytes
MOST_IMAGES = 16


def checked_messages(messages: list[Any], reads_images: bool) -> list[dict[str, Any]]:
    """Returns the messages of a chat. Raises RequestError for the first that is not valid."""
    if not messages:
        raise RequestError("messages is empty; expected at least one message.", "messages")
    return [_message(message, reads_images, f"messages[{i}]") for i, message in enumerate(messages)]


def checked_input(value: str | list[Any], reads_images: bool) -> str | list[Any]:
    """Returns the `input` of a response: text, the parts of one message, or messages and, after the first, calls of
    tools, their results and reasoning. Raises RequestError for the first item that is not valid."""
    if isinstance(value, str):
        return value
    if not value:
        raise RequestError("input is empty; expected text, parts of a message, or messages.", "input")
    first = value[0]
    if isinstance(first, dict) and "role" not in first and first.get("type") in ITEMS:
        raise RequestError(f"input[0].type is {shown(first['type'])}; expected a message first.", "input[0]")
    if not (isinstance(first, dict) and "role" in first):
        return _content(value, reads_images, "input")
    return [_item(item, reads_images, f"input[{i}]") for i, item in enumerate(value)]


def checked_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """Returns the tools that the target may call, in the form that chat templates read. Raises RequestError for the
    first that is not valid."""
    found = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        is_function = isinstance(function, dict) and tool.get("type") == "function"
        expect(is_function, tool, "an object of type 'function'", where)
        _text(function, "name", f"{where}.function")
        found.append({"type": "function", "function": {name: function[name] for name in function if name != "type"}})
    return found


def images(messages: str | list[Any]) -> Iterator[str]:
    """Yields the images of checked messages, or of a checked `input`."""
    for holder in messages if isinstance(messages, list) else ():
        content = holder.get("content")
        for part in content if isinstance(content, list) else [holder]:
            if part.get("type") in IMAGE_PARTS:
                yield _address(part)


def _message(message: Any, reads_images: bool, where: str) -> dict[str, Any]:
    expect(isinstance(message, dict), message, "an object with role and content", where)
    role, calls = message.get("role"), message.get("tool_calls")
    expect(isinstance(role, str) and ROLE.fullmatch(role), role, "a role, as 'user'", f"{where}.role")
    has_no_words = message.get("content") is None and (role in ANSWERING or bool(calls))
    content = "" if has_no_words else _content(message.get("content"), reads_images, f"{where}.content")
    found: dict[str, Any] = {"role": role, "content": content}
    if calls not in (None, []):  # as clients send back an answer without calls
        expect(isinstance(calls, list), calls, "a list of calls", f"{where}.tool_calls")
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if message.get("tool_call_id") is not None:
        found["tool_call_id"] = _text(message, "tool_call_id", where)
    return found


def _content(content: Any, reads_images: bool, where: str) -> str | list[dict[str, Any]]:
    expect(isinstance(content, str | list), content, "text or a list of parts", where)
    if isinstance(content, str):
        return content
    return [_part(part, reads_images, f"{where}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, reads_images: bool, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXT_PARTS:
        return {"type": "text", "text": _text(part, TEXT_PARTS[kind], where)}
    if kind in IMAGE_PARTS and reads_images:
        address = _address(part)
        check_image(address, f"{where}.image_url")
        return {"type": kind, "image_url": address}
    served = "text or an image" if reads_images else "text, which is all that the target reads here"
    raise RequestError(f"{where} is {shown(part)}; expected an object of {served}.", where)


def _address(part: dict[str, Any]) -> Any:
    url = part.get("image_url")
    return url.get("url") if isinstance(url, dict) else url


def check_image(url: Any, where: str) -> None:
    """Raises RequestError for what is no image, and for one that is too large."""
    found = IMAGE.fullmatch(url) if isinstance(url, str) else None
    if found is None:
        raise RequestError(f"{where} is {shown(url)}; expected data:image/...;base64,...", where)
    try:
        data = base64.b64decode(found[1])
    except ValueError:
        data = b""  # which is no image
    try:
        open_image(data, MOST_PIXELS)
    except ValueError as error:
        raise RequestError(f"{where} {error}", where) from None


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    expect(isinstance(function, dict), call, "an object with a function", where)
    named = {"name": _text(function, "name", f"{where}.function")}
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    own = {"id": _text(call, "id", where)} if call.get("id") is not None else {}
    return {**own, "type": "function", "function": {**named, "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> str | dict[str, Any]:
    """Returns the arguments of a call, a JSON object or its text; a call without any may have empty text."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    expect(isinstance(value, dict), arguments, "a JSON object, as text", where)
    return arguments or "{}"


def _item(item: Any, reads_images: bool, where: str) -> dict[str, Any]:
    """Returns an item of a response's `input`."""
    if isinstance(item, dict) and "role" in item:
        return _message(item, reads_images, where)
    kind = item.get("type") if isinstance(item, dict) else None
    expect(kind in ITEMS, item, f"a message, or an object of type {', '.join(ITEMS)}", where)
    return {"type": kind, **ITEMS[kind](item, reads_images, where)}


def _reasoning(item: dict[str, Any], reads_images: bool, where: str) -> dict[str, Any]:
    parts = item.get("content") or []
    are_parts = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    expect(are_parts, parts, "a list of parts", f"{where}.content")
    return {"content": [{"text": _text(part, "text", f"{where}.content[{i}]")} for i, part in enumerate(parts)]}


def _function_call(item: dict[str, Any], reads_images: bool, where: str) -> dict[str, Any]:
    arguments = _arguments(item.get("arguments"), f"{where}.arguments")
    return {"call_id": _text(item, "call_id", where), "name": _text(item, "name", where), "arguments": arguments}


def _function_result(item: dict[str, Any], reads_images: bool, where: str) -> dict[str, Any]:
    call_id = _text(item, "call_id", where)
    return {"call_id": call_id, "output": _content(item.get("output"), reads_images, f"{where}.output")}


ITEMS = {"reasoning": _reasoning, "function_call": _function_call, "function_call_output": _function_result}


def _text(holder: dict[str, Any], name: str, where: str) -> str:
    expect(isinstance(holder.get(name), str), holder.get(name), "text", f"{where}.{name}")
    return holder[name]
