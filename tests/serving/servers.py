"""`eagle31 serve` as a process of its own, and how it is asked."""

import http.client
import json
import os
import signal
import socket
import time
from contextlib import closing, suppress
from typing import NamedTuple

from programs import be, forkserver

from eagle31_hf import demo

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if thinking is defined %}{{ thinking }}{% endif %}"
    "{% if thinking == 'refuse' %}{{ raise_exception(messages[0]['content']) }}{% endif %}"
)
WORDS, COUNT = "class Parser(object):", 24
ENDLESS = {"max_tokens": 10**6, "extra_body": {"generation_config": '{"eos_token_id": -1}'}}
LONGEST = 120  # seconds that a start or an end may take on a machine that does much else


def free_port():
    with socket.socket() as tried:
        tried.bind(("localhost", 0))
        return tried.getsockname()[1]


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def wait_until(is_so):
    until = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def demo_target(folder, context=None):
    """Writes the demo's target with a chat template, and another length of what it reads. Returns its folder."""
    target, tokenizer = demo.load_target()
    tokenizer.chat_template = TEMPLATE
    target.config.max_position_embeddings = context or target.config.max_position_embeddings
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    return folder / "target"


class Answer(NamedTuple):
    """The answer to a request: its status, headers by names in lower case, and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class Server:
    """The command, and what it answers. `words`: further arguments; `ending`: seconds that answers have after a
    signal."""

    def __init__(self, folder, *words, ending=None, **env):
        self.port, self.target = free_port(), str(folder)
        self.log = folder.parent / f"{self.port}.log"
        command = ["serve", "--target", self.target, "--port", str(self.port)]
        command += ["--drafter", str(demo.FOLDER / "eagle31"), "--dtype", "float32", *words]
        self.process = forkserver().Process(target=serve, args=(command, str(self.log), ending, env), daemon=True)
        self.process.start()
        until = time.monotonic() + LONGEST
        while not self.is_up():
            assert self.process.is_alive(), self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.1)

    def is_up(self):
        try:
            return self.request("GET", "/health").status == 200
        except OSError:
            return False

    def request(self, method, path, body=None, headers=None):
        """Asks as any program may. `body`: bytes, or what is sent as JSON."""
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        usual = {"Content-Type": "application/json"} if body is not None else {}
        connection = http.client.HTTPConnection("localhost", self.port, timeout=LONGEST)
        with closing(connection):
            connection.request(method, path, sent, usual | (headers or {}))
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())

    def counts(self, **headers):
        text = self.request("GET", "/metrics", headers=headers).body.decode()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        pairs = (line.replace("_total", "").removeprefix("eagle31:").split(" ") for line in lines)
        return {name: float(value) for name, value in pairs}

    def client(self, key="none"):
        import openai

        http_client = openai.DefaultHttpxClient(verify=False)  # which reads no certificates: none is needed here
        options = {"api_key": key, "timeout": LONGEST, "max_retries": 0, "http_client": http_client}
        return openai.OpenAI(base_url=f"http://localhost:{self.port}/v1", **options)

    def ask(self, client, words=WORDS, **options):
        messages = [{"role": "user", "content": words}] if isinstance(words, str) else words
        options = {"max_tokens": COUNT, "temperature": 0} | options
        return client.chat.completions.create(model=self.target, messages=messages, **options)

    def end(self, number=signal.SIGTERM):
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        self.process.join(LONGEST)
        return self.process.exitcode


def serve(command, log, ending, env):
    """In the new process."""
    from eagle31_hf.serving import server

    os.setsid()
    os.environ.update(env)
    server.ENDING = ending or server.ENDING
    be(command, (log, log), "utf-8", ())
