"""Fuzzing of requests to `eagle31 serve`: routes, methods, origins, sizes, types.

`python tests/fuzz_requests.py --runs 2000 --seed 1` sends each to a server with the demo pair, four at once, over
sockets of their own. Each must be answered, by no status from 500 on; an error must be OpenAI's, as JSON, a stream made
of JSON; and every 100 requests the target's own answer to the same question must still come, with drafts.
"""

import argparse
import json
import random
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from serving.servers import LONGEST, WORDS, Server, demo_target

CONTEXT = 320  # of the target that is served: the longest answer takes a second or two
COUNT = 16
SAID = [{"role": "system", "content": "b"}, {"role": "user", "content": "x = 1"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SOUND: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": SAID},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "stop": ["a", "\n"]},
        {"messages": SAID, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"messages": [{"role": "assistant", "tool_calls": [CALL]},
                      {"role": "tool", "content": "y", "tool_call_id": "1"}]},
        {"messages": SAID, "generation_config": '{"do_sample": true, "top_k": 5, "max_new_tokens": 3}'},
        {"messages": SAID, "logit_bias": {"5": 3}, "frequency_penalty": 0.5, "seed": 1, "top_p": 0.5},
        {"messages": SAID, "chat_template_kwargs": {"thinking": "x"}, "max_completion_tokens": 3},
    ],
    "/v1/completions": [{"prompt": "import os"}, {"prompt": "x", "suffix": "y", "stop": "z"}],
    "/v1/responses": [
        {"input": "import os", "instructions": "be brief"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]},
        {"input": [{"type": "input_text", "text": "x"}]},
        {"input": [*SAID, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "1", "output": "y"}]},
        {"input": [*SAID, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}]},
    ],
    "/load_model": [{}],
}  # fmt: skip
FIELDS = (
    "audio", "background", "best_of", "chat_template", "chat_template_kwargs", "echo", "frequency_penalty", "functions",
    "generation_config", "input", "instructions", "logit_bias", "logprobs", "max_tokens", "messages", "metadata",
    "model", "n", "previous_response_id", "prompt", "response_format", "revision", "role", "seed", "stop", "stream",
    "suffix", "temperature", "tool_choice", "tools", "top_p", "trust_remote_code", "user",
)  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 1.5, 1e308, -1e308, 2**31, 2**63, 10**18, "", " ", "x", "\x00", "\x1b[31m",
    "\ud800", "a" * 3000, "x = 1\n" * 2000, "../..", "/etc/passwd", "http://localhost/x", "{{ 7 * 7 }}", "{% for %}",
    "null", "{", "[]", '{"num_beams": 3}', '{"num_return_sequences": 2}', '{"eos_token_id": -1}',
    '{"cache_implementation": "static"}', '{"temperature": 1e-30, "do_sample": true}', '{"suppress_tokens": [0, 1]}',
    '{"max_length": 20}', '{"stop_strings": [1]}', [], [1, 2], ["x"], [[]], [None], {}, {"x": 1}, {"role": "user"},
    {"type": "text"}, [{"role": "user"}], [{}] * 50, {"url": "http://localhost/x"}, [[[[[[]]]]]],
    {"chat_template": "{{ 7 }}"}, {"tokenize": False}, "a\u202eb", "🦅" * 50,
)  # fmt: skip
PATHS = (
    "/v1/models", "/metrics", "/health", "/", "/reset", "/docs", "/openapi.json", "/v1/systemone", "//v1/completions",
    "/v1/audio/transcriptions", "/v1/chat/completions/", "/v1/../reset", "/%2e%2e/", "/\x7f", "/" + "a" * 3000,
)  # fmt: skip
METHODS = ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "X")
HOSTS = ("127.0.0.1", "[::1]", "evil.example", "", "localhost:99999", "[", "a b", "localhost\x00")
ORIGINS = ("http://localhost", "http://evil.example", "null", "", "\xff", "file://")
KINDS = ("text/plain", "", "application/json; charset=utf-16", "multipart/form-data; boundary=x")


def seldom(draw: random.Random, usual: str, others: tuple[str, ...], share: float = 0.05) -> str:
    """Draws what is usual, or one of the others."""
    return draw.choice(others) if draw.random() < share else usual


def request(draw: random.Random) -> bytes:
    """Draws a request: mostly a sound one with something wrong."""
    path = seldom(draw, draw.choice(list(SOUND)), PATHS, 0.15)
    usual = "GET" if path in PATHS[:4] else "POST"
    body = raw_body(draw) if draw.random() < 0.03 else json.dumps(drawn_body(draw, path)).encode()
    lines = [f"{seldom(draw, usual, METHODS)} {path} HTTP/1.1", f"Host: {seldom(draw, 'localhost', HOSTS)}"]
    lines += [f"Content-Type: {seldom(draw, 'application/json', KINDS)}"]
    lines += [f"Origin: {draw.choice(ORIGINS)}"] if draw.random() < 0.05 else []
    lines += [f"Authorization: {draw.choice(['Bearer x', 'x', 'Basic e', ''])}"] if draw.random() < 0.1 else []
    length = draw.choice([-1, 10**12, "x", 3]) if draw.random() < 0.02 else len(body)
    lines += [f"Content-Length: {length}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def raw_body(draw: random.Random) -> bytes:
    return draw.choice([b"", b"{", b"[", b"\xff\xfe", b'{"a": NaN}', b"[" * 5000, b"a=b&c=d", draw.randbytes(300)])


def drawn_body(draw: random.Random, path: str) -> Any:
    """Draws a body: a sound one of the route, or of another, with some values changed, added or taken away."""
    own = SOUND.get(path if draw.random() < 0.95 else draw.choice(list(SOUND)), [{}])
    body = json.loads(json.dumps(draw.choice(own)))
    if path != "/load_model":
        body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 4
        body["stream"] = draw.random() < 0.4
    for _ in range(draw.choice([0, 0, 1, 1, 1, 2, 3])):
        body = changed(draw, body)
    return body


def changed(draw: random.Random, body: Any) -> Any:
    """Returns a body in which something is another value: a field, one that is added, or one deep inside."""
    place = body
    while draw.random() < 0.6 and place and isinstance(place, dict | list):
        key = draw.choice([*place]) if isinstance(place, dict) else draw.randrange(len(place))
        if not (isinstance(place[key], dict | list) and place[key]):
            break
        place = place[key]
    if not isinstance(place, dict | list) or not place:
        return deepcopy(draw.choice(HOSTILE))
    if isinstance(place, list):
        place[draw.randrange(len(place))] = deepcopy(draw.choice(HOSTILE))
        return body
    name = draw.choice([*place, draw.choice(FIELDS)])
    if draw.random() < 0.15:
        place.pop(name, None)
    else:
        place[name] = deepcopy(draw.choice(HOSTILE))
    return body


def answered(port: int, sent: bytes) -> bytes:
    """Returns all that a server answers."""
    with socket.create_connection(("localhost", port), timeout=LONGEST) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR) if sent.startswith(b"HEAD") else None
        connection.settimeout(5 if b"Content-Length: 1000000000000" in sent else LONGEST)  # it waits for the rest
        return b"".join(received(connection))


def received(connection: socket.socket) -> Iterator[bytes]:
    try:
        while part := connection.recv(65536):
            yield part
    except (TimeoutError, ConnectionError):
        return


def faults(sent: bytes, got: bytes) -> list[str]:
    """Returns the faults in the answer to a request."""
    head, _, body = got.partition(b"\r\n\r\n")
    if not got:
        return [] if b"Content-Length: 1000000000000" in sent else ["no answer"]
    status, headers = int(head.split()[1]), head.lower()
    found = [f"status {status}"] if status >= 500 else []
    if b"transfer-encoding: chunked" in headers:
        body = b"".join(line for line in body.split(b"\r\n")[1::2])
    is_ours = b"x-content-type-options" in headers  # else the HTTP server has not taken it for a request
    if status >= 400 and is_ours and not sent.startswith(b"HEAD") and not is_error(body):
        found.append("an error that is not OpenAI's")
    if b"text/event-stream" in headers and not is_stream(body):
        found.append("a stream that is not JSON")
    return found


def is_error(body: bytes) -> bool:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)


def is_stream(body: bytes) -> bool:
    try:
        events = [event.removeprefix("data: ") for event in body.decode().split("\n\n") if event]
        return all(json.loads(event) for event in events if event != "[DONE]")
    except ValueError:
        return False


def fuzz(runs: int, seed: int, folder: Path) -> tuple[list[str], Counter]:
    """Sends many requests. Returns descriptions of the faults, and statuses with their counts."""
    served = Server(demo_target(folder, CONTEXT), "--num-assistant-tokens", "3")
    problems, statuses, lock = list[str](), Counter[str](), threading.Lock()
    numbers = iter(range(runs))
    first = served.ask(served.client(), max_tokens=COUNT).choices[0].message.content

    def work() -> None:
        while (number := next(numbers, None)) is not None:  # a range's iterator may be shared by threads
            sent = request(random.Random(f"{seed}-{number}"))
            got = answered(served.port, sent)
            found = faults(sent, got)
            with lock:
                statuses[got[9:12].decode() or "none"] += 1
                if found:
                    problems.append(f"request {number}: {'; '.join(found)}\n  {sent[:600]!r}\n  {got[:600]!r}")
                if number % 100 == 99:
                    problems.extend(not_drafting(served, first))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    problems += not_drafting(served, first)
    if served.end() != -15:
        problems.append("it did not end by its signal")
    if "Traceback" in served.log.read_text():
        problems.append(f"a traceback in the log:\n{served.log.read_text()[-3000:]}")
    return problems, statuses


def not_drafting(served: Server, expected: str) -> list[str]:
    """Returns what is wrong with the answer to a question that was answered before."""
    before = served.counts()["spec_decode_num_draft_tokens"]
    text = served.ask(served.client(), WORDS, max_tokens=COUNT).choices[0].message.content
    drafted = served.counts()["spec_decode_num_draft_tokens"] - before
    return [] if text == expected and drafted else [f"the pair drafts {drafted} tokens, and answers {text!r}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        problems, statuses = fuzz(args.runs, args.seed, Path(folder))
    print("\n".join(problems))
    print(f"{args.runs} requests, {len(problems)} faults; {dict(sorted(statuses.items()))}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
