"""A server as those meet it who mean it no good, or get requests wrong: `eagle31 serve` as a process of its own."""

import inspect
import json
import signal
import socket
import threading
import time
from contextlib import suppress

import httpx
import pytest
from fuzz_requests import fuzz
from serving.fixtures import expected, folder, server
from serving.servers import COUNT, WORDS, Server, demo_target, free_port, text_of, wait_until

from eagle31_hf import demo
from eagle31_hf.cli import main
from eagle31_hf.printable import printable

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAID = [{"role": "user", "content": "x = 1"}]


def said(words):
    return [{"role": "user", "content": words}]


def still_drafts(server, expected, **headers):
    """The target's own answer, and drafts for it: a server whose target was loaded anew has none."""
    before = server.counts(**headers)
    key = headers.get("Authorization", "Bearer none").partition(" ")[2]
    assert server.ask(server.client(key)).choices[0].message.content == expected(WORDS)
    added = {name: count - before.get(name, 0) for name, count in server.counts(**headers).items()}
    return added["generation_tokens"] == COUNT and added["spec_decode_num_draft_tokens"] > 0


# -- routes


def test_what_only_transformers_needs_is_not_there(server, expected):
    for method, path in (
        ("POST", "/reset"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/systemone"),
        ("GET", "/docs"),
        ("GET", "/redoc"),
        ("GET", "/openapi.json"),
        ("GET", "/v1/models/../../reset"),
        ("POST", "//reset"),
        ("DELETE", "/v1/models/x"),
    ):
        answer = server.request(method, path, {} if method == "POST" else None)
        assert (answer.status, answer.json["error"]["type"]) == (404, "invalid_request_error"), path
    assert still_drafts(server, expected)


def test_no_route_is_taken_over_from_transformers(server):
    """The routes are this library's own list, whatever a release of transformers brings."""
    from transformers.cli.serving.server import build_server

    from eagle31_hf.serving.app import ROUTES

    names = inspect.signature(build_server).parameters
    theirs = build_server(**{name: None for name in names if name != "enable_cors"})
    others = [route for route in theirs.routes if getattr(route, "path", "/") not in ROUTES]
    assert len(others) > 4
    for route in others:
        for method in route.methods:
            assert server.request(method, route.path, {} if method == "POST" else None).status == 404


def test_a_wrong_method_is_told(server):
    for method, path in (("GET", CHAT), ("POST", "/v1/models"), ("PUT", "/metrics"), ("OPTIONS", CHAT)):
        answer = server.request(method, path)
        assert (answer.status, answer.json["error"]["type"]) == (405, "invalid_request_error")


def test_no_client_loads_another_model(server, expected):
    """Nor does an answer say whether there is one of that name on the server's disk, or one that is spelled so."""
    asked = (("/load_model", {}), (CHAT, {"messages": SAID}), (TEXT, {"prompt": "x"}), (RESPONSES, {"input": "x"}))
    spelled = (f"{server.target}/", f"{server.target}/.", f"{server.target}@main")
    for name in ("another/model", "/etc/passwd", "../target", "", "demo@main", "x:y.gguf", *spelled):
        for path, body in asked:
            answer = server.request("POST", path, body | {"model": name})
            assert (answer.status, answer.json["error"]["code"]) == (400, "model_not_found")
            assert (
                answer.json["error"]["message"] == f"model is {name!r}; expected {server.target!r}, the only one here."
            )
    assert "Loading" not in server.log.read_text().split("eagle31: serving", 1)[1]
    assert still_drafts(server, expected)


def test_the_model_is_ready_for_those_who_ask_before_they_begin(server):
    """As `transformers chat` does."""
    answer = server.request("POST", "/load_model", {"model": server.target})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert json.loads(answer.body.decode().removeprefix("data: "))["status"] == "ready"


def test_the_first_page_needs_nothing_from_elsewhere(server):
    answer = server.request("GET", "/")
    assert answer.headers["content-type"].startswith("text/plain")
    assert CHAT in answer.body.decode()


# -- where requests come from


def test_a_name_that_was_made_to_lead_here_is_refused(server):
    """Other names: tests/web/test_gate.py."""
    for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/metrics"), ("GET", "/")):
        answer = server.request(method, path, {} if method == "POST" else None, {"Host": "evil.example"})
        assert (answer.status, answer.json["error"]["code"]) == (403, "host_not_allowed")
        assert socket.gethostname() not in answer.json["error"]["message"]
    for host in (f"localhost:{server.port}", socket.gethostname()):
        assert server.request("GET", "/v1/models", headers={"Host": host}).status == 200


def test_pages_of_other_origins_may_not_ask(server, expected):
    here = f"localhost:{server.port}"
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        asked = {"Origin": f"http://{here}.evil.example", "Content-Type": kind}
        answer = server.request("POST", CHAT, {"messages": SAID}, asked)
        assert (answer.status, answer.json["error"]["code"]) == (403, "origin_not_allowed")
    own = server.request("POST", CHAT, {"messages": SAID, "max_tokens": 2}, {"Origin": f"http://{here}"})
    assert own.status == 200
    assert "access-control-allow-origin" not in own.headers
    assert still_drafts(server, expected)


# -- the key


def test_a_key_other_origins_and_names_where_they_are_asked_for(folder, expected):
    served = Server(
        folder, "--cors", "--allowed-host", "my.box", "--num-assistant-tokens", "4", EAGLE31_API_KEY="se-cret"
    )
    try:
        for key in (None, "", "se-cre", "se-crett", "Se-cret"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            for method, path in (("GET", "/"), ("POST", CHAT), ("GET", "/metrics"), ("POST", "/load_model")):
                answer = served.request(method, path, {} if method == "POST" else None, headers)
                assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            served.ask(served.client("another"))
        assert served.request("GET", "/health").status == 200
        key = {"Authorization": "Bearer se-cret"}
        assert still_drafts(served, expected, **key)
        asked = {"Origin": "http://page.example", "Host": "my.box"}
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        for method, body, headers, status in (
            ("OPTIONS", None, preflight, 200),
            ("POST", {"messages": SAID, "max_tokens": 2}, key, 200),
            ("POST", {"messages": SAID, "n": 2}, key, 400),
        ):
            answer = served.request(method, CHAT, body, asked | headers)
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, "*")
        assert served.request("GET", "/v1/models", headers=key | {"Host": "other.box"}).status == 403
        assert "se-cret" not in served.log.read_text()
    finally:
        served.end()


@pytest.mark.parametrize("key", ["", "a b", "é", "a\n"])
def test_a_key_that_no_header_carries_is_refused_before_anything_is_loaded(folder, capsys, key):
    pair = ["--target", str(folder), "--drafter", str(demo.FOLDER / "eagle31"), "--port", str(free_port())]
    assert main(["serve", *pair, "--api-key", key]) == 2
    told = capsys.readouterr().err
    assert "expected a key of ASCII letters" in told
    assert "loading" not in told


def test_serving_beyond_this_machine_without_a_key_is_warned_of(tmp_path, folder, capsys):
    """Before anything is loaded: the drafter that is named here is not there."""
    pair = ["--target", str(folder), "--drafter", str(tmp_path / "none"), "--port", str(free_port())]
    for host, key, is_warned in (
        ("0.0.0.0", [], True),
        ("::", [], True),
        ("localhost", [], False),
        ("127.0.0.1", [], False),
        ("0.0.0.0", ["--api-key", "k"], False),
    ):
        assert main(["serve", *pair, "--host", host, *key]) != 0
        assert ("warning: whoever reaches this machine" in capsys.readouterr().err) == is_warned


# -- requests that are wrong

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}


def call(arguments="{}", **changed):
    one = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}} | changed
    return [{"role": "assistant", "content": None, "tool_calls": [one]}, *SAID]


# Of chats: fields, by the one that the answer names, and values which each are wrong.
WRONG_FIELDS = {
    "messages": ["x", []],
    "messages[0]": [["x"]],
    "messages[0].role": [[{"content": "x"}], [{"role": "", "content": "x"}]],
    "messages[0].content": [[{"role": "user", "content": 3}], [{"role": "user"}]],
    "messages[0].content[0]": [
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}],
    ],
    "messages[0].content[0].text": [[{"role": "user", "content": [{"type": "text"}]}]],
    "messages[0].tool_calls": [[{"role": "assistant", "tool_calls": 3}]],
    "messages[0].tool_calls[0]": [call(function=3)],
    "messages[0].tool_calls[0].function.arguments": [call("{"), call("[1]")],
    "stop": [[1, 2], "", ["a"] * 17, "a" * 101],
    "temperature": [-1, "hot", True],
    "top_p": [1.5],
    "seed": ["x", 2**63],
    "max_tokens": [0, 1.5],
    "stream": ["yes"],
    "logit_bias": [{"1": "x"}, {"x": 1}, {"99999999": 1}],
    "tools[0]": [[3]],
    "tools[0].function.name": [[{"type": "function", "function": {}}]],
    "n": [2],
    "logprobs": [True],
    "response_format": [{"type": "json_object"}],
    "trust_remote_code": [True],
    "chat_template_kwargs": [{"chat_template": "{{ 7 }}"}, {"return_tensors": "np"}, {"thinking": [1]}],
    "generation_config": [
        "{", "[]", '{"cache_implementation": "static"}', '{"num_beams": 1000}', '{"eos_token_id": 99999999}',
    ],
}  # fmt: skip
WRONG = [
    *((CHAT, {"messages": SAID, name.partition("[")[0]: x}, name) for name, each in WRONG_FIELDS.items() for x in each),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": SAID, "tools": [FUNCTION], "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": SAID, "stream": True, "generation_config": '{"num_beams": 2}'}, "generation_config"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": ["x", "y"]}, "prompt"),
    (TEXT, {"prompt": "x", "echo": True}, "echo"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": 3}, "input"),
    (RESPONSES, {"input": [*SAID, {"type": "x"}]}, "input[1]"),
    (RESPONSES, {"input": [*SAID, {"type": "function_call_output"}]}, "input[1].call_id"),
    (RESPONSES, {"input": "x", "previous_response_id": "y"}, "previous_response_id"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG)
def test_what_a_client_gets_wrong_is_told(server, path, body, param):
    for stream in (False, True):
        answer = server.request("POST", path, {"stream": stream} | body)
        assert answer.status == 400, answer.body
        error = answer.json["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert len(error["message"]) < 1000


BODIES = [
    b"",
    b"{",
    b"[]",
    b"3",
    b'{"messages": NaN}',
    b"\xff",
    b'{"a": 1, "a": 2}',
    b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
]


@pytest.mark.parametrize(
    "body", [*BODIES, b"[" * 10**6, b'{"stop": [' + b'"a",' * 10**5 + b'"a"]}'], ids=lambda b: str(b[:12])
)
def test_what_is_no_request_is_told(server, body):
    for path in (CHAT, TEXT, RESPONSES, "/load_model"):
        answer = server.request("POST", path, body, {"Content-Type": "application/json"})
        assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


def test_text_that_is_no_utf_8_is_told(server):
    for body in (
        {"messages": [{"role": "user", "content": "a\ud800"}]},
        {"messages": SAID, "stop": "\udfff"},
        {"messages": SAID, "chat_template_kwargs": {"thinking": "\ud800"}},
        {"messages": SAID, "\ud800": 1},
    ):
        answer = server.request("POST", CHAT, body)
        assert answer.status == 400
        assert "lone surrogate" in answer.json["error"]["message"]


def test_the_log_steers_no_terminal(server):
    """What a chat template raises of a client's words is in the answer, and in the log."""
    words = "\x1b[31mred\x9b2J\u202e"
    answer = server.request("POST", CHAT, {"messages": said(words), "chat_template_kwargs": {"thinking": "refuse"}})
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert words in answer.json["error"]["message"]
    log = server.log.read_text()
    assert r"\x1b[31mred\x9b2J\u202e" in log
    assert printable(log) == log


def test_a_request_that_is_too_long_is_not_read(server, expected):
    words = b'{"messages": [{"role": "user", "content": "' + b"a" * (17 * 2**20) + b'"}]}'
    with socket.create_connection(("localhost", server.port)) as connection:  # whatever its headers say
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        with suppress(OSError):  # the server may have closed the connection by then
            for _ in range(17):
                connection.sendall(b"%x\r\n%s\r\n" % (2**20, b"a" * 2**20))
        assert connection.recv(12) in (b"HTTP/1.1 413", b"")
    assert server.request("POST", CHAT, headers={"Content-Length": str(len(words))}).status == 413
    assert still_drafts(server, expected)


def test_fields_that_change_nothing_here_are_taken(server, expected):
    """As clients of OpenAI's send them of themselves."""
    neutral = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "response_format": {"type": "text"}, "stop": None}
    hints = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
    }
    stream = server.ask(server.client(), stream=True, stream_options={"include_usage": True}, **neutral, **hints)
    assert text_of(stream) == expected(WORDS)


def test_clients_of_other_libraries(server, expected):
    """As they ask by default, and what they read of an answer."""
    from huggingface_hub import InferenceClient

    messages = said(WORDS)
    answer = InferenceClient(base_url=f"http://localhost:{server.port}").chat_completion(messages, max_tokens=COUNT)
    assert answer.choices[0].message.content == expected(WORDS)
    assert answer.model == server.target == server.ask(server.client()).model
    prompted = server.client().completions.create(model=server.target, prompt=[WORDS], max_tokens=4, stop=[], top_p=0)
    assert prompted.usage.completion_tokens == 4
    responded = server.client().responses.create(model=server.target, input=WORDS, max_output_tokens=COUNT)
    assert responded.output_text == expected(WORDS)
    for path, body in ((CHAT, {"messages": messages}), (TEXT, {"prompt": WORDS})):
        stream = server.request("POST", path, body | {"stream": True, "max_tokens": 2})
        assert stream.body.endswith(b"data: [DONE]\n\n")


def test_a_whole_generation_config_is_taken(server, expected):
    """As `transformers chat` sends it: with all that is as it always is."""
    from transformers import GenerationConfig

    for config in (GenerationConfig(do_sample=False, max_new_tokens=8), GenerationConfig(do_sample=False)):
        for whole in (config.to_json_string(use_diff=False), config.to_json_string()):
            answer = server.ask(server.client(), max_tokens=8, extra_body={"generation_config": whole})
            assert answer.choices[0].message.content == expected(WORDS, 8)


def test_integers_stand_for_real_numbers(server):
    """JavaScript writes 2.0 so, and transformers takes it for none."""
    answers = []
    for two, one in (("2", "1"), ("2.0", "1.0")):
        config = f'{{"do_sample": true, "temperature": {two}, "repetition_penalty": {two}, "typical_p": {one}}}'
        body = {"messages": said(WORDS), "seed": 1, "max_tokens": 8, "generation_config": config}
        answers.append(server.request("POST", CHAT, body).json["choices"])
    assert answers[0] == answers[1]


def test_the_template_s_own_variables_are_taken(server, expected):
    options = {"thinking": "import os", "enable_thinking": False}  # the other one it does not read
    answer = server.ask(server.client(), extra_body={"chat_template_kwargs": options})
    assert answer.usage.prompt_tokens > server.ask(server.client()).usage.prompt_tokens


def test_no_tool_is_called_where_none_may_be(server, expected):
    answer = server.ask(server.client(), tools=[FUNCTION], tool_choice="none")
    assert answer.choices[0].message.content == expected(WORDS)


def test_very_cold_is_greedy(server, expected):
    for temperature in ("1e-9", "0", "0.0005"):
        config = f'{{"do_sample": true, "temperature": {temperature}, "max_new_tokens": 8}}'
        answer = server.request("POST", CHAT, {"messages": said(WORDS), "generation_config": config})
        assert answer.json["choices"][0]["message"]["content"] == expected(WORDS, 8)
    answer = server.ask(server.client(), max_tokens=8, temperature=1e-300)
    assert answer.choices[0].message.content == expected(WORDS, 8)


# -- the context


def test_a_prompt_without_room_is_refused_before_anything_runs(server, expected):
    """With both numbers, also where it comes as a stream."""
    before = server.counts()
    words = "x = 1\n" * 3000
    for options in ({}, {"stream": True}):
        with pytest.raises(
            openai.BadRequestError, match=r"the prompt has \d{4,5} tokens; expected fewer than 2048"
        ) as error:
            server.ask(server.client(), words, **options)
        assert error.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="expected fewer than 2048"):
            server.client().completions.create(model=server.target, prompt=words, **options)
        with pytest.raises(openai.BadRequestError, match="expected fewer than 2048"):
            server.client().responses.create(model=server.target, input=words, **options)
    with pytest.raises(openai.BadRequestError, match=r"has 300\d\d\d characters; expected at most 98304"):
        server.ask(server.client(), "x" * 300_000)
    assert server.counts() == before
    assert still_drafts(server, expected)


def test_an_answer_ends_with_the_context(server):
    """Whatever number is named, or none."""
    words = "x = 1\n" * 400
    config = {"generation_config": '{"eos_token_id": -1}'}
    for options in ({"max_tokens": 10**9}, {"max_tokens": None}):
        answer = server.ask(server.client(), words, **options, extra_body=config)
        assert answer.usage.total_tokens == 2048
        assert answer.choices[0].finish_reason == "length"


def ask_until_the_end(served, words, told):
    with pytest.raises(openai.InternalServerError, match="the server is stopping") as error:
        served.ask(served.client(), words)
    told.append(error)


def test_a_client_that_leaves_while_its_prompt_is_read_is_noticed(tmp_path):
    """And so is a signal: no answer here is to be had within the time that the test waits."""
    served = Server(demo_target(tmp_path, context=40_000), "--num-assistant-tokens", "2")
    words, told = "x = 1\n" * 7_000, []
    try:
        for options in ({}, {"stream": True}, {"extra_body": {"generation_config": '{"num_beams": 2}'}}):
            before = served.counts()
            with pytest.raises((openai.APITimeoutError, httpx.TimeoutException)):
                list(served.ask(served.client(), words, timeout=0.5, **options))
            wait_until(lambda before=before: served.counts()["requests_stopped"] > before["requests_stopped"])
            assert served.ask(served.client(), max_tokens=2).usage.completion_tokens == 2
        reading = threading.Thread(target=ask_until_the_end, args=(served, words, told))
        reading.start()
        time.sleep(0.5)  # until the prompt is being read
    finally:
        status = served.end()
    assert status == -signal.SIGTERM
    reading.join()
    assert told


def test_random_requests(tmp_path):
    """A share of `python tests/fuzz_requests.py`."""
    problems, statuses = fuzz(60, 0, tmp_path)
    assert not problems, "\n".join(problems)
    assert min(statuses["200"], statuses["400"]) > 8
