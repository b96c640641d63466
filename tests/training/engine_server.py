"""Servers on loopback that answer as vLLM and SGLang do, by a real target's generate(), and fail when told to."""

import fcntl
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from programs import heeded
from safetensors.torch import save_file

from eagle31_hf.targets.layers import capture_states
from eagle31_hf.training.engine_server import Request, Server
from eagle31_hf.training.servers import EngineOptions, Servers

INTERRUPTED = 3  # exit status of `ask_until_interrupted`
Trouble = Callable[[int], str | int | None]  # the number of a request for an answer -> what goes wrong with it


class EngineServer:
    """A server of `target` by the protocol of "vllm" or "sglang", or "plain": text without ids.

    `trouble` says what becomes of a request: None (it is answered), an HTTP status, "close" or "hang". `ends`: the ids
    at which the engine stops by itself. `omits_end`: answers come without the token that ended them. `facts` win over
    what it tells of the model. `states`: the layers whose states of every prompt it writes into `folder`, `late`
    seconds after it has answered, as vLLM's `ExampleHiddenStatesConnector` does.
    """

    def __init__(self, target, tokenizer, protocol="vllm", trouble: Trouble = lambda number: None, **facts):
        self.target, self.tokenizer, self.protocol, self.trouble = target, tokenizer, protocol, trouble
        self.ends, self.omits_end, self.most_new = facts.pop("ends", []), facts.pop("omits_end", False), None
        self.reports_stop = self.heeds_loops = True
        self.states, self.folder, self.late = facts.pop("states", None), facts.pop("folder", None), 0.0
        self.dtype = facts.pop("dtype", torch.float32)  # of states
        self.unfinished = set[int]()  # numbers of requests whose states are never written
        self.model = {"id": "the-target", "max_model_len": 128} | facts
        self.asked, self.headers = list[dict](), list[dict]()
        self.waits = 0.0
        self.longest_greedy = 0  # tokens of a greedy answer
        self.in_flight = self.most_in_flight = self.port = 0
        self.answered = Counter()
        self._lock, self._running = threading.Lock(), threading.Lock()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serves, after `stop` at the same address."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer._get(self)

            def do_POST(self):
                outer._post(self)

            def log_message(self, *args):
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, request, client_address):
                pass

        self._server = Quiet(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _get(self, handler) -> None:
        self.headers.append(dict(handler.headers))
        if handler.path == "/v1/models":
            send(handler, 200, {"object": "list", "data": [self.model]})
        else:
            send(handler, 404, {"error": "there is no such path"})

    def _post(self, handler) -> None:
        self.headers.append(dict(handler.headers))
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.asked.append(body)
            number = len(self.asked)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            time.sleep(self.waits)
            wrong = self.trouble(number)
            if wrong == "hang":
                handler.connection.recv(1)  # until the client has gone
            if wrong in ("close", "hang"):
                handler.close_connection = True
                return
            refusal = {"error": f"no, {handler.headers.get('Authorization')}"}
            status, response = (wrong, refusal) if wrong else self._response(handler.path, body)
            if status == 200 and self.states:
                response["kv_transfer_params"] = {"hidden_states_path": str(self._write_states(body["prompt"], number))}
        finally:
            with self._lock:
                self.in_flight -= 1
        send(handler, status, response)

    def _response(self, path: str, body: dict) -> tuple[int, dict]:
        if path == "/v1/completions":
            has_ids = self.protocol == "vllm" and body.get("return_token_ids")
            settings = body | {"max_new_tokens": body["max_tokens"]}
            ids, ended, text = self._generate(body["prompt"], settings, body.get("seed"))
            finish = "length" if ended is None else "stop"
            loop = self.heeds_loops and loop_end(ids, body.get("repetition_detection"))
            if loop:
                ids, ended, finish, text = ids[:loop], None, "repetition", self.tokenizer.decode(ids[:loop])
            self._measure(ids, settings)
            choice = {"index": 0, "text": text, "finish_reason": finish}
            choice |= {"stop_reason": ended if ended in body["stop_token_ids"] and self.reports_stop else None}
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]} if has_ids else {}
            return 200, {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}
        if path == "/generate" and self.protocol == "sglang":
            settings = body["sampling_params"]
            ids, ended, text = self._generate(body["input_ids"], settings, settings.get("sampling_seed"))
            self._measure(ids, settings)
            finish = {"type": "length", "length": len(ids)} if ended is None else {"type": "stop", "matched": ended}
            facts = {"finish_reason": finish, "prompt_tokens": len(body["input_ids"])}
            return 200, {"text": text, "output_ids": ids, "meta_info": facts}
        return 404, {"error": "there is no such path"}

    def _write_states(self, prompt: list[int], number: int) -> Path:
        """Begins to write the states of a prompt, and returns where."""
        path = Path(self.folder, f"cmpl-{self.port}-{number}.safetensors")
        lock = open(f"{path}.lock", "wb")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write():
            time.sleep(self.late)
            with lock:
                if number not in self.unfinished:
                    save_file({"hidden_states": self._states(prompt), "token_ids": torch.tensor(prompt)}, path)

        threading.Thread(target=write, daemon=True).start()
        return path

    @torch.no_grad()
    def _states(self, prompt: list[int]) -> torch.Tensor:
        """Returns the states (T, m, ht) of a prompt."""
        with self._running, capture_states(self.target, self.states) as captured:
            self.target(torch.tensor([prompt]), use_cache=False)
        return captured.take()[0].unflatten(-1, (len(self.states), -1)).to(self.dtype).contiguous()

    def _measure(self, ids: list[int], settings: dict[str, Any]) -> None:
        if not settings["temperature"]:
            self.longest_greedy = max(self.longest_greedy, len(ids))

    def _generate(self, prompt: list[int], settings: dict[str, Any], seed: int | None) -> tuple[list, int | None, str]:
        """Returns the ids of an answer, the id that ended it (None: the limit), and its text."""
        ids, ends = torch.tensor([prompt]), {*settings["stop_token_ids"], *self.ends}
        most = min(settings["max_new_tokens"], self.most_new or settings["max_new_tokens"])
        sampled = {"do_sample": False}
        if settings["temperature"]:
            top_k = max(0, settings["top_k"])
            sampled = {"do_sample": True, "top_k": top_k} | {name: settings[name] for name in ("temperature", "top_p")}
        # drawn numbers are this process's: a greedy answer leaves them alone
        with self._running, torch.random.fork_rng(enabled=sampled["do_sample"]), torch.no_grad():
            if sampled["do_sample"]:
                torch.manual_seed(seed or 0)
            answer = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=most,
                eos_token_id=sorted(ends) or None,
                pad_token_id=0,
                **sampled,
            )[0, len(prompt) :].tolist()
        ended = answer[-1] if answer[-1] in ends else None
        words = answer if ended is None else answer[:-1]
        text = self.tokenizer.decode(words, skip_special_tokens=True)
        self.answered[str(prompt)] += 1
        return words if self.omits_end else answer, ended, text


def ask_until_interrupted(port: int) -> None:
    """In a process of its own: asks a server, patiently, until there is a Ctrl-C."""
    heeded()
    servers = Servers(EngineOptions((f"http://127.0.0.1:{port}",), requests=2, timeout=3600.0), "target")
    try:
        servers.each(Server.complete, [Request([1], 1, 0, {"temperature": 0.0}, [])] * 3)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def loop_end(ids: list[int], asked: dict | None) -> int | None:
    """Returns where vLLM would end an answer that repeats itself; None where it does not, or nobody asked."""
    for end in range(1, len(ids) + 1) if asked else ():
        for period in range(asked["min_pattern_size"], asked["max_pattern_size"] + 1):
            tail = ids[max(0, end - period * asked["min_count"]) : end]
            if len(tail) == period * asked["min_count"] and tail[period:] == tail[:-period]:
                return end
    return None


def send(handler, status: int, body: dict) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
