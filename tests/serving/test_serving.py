"""`eagle31 serve` as a process of its own, asked by OpenAI's client: the target's own answers, also while others go
away, and counts of what was drafted for them."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from contextlib import closing, suppress

import httpx
import pytest
from serving.fixtures import expected, folder, server
from serving.servers import COUNT, ENDLESS, LONGEST, WORDS, Server, demo_target, free_port, text_of, wait_until

from eagle31_hf import demo
from eagle31_hf.cli import main
from eagle31_hf.web.address import bound, check_address, url_of

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


def test_the_target_is_listed_and_answers_as_it_would_alone(server, expected):
    client = server.client()
    assert [model.id for model in client.models.list()] == [server.target]
    before = server.counts()
    answer = server.ask(client)
    assert answer.choices[0].message.content == expected(WORDS)
    assert answer.usage.completion_tokens == COUNT
    added = {name: count - before.get(name, 0) for name, count in server.counts().items()}
    assert (added["requests"], added["requests_stopped"], added["generation_tokens"]) == (1, 0, COUNT)
    assert 0 < added["spec_decode_num_accepted_tokens"] <= added["spec_decode_num_draft_tokens"]
    assert 1 + added["spec_decode_num_accepted_tokens"] + added["spec_decode_num_drafts"] == COUNT
    assert text_of(server.ask(client, stream=True)) == expected(WORDS)
    # a stream ends before it is counted, and the next test counts, too
    wait_until(lambda: server.counts()["requests"] == before.get("requests", 0) + 2)


def test_a_conversation_reads_what_is_new(server):
    """The target reads its own answers once, and a prompt's beginning that it has read not at all."""
    client = server.client()
    messages = [{"role": "user", "content": f"{WORDS} # a conversation"}]
    num_read = 0  # of the prompt before
    for turn in range(3):
        before = server.counts()
        answer = server.ask(client, messages)
        added = {name: server.counts()[name] - before[name] for name in ("prefix_cache_queries", "prefix_cache_hits")}
        assert added["prefix_cache_queries"] == answer.usage.prompt_tokens
        if turn:
            assert num_read - 1 <= added["prefix_cache_hits"] < answer.usage.prompt_tokens
        num_read = answer.usage.prompt_tokens
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
        messages += [{"role": "user", "content": f"and {turn}?"}]


def test_streams_from_many_threads_part_of_which_go_away(server, expected):
    """8 streams from 4 threads; every other client goes away in the middle of its answer."""
    questions = [f"{WORDS}\n    number_{i} = {i}" for i in range(4)]
    wanted = [expected(words) for words in questions]
    left, lock, wrong, gone = list(range(8)), threading.Lock(), [], []
    before = server.counts()

    def ask_on():
        client = server.client()
        while True:
            with lock:
                if not left:
                    return
                number = left.pop()
            stream, text = server.ask(client, questions[number // 2], stream=True), ""
            for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if number % 2 and text:
                    stream.close()
                    gone.append(number)
                    break
            is_right = wanted[number // 2].startswith(text) if number % 2 else text == wanted[number // 2]
            if not is_right:
                wrong.append((number, text))

    threads = [threading.Thread(target=ask_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(gone) == 4
    assert server.ask(server.client()).choices[0].message.content == expected(WORDS)
    after = server.counts()
    answered, stopped = (after[name] - before[name] for name in ("requests", "requests_stopped"))
    assert answered + stopped == 9
    assert answered >= 5  # a client that goes away at the end of an answer stops nothing


def test_an_answer_as_a_whole_ends_as_its_client_goes_away(server, expected):
    """One that is being generated, and one that waits behind it."""
    before = server.counts()
    errors = []

    def leave(seconds):
        with pytest.raises(openai.APITimeoutError) as error:
            server.ask(server.client(), **ENDLESS, timeout=seconds)
        errors.append(error)

    threads = [threading.Thread(target=leave, args=(seconds,)) for seconds in (1.0, 0.5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert server.ask(server.client()).choices[0].message.content == expected(WORDS)
    added = {name: count - before.get(name, 0) for name, count in server.counts().items()}
    assert (added["requests"], added["requests_stopped"]) == (1, 2)


def test_what_cannot_be_drafted_is_answered_by_the_target_alone(server, expected):
    before = server.counts()
    beams = '{"num_beams": 3, "max_new_tokens": 8}'
    answer = server.ask(server.client(), max_tokens=8, extra_body={"generation_config": beams})
    assert answer.choices[0].message.content == expected(WORDS, 8, num_beams=3)
    added = {name: count - before[name] for name, count in server.counts().items()}
    assert added["requests_not_drafted"] == added["requests"] == 1
    assert added["spec_decode_num_drafts"] == added["prefix_cache_queries"] == 0
    assert added["generation_tokens"] == added["generation_seconds"] == 0


def test_a_value_that_is_refused_is_told_and_the_connection_serves_on(server, expected):
    client = server.client()
    several = {"extra_body": {"generation_config": '{"num_return_sequences": 2}'}}
    for options, said in (({"max_tokens": 0}, "max_tokens is 0"), (several, "num_return_sequences")):
        with pytest.raises(openai.BadRequestError, match=said):
            server.ask(client, **options)
        assert server.ask(client).choices[0].message.content == expected(WORDS)


def test_it_drafts_as_it_is_told_and_a_signal_ends_it_once_its_only_client_has_gone(folder, expected):
    served = Server(folder, "--num-assistant-tokens", "2")
    try:
        assert text_of(served.ask(served.client(), stream=True)) == expected(WORDS)
        wait_until(lambda: served.counts()["requests"])  # a stream's end is sent before it is counted
        counts = served.counts()
        assert 'spec_decode_num_accepted_tokens_per_pos{position="1"}' in counts
        assert 'spec_decode_num_accepted_tokens_per_pos{position="2"}' not in counts
        with pytest.raises(openai.APITimeoutError):
            served.ask(served.client(), **ENDLESS, timeout=0.5)
    finally:
        status = served.end(signal.SIGINT)
    assert status == -signal.SIGINT
    assert "Traceback" not in served.log.read_text()


def test_a_signal_ends_a_stream_that_runs(tmp_path):
    """And those who wait behind it are told at once."""
    served, heard = Server(demo_target(tmp_path, context=40_000), ending=8), threading.Event()

    def listen():
        with suppress(openai.APIError, httpx.HTTPError):  # the stream breaks off
            for chunk in served.ask(served.client(), stream=True, **ENDLESS):
                if chunk.choices and chunk.choices[0].delta.content:
                    heard.set()

    listening = threading.Thread(target=listen)
    listening.start()
    assert heard.wait(120)
    body = json.dumps({"prompt": WORDS, "max_tokens": 2}).encode()
    with closing(http.client.HTTPConnection("localhost", served.port, timeout=LONGEST)) as waiting:
        waiting.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        time.sleep(1)  # until it is read
        os.kill(served.process.pid, signal.SIGTERM)
        answer = waiting.getresponse()
        assert (answer.status, "the server is stopping" in answer.read().decode()) == (503, True)
        assert listening.is_alive()
    assert served.end() == -signal.SIGTERM
    listening.join()


def test_an_address_that_is_taken_is_refused_before_the_target_is_read(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        pair = ["--target", str(folder), "--drafter", str(demo.FOLDER / "eagle31")]
        assert main(["serve", *pair, "--host", "127.0.0.1", "--port", port]) == 2
        assert main(["serve", *pair, "--host", "no.such.host.invalid"]) == 2
    told = capsys.readouterr().err
    assert f"--host 127.0.0.1 --port {port}: nothing can be served there" in told
    assert "--host no.such.host.invalid" in told
    assert "loading" not in told


def test_all_addresses_of_a_name_are_tried(monkeypatch):
    """As of localhost, which stands for 127.0.0.1 and ::1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        places = [("127.0.0.1", 0), ("192.0.2.1", port)]  # free; of another machine
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        check_address("a name", port)
        [made] = bound("a name", port)  # asyncio itself refuses a name with an address that is not this machine's
        made.close()
        found.append((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)))
        with pytest.raises(ValueError, match="nothing can be served there"):
            check_address("a name", port)
        found[:] = found[1:2]
        with pytest.raises(ValueError, match="nothing can be served there"):
            check_address("a name", port)
    assert url_of("::1", 8000) == "http://[::1]:8000"


def test_a_drafter_of_another_target_is_refused_before_a_request(folder, tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    demo.load_target()[1].save_pretrained(tmp_path / "other")
    words = ["--target", str(tmp_path / "other"), "--drafter", str(demo.FOLDER / "eagle31"), "--port", str(free_port())]
    assert main(["serve", *words]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "serving" not in told
