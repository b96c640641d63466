"""What requests may hold, and what becomes of errors that no client can cause: the server's parts in this process."""

import asyncio
import json
from contextlib import contextmanager

import pytest
import torch
from serving.fixtures import folder
from serving.servers import WORDS

from eagle31_hf import demo

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
from eagle31_hf.serving.clients import Limits  # noqa: E402 -- behind the check that the extra is there
from eagle31_hf.serving.messages import check_messages  # noqa: E402
from eagle31_hf.serving.request_error import RequestError  # noqa: E402
from eagle31_hf.serving.server import DraftingServer, template_options  # noqa: E402

PICTURE = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/x.png", "/etc/passwd", "file:///etc/passwd", "data:text/html,x", 3, None]
)
def test_pictures_come_with_the_request(url):
    """An address would have the server fetch it."""
    for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "input_image", "image_url": url}):
        with pytest.raises(RequestError, match="expected data:image"):
            check_messages([{"role": "user", "content": [part]}], reads_images=True)
    for part in ({"type": "video_url", "video_url": {"url": PICTURE}}, {"type": "input_audio", "input_audio": PICTURE}):
        with pytest.raises(RequestError, match="expected an object of text or an image"):
            check_messages([{"role": "user", "content": [part]}], reads_images=True)
    fine = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}]
    assert check_messages(fine, reads_images=True) == fine


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

    def ask(self, path, body):
        async def asked():
            transport = httpx.ASGITransport(self.application)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.post(path, json=body, timeout=60)

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


@pytest.mark.parametrize("path", BODIES)
def test_what_fails_in_the_middle_is_told_as_json(kept, path):
    """The server's own fault, in a stream as its last event, whatever its words hold."""
    words = 'the device "x" is\nlost\\'
    whole = kept.ask(path, BODIES[path] | {"stream": False})
    for body in (BODIES[path] | {"stream": True}, BODIES[path] | {"stream": False}):
        with kept.failing(RuntimeError(words)):
            answer = kept.ask(path, body)
        text = [e.removeprefix("data: ") for e in answer.text.split("\n\n") if e][-1] if body["stream"] else answer.text
        assert answer.status_code == (200 if body["stream"] else 500)
        error = json.loads(text)["error"]
        assert (error["type"], error["message"]) == ("server_error", 'the answer failed: the device "x" is lost\\')
    with kept.failing(ValueError(words)):  # as generate() refuses arguments
        answer = kept.ask(path, BODIES[path] | {"stream": False})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    again = kept.ask(path, BODIES[path] | {"stream": False})
    assert usage_and_text(again.json()) == usage_and_text(whole.json())


def usage_and_text(answer):
    return [answer["usage"], answer.get("output", [{}])[0].get("content"), answer.get("choices")]
