"""The messages of a chat, and the tools a target may call, as clients send them: checked before the chat template reads
them."""

import json
import re
from typing import Any

from .request_error import RequestError, shown

ROLE = re.compile(r"[A-Za-z][\w-]{0,31}")
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image")
# An image comes with the request: an address would have the server fetch it, from a network or a disk that only the
# server can read.
IMAGE = re.compile(r"data:image/[\w.+-]+;base64,[A-Za-z0-9+/=\s]+")


def check_messages(messages: list[Any], reads_images: bool, where: str = "messages") -> list[dict[str, Any]]:
    """Returns the messages of a chat. Raises RequestError for the first that is none."""
    if not messages:
        raise RequestError(f"{where} is empty; expected at least one message.", where)
    for i, message in enumerate(messages):
        _check_message(message, reads_images, f"{where}[{i}]")
    return messages


def check_input(value: str | list[Any], reads_images: bool) -> str | list[Any]:
    """Returns the `input` of a response: text, the parts of one message, or messages, calls of tools and what these
    returned. Raises RequestError for the first that is none of these."""
    if isinstance(value, str):
        return value
    if not value:
        raise RequestError("input is empty; expected text, parts of a message, or messages.", "input")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise RequestError(f"input[{i}] is {shown(item)}; expected an object.", f"input[{i}]")
    if "role" not in value[0]:
        _check_parts(value, reads_images, "input")
        return value
    for i, item in enumerate(value):
        check = _check_message if "role" in item else _check_item
        check(item, reads_images, f"input[{i}]")
    return value


def check_tools(tools: list[Any]) -> list[Any]:
    """Returns the tools that the target may call. Raises RequestError for the first that is none."""
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise RequestError(f"{where} is {shown(tool)}; expected an object of type 'function'.", where)
        _require_text(function, "name", f"{where}.function")
    return tools


def _check_message(message: Any, reads_images: bool, where: str) -> None:
    if not isinstance(message, dict):
        raise RequestError(f"{where} is {shown(message)}; expected an object with role and content.", where)
    role, content = message.get("role"), message.get("content")
    if not (isinstance(role, str) and ROLE.fullmatch(role)):
        raise RequestError(f"{where}.role is {shown(role)}; expected a role, as 'user'.", f"{where}.role")
    if "tool_calls" in message and message["tool_calls"] is None:
        del message["tool_calls"]  # clients send a message back as they got it
    if message.get("tool_call_id") is not None:
        _require_text(message, "tool_call_id", where)
    if "tool_calls" in message:
        _check_calls(message["tool_calls"], f"{where}.tool_calls")
    elif isinstance(content, list):
        _check_parts(content, reads_images, f"{where}.content")
    elif not isinstance(content, str):
        raise RequestError(
            f"{where}.content is {shown(content)}; expected text or a list of parts.", f"{where}.content"
        )


def _check_parts(parts: list[Any], reads_images: bool, where: str) -> None:
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXT_PARTS:
            _require_text(part, "text", f"{where}[{i}]")
        elif kind in IMAGE_PARTS and reads_images:
            _check_image(part.get("image_url"), f"{where}[{i}].image_url")
        else:
            served = "text or an image" if reads_images else "text, which is all that the target reads here"
            raise RequestError(f"{where}[{i}] is {shown(part)}; expected an object of {served}.", f"{where}[{i}]")


def _check_image(url: Any, where: str) -> None:
    address = url.get("url") if isinstance(url, dict) else url
    if not (isinstance(address, str) and IMAGE.fullmatch(address)):
        raise RequestError(f"{where} is {shown(address)}; expected data:image/...;base64,...", where)


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list) or not calls:
        raise RequestError(f"{where} is {shown(calls)}; expected a list of calls.", where)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RequestError(f"{where}[{i}] is {shown(call)}; expected an object with a function.", f"{where}[{i}]")
        _require_text(function, "name", f"{where}[{i}].function")
        _check_arguments(function.get("arguments"), f"{where}[{i}].function.arguments")


def _check_arguments(arguments: Any, where: str) -> None:
    try:
        is_object = isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise RequestError(f"{where} is {shown(arguments)}; expected a JSON object, as text.", where)


def _check_item(item: dict[str, Any], reads_images: bool, where: str) -> None:
    """Raises RequestError for an item of a response's `input` that is no message, no thought, no call and no result."""
    kind = item.get("type")
    if kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list):
            raise RequestError(f"{where}.content is {shown(parts)}; expected a list of parts.", where)
        for i, part in enumerate(parts):
            _require_text(part if isinstance(part, dict) else {}, "text", f"{where}.content[{i}]")
    elif kind == "function_call":
        for name in ("call_id", "name"):
            _require_text(item, name, where)
        _check_arguments(item.get("arguments"), f"{where}.arguments")
    elif kind == "function_call_output":
        for name in ("call_id", "output"):
            _require_text(item, name, where)
    else:
        raise RequestError(
            f"{where}.type is {shown(kind)}; expected a role, or the type reasoning, function_call or"
            " function_call_output.",
            where,
        )


def _require_text(holder: dict[str, Any], name: str, where: str) -> None:
    if not isinstance(holder.get(name), str):
        raise RequestError(f"{where}.{name} is {shown(holder.get(name))}; expected text.", f"{where}.{name}")
