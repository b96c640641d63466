"""What requests may hold, and what becomes of errors that no client can cause: the server's parts in this process."""

import asyncio
import base64
import io
import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from serving.fixtures import folder
from serving.servers import WORDS

from eagle31_hf import demo

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
from eagle31_hf.serving.app import _explained  # noqa: E402 -- behind the check that the extra is there
from eagle31_hf.serving.body import Served, checked  # noqa: E402
from eagle31_hf.serving.clients import Call, Limits  # noqa: E402
from eagle31_hf.serving.fields import RequestError  # noqa: E402
from eagle31_hf.serving.messages import check_image, checked_messages  # noqa: E402
from eagle31_hf.serving.server import DraftingServer, template_options  # noqa: E402

MOST = 16 * (10 + 4096)  # characters, for a context of 10 tokens
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}]
FLAT = {"type": "function", "name": "f"}
ADDRESSES = ["http://127.0.0.1/x.png", "/etc/passwd", "file:///etc/passwd", "data:text/html,x", 3, None]


def picture(form="PNG", kind="png", size=(4, 4)):
    """A data URL of an image."""
    pillow = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pillow.new("1" if form == "PNG" else "RGB", size).save(file, form)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("url", ADDRESSES)
def test_pictures_come_with_the_request(url):
    """An address would have the server fetch it."""
    for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "input_image", "image_url": url}):
        with pytest.raises(RequestError, match="expected data:image"):
            checked_messages([{"role": "user", "content": [part]}], reads_images=True)
        for beside in ({"tool_calls": CALLS}, {"tool_calls": []}, {"tool_call_id": "1"}):
            with pytest.raises(RequestError, match="expected data:image"):
                checked_messages([{"role": "assistant", "content": [part], **beside}], reads_images=True)
    video = {"type": "video_url", "video_url": {"url": picture()}}
    for part in (video, {"type": "input_audio", "input_audio": picture()}):
        with pytest.raises(RequestError, match="expected an object of text or an image"):
            checked_messages([{"role": "user", "content": [part]}], reads_images=True)
    fine = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture()}}], "more": url}]
    seen = [{"role": "user", "content": [{"type": "image_url", "image_url": picture()}]}]
    assert checked_messages(fine, reads_images=True) == seen


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats_that_browsers_show(form):
    check_image(picture(form, form.lower()), "here")
    check_image(picture(form, "svg+xml"), "here")  # it is what its bytes say


@pytest.mark.parametrize("kind", ["png", "eps", "tiff"])
def test_other_formats_are_not_opened(kind):
    """Pillow runs Ghostscript for EPS, whatever the image is said to be."""
    for form in ("EPS", "TIFF", "BMP", "PPM"):
        with pytest.raises(RequestError, match="is no image"):
            check_image(picture(form, kind), "here")
    cut = base64.b64decode(picture("JPEG", size=(512, 512)).partition(",")[2])[:-200]  # its upload broke off
    for data in (
        b"",
        cut,
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 50 50\n(x) print\n%%EOF\n",
        b"\x89PNG\r\n\x1a\n",
    ):
        with pytest.raises(RequestError, match=r"is no image|expected data:image"):
            check_image(f"data:image/{kind};base64,{base64.b64encode(data).decode()}", "here")


def test_an_image_whose_base64_broke_off():
    with pytest.raises(RequestError, match=r"here is no image .*expected one of PNG"):
        check_image("data:image/png;base64,AAAAA", "here")


def test_images_that_would_be_unpacked_to_gigabytes():
    small = picture(size=(13_000, 13_000))
    assert len(small) < 50_000
    with pytest.raises(RequestError, match="has 13000 x 13000 pixels"):
        check_image(small, "here")
    parts = [{"type": "image_url", "image_url": picture()}] * 17
    served = Served("m", 100, 10, frozenset(), frozenset(), True)
    with pytest.raises(RequestError, match="has 17 images"):
        checked("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}, served)


def test_text_is_counted_whatever_it_looks_like():
    served = Served("m", 100, 10, frozenset(), frozenset(), True)
    seen = [{"role": "user", "content": [{"type": "image_url", "image_url": picture() + "A" * MOST}]}]
    assert checked("/v1/chat/completions", {"messages": seen}, served)
    for route, body in (
        ("/v1/completions", {"prompt": picture() + "A" * MOST}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": picture() + "A" * MOST}]}),
        ("/v1/chat/completions", {"messages": seen, "tools": [tool({"image_url": picture() + "A" * MOST})]}),
        ("/v1/responses", {"input": "x", "tools": [tool({"A" * MOST: 1})]}),
    ):
        with pytest.raises(RequestError, match=f"expected at most {MOST}"):
            checked(route, body, served)


def test_messages_as_clients_send_them_back():
    """With all fields of an answer, most of them null."""
    answer = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "tool_calls": []}
    asked = [{"role": "developer", "content": "x"}, answer, {**answer, "tool_calls": CALLS}]
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "y"}]}
    assert checked_messages([*asked, result], reads_images=False) == [
        {"role": "developer", "content": "x"},
        {"role": "assistant", "content": ""},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALLS[0], "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "y"}], "tool_call_id": "1"},
    ]
    served = Served("m", 100, 10, frozenset(), frozenset(), False)
    output = {
        "type": "function_call_output",
        "call_id": "1",
        "output": [{"type": "input_text", "text": "y"}],
        "id": None,
    }
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "", "status": "completed"}
    read = checked("/v1/responses", {"input": [asked[0], call, output], "tools": [FLAT], "user": "me"}, served)
    assert read["input"][1:] == [
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "text", "text": "y"}]},
    ]
    assert read["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert set(read) == {"input", "tools", "stream"}
    assert read["stream"] is False


def test_what_fails_on_the_server_s_side_is_its_own():
    """Errors of a GPU are RuntimeErrors, wherever they come; a template may raise anything else."""
    queued = Call(is_queued=True)
    for error in (RuntimeError("CUDA error"), MemoryError(), OSError("disk")):
        for call in (Call(), queued):
            assert _explained(error, call).status_code == 500
    for error in (TypeError("x"), KeyError("x"), RecursionError(), ValueError("x")):
        assert _explained(error, Call()).status_code == 400
        assert _explained(error, queued).status_code == 500
    queued.error = ValueError("of generate()")
    assert _explained(queued.error, queued).status_code == 400


def test_variables_of_a_template_are_not_arguments_of_what_renders_it():
    tokenizer = demo.load_target()[1]
    tokenizer.chat_template = (
        "{{ bos_token }}{% set ns = namespace(a=1) %}{% for m in messages %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endfor %}{{ tools }}{{ documents }}{{ chat_template }}{{ tokenize }}"
        "{{ enable_thinking }}{{ raise_exception('x') }}{{ strftime_now('%Y') }}"
        "{{ add_generation_prompt }}{{ thinking_budget }}"
    )
    assert template_options(tokenizer) == {"enable_thinking", "thinking_budget"}
    tokenizer.chat_template = {"default": "{{ a }}", "tool_use": "{{ b }}"}
    assert template_options(tokenizer) == {"a", "b"}
    for template in (None, "{% if %}"):
        tokenizer.chat_template = template
        assert template_options(tokenizer) == frozenset()


def test_room_and_pieces():
    limits = Limits(context=100, answer=50, piece=16)
    config = demo.load_target()[0].generation_config

    def fitted(length, wanted, **more):
        config.max_new_tokens, config.prefill_chunk_size = wanted, None
        limits.fit({"input_ids": torch.ones(1, length), "attention_mask": torch.ones(1, length), **more}, config)
        return config.max_new_tokens, config.prefill_chunk_size

    assert fitted(10, 20) == (20, None)
    assert fitted(16, None) == (50, None)
    assert fitted(17, None) == (50, 16)
    assert fitted(99, 1000) == (1, 16)
    assert fitted(60, None, pixel_values=torch.ones(1)) == (40, None)
    for length, said in ((0, "makes no tokens"), (100, "has 100 tokens; expected fewer than 100")):
        with pytest.raises(RequestError, match=said):
            fitted(length, 1)


class Kept(DraftingServer):
    """A server that is asked in this process."""

    def serve(self, application):
        self.application = application

    def client(self):
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.application), base_url="http://localhost", timeout=60
        )

    def ask(self, path, body):
        async def asked():
            async with self.client() as client:
                return await client.post(path, json=body)

        return asyncio.run(asked())

    @contextmanager
    def failing(self, error, forwards=4):
        """A context in which a forward of the target fails."""
        left = [forwards]

        def fail(*_):
            left[0] -= 1
            if not left[0]:
                raise error

        [timed] = self._model_manager.loaded_models.values()
        handle = timed.model.register_forward_pre_hook(fail)
        yield
        handle.remove()


@pytest.fixture(scope="module")
def kept(folder):
    options = {"host": "localhost", "port": 1, "device": "cpu", "dtype": "float32"}
    knobs = {"num_assistant_tokens": 2}
    return Kept(str(folder), lambda target: demo.load_drafter("eagle31"), knobs, lambda words: None, **options)


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 12},
    "/v1/completions": {"prompt": WORDS, "max_tokens": 12},
    "/v1/responses": {"input": WORDS, "max_output_tokens": 12},
}


def last_event(answer):
    return json.loads([event for event in answer.text.split("\n\n") if event][-1].removeprefix("data: "))


@pytest.mark.parametrize("path", BODIES)
def test_what_fails_in_the_middle_is_told_as_json(kept, path):
    """The server's own fault, in a stream as its last event; its words are in the log alone."""
    words = 'the device "x" is\nlost\\'
    whole = kept.ask(path, BODIES[path] | {"stream": False})
    for stream in (False, True):
        with kept.failing(RuntimeError(words)):
            answer = kept.ask(path, BODIES[path] | {"stream": stream})
        assert answer.status_code == (200 if stream else 500)
        error = last_event(answer)["error"]
        said = "the answer failed (RuntimeError); the server's log says why."
        assert (error["type"], error["message"]) == ("server_error", said)
        with kept.failing(ValueError(words)):  # as what reads tool calls refuses one of the target's
            answer = kept.ask(path, BODIES[path] | {"stream": stream})
        assert answer.status_code == (200 if stream else 500)
        error = last_event(answer)["error"]
        said = 'the target\'s answer cannot be read (ValueError): the device "x" is lost\\'
        assert (error["type"], error["message"]) == ("server_error", said)
        with kept.failing(ValueError(words), forwards=1):  # as generate() refuses arguments
            answer = kept.ask(path, BODIES[path] | {"stream": stream})
        assert answer.status_code == (200 if stream else 400)
        error = last_event(answer)["error"]
        said = 'the request is refused: the device "x" is lost\\'
        assert (error["type"], error["message"]) == ("invalid_request_error", said)
    again = kept.ask(path, BODIES[path] | {"stream": False})
    assert usage_and_text(again.json()) == usage_and_text(whole.json())


def test_stop_strings_are_read_by_the_tokenizer_of_a_processor(kept):
    """Handlers hand generate() the processor of a target that reads images."""
    [timed] = kept._model_manager.loaded_models.values()
    tokenizer, ids = timed.processor, timed.processor(WORDS, return_tensors="pt")["input_ids"]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    options |= {"generation_config": timed.model.generation_config}
    found = timed.model.generate(input_ids=ids, **options)
    stop = tokenizer.decode(found[0, ids.shape[1] + 3])
    options |= {"stop_strings": [stop], "tokenizer": SimpleNamespace(tokenizer=tokenizer)}
    assert timed.model.generate(input_ids=ids, **options).shape[1] <= ids.shape[1] + 4


def usage_and_text(answer):
    return [answer["usage"], answer.get("output", [{}])[0].get("content"), answer.get("choices")]


def test_a_seed_is_of_its_own_answer(kept):
    """Requests that come while another is answered do not change what that samples."""
    body = {"prompt": WORDS, "generation_config": '{"do_sample": true, "max_new_tokens": 24}'}
    alone = {seed: kept.ask("/v1/completions", body | {"seed": seed}).json()["choices"] for seed in (1, 2)}
    assert alone[1] != alone[2]

    async def at_once():
        async with kept.client() as client:
            asked = [client.post("/v1/completions", json=body | {"seed": seed}) for seed in (1, 2, 1)]
            return [answer.json()["choices"] for answer in await asyncio.gather(*asked)]

    assert asyncio.run(at_once()) == [alone[1], alone[2], alone[1]]
