"""Servers of an inference engine (vLLM, SGLang, or another with their protocol) that answer prompts, token ids both
ways.

Several servers share the requests. One that fails is left out for a while, longer each time, and tried again.
"""

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

KEY = "OPENAI_API_KEY"  # the environment variable
TRY_AGAIN = (408, 429)  # HTTP statuses besides 5xx
LOOPBACK = ("localhost", "127.0.0.1", "::1")
AT_START = 4  # tries to reach a server before anything is written
NO_BASES = ("/completions", "/models", "/generate")  # ends of paths below a server's address
LONGEST_QUOTE = 200  # characters of what a server says
READ_OF_ERROR = 10_000  # bytes
Tell = Callable[[str], None]  # is told one line at a time
Result = TypeVar("Result")


class Ask(NamedTuple):
    """A prompt for an engine: its ids, the most tokens of the answer, the seed of a sampled one, what vLLM and SGLang
    sample by (a temperature and more), and the ids that end the answer."""

    prompt: list[int]
    max_tokens: int
    seed: int
    sampling: dict[str, Any]
    stops: list[int]


class Told(NamedTuple):
    """An engine's answer: its ids, why it ended ("stop" or "length"), the id the engine says it stopped at, its text
    (None: the engine gives none), and how many tokens the engine read (None: it does not say)."""

    ids: list[int]
    finish: str
    ended_by: Any = None
    text: str | None = None
    num_prompt_tokens: int | None = None


@dataclass(frozen=True)
class Patience:
    """How long to wait for servers: seconds that one may be silent (`timeout`); tries of a request and of servers that
    all fail, with pauses between them that double from `pause` to `longest_pause` seconds."""

    timeout: float = 600.0
    tries: int = 10
    pause: float = 1.0
    longest_pause: float = 60.0

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.tries < 1:
            raise ValueError(
                f"servers are given {self.timeout:g} seconds and {self.tries} tries; expected more than 0, and at least"
                " 1."
            )

    def pause_after(self, failures: int) -> float:
        """Returns the pause in seconds after so many failures in a row."""
        return min(self.longest_pause, self.pause * 2.0 ** (failures - 1))


class UnavailableError(RuntimeError):
    """Raised where a server did not answer and may do so later. It says how the server failed."""


class OddAnswerError(UnavailableError):
    """Raised where a server's answer is not of the endpoint's form: it knows another, or something stands between."""


@dataclass(frozen=True)
class Endpoint:
    """A way to ask a server: its path, the body of a request, and the reader of its response, which raises KeyError,
    TypeError, IndexError, ValueError or AttributeError for one of another form.

    `spare`: how many tokens less than its length a server takes. `penalises_prompts`: a repetition penalty counts the
    prompt's tokens, as in generate().
    """

    path: str
    body: Callable[[str, Ask], dict[str, Any]]
    reading: Callable[[Any], Told]
    spare: int = 0
    penalises_prompts: bool = True


def _completions_body(model: str, ask: Ask) -> dict[str, Any]:
    seed = {"seed": ask.seed} if ask.sampling["temperature"] else {}
    return {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "stop_token_ids": ask.stops,
        "return_token_ids": True,
        **seed,
        **ask.sampling,
    }


def _read_completions(response: Any) -> Told:
    (choice,) = response["choices"]
    return Told(
        choice["token_ids"],
        choice["finish_reason"],
        choice.get("stop_reason"),
        choice.get("text"),
        (response.get("usage") or {}).get("prompt_tokens"),
    )


def _generate_body(model: str, ask: Ask) -> dict[str, Any]:
    seed = {"sampling_seed": ask.seed} if ask.sampling["temperature"] else {}
    params = {"max_new_tokens": ask.max_tokens, "stop_token_ids": ask.stops, **seed, **ask.sampling}
    return {"input_ids": ask.prompt, "sampling_params": params}


def _read_generate(response: Any) -> Told:
    facts = response["meta_info"]
    finish = facts["finish_reason"]
    return Told(
        response["output_ids"], finish["type"], finish.get("matched"), response.get("text"), facts.get("prompt_tokens")
    )


# SGLang keeps a few positions of its length for itself.
ENDPOINTS = {
    "/v1/completions": Endpoint("/v1/completions", _completions_body, _read_completions),
    "/generate": Endpoint("/generate", _generate_body, _read_generate, spare=8, penalises_prompts=False),
}


def base_of(url: str) -> str:
    """Returns the address of a server without /v1. Raises ValueError for what is no http address of a server."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port, or of an IPv6 address
        is_address = False
    is_endpoint = is_address and parts.path.rstrip("/").endswith(NO_BASES)
    if not is_address or is_endpoint or parts.query or parts.fragment or len(url.split()) != 1:
        raise ValueError(f"got {url[:80]!r}, expected a server's address without a path, as http://localhost:8000")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"got an address of {parts.hostname} with a user name in it; expected the key in {KEY}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key would go wherever it leads."""

    def redirect_request(self, *args, **options):
        return None


class Server:
    """One server, at an address as `base_of` gives it: what it serves (`model`), how it is asked (`endpoint`), and how
    it has done lately."""

    def __init__(self, url: str, timeout: float):
        self.url, self.timeout = url, timeout
        self.model = ""
        self.max_length: int | None = None
        self.endpoint = ENDPOINTS["/v1/completions"]
        self.failures = self.in_flight = 0
        self.is_tried = False  # by a request that finds out whether it is back
        self.not_before = 0.0
        # a proxy is for what is elsewhere
        proxies = [urllib.request.ProxyHandler({})] if urlsplit(url).hostname in LOOPBACK else []
        self._opener = urllib.request.build_opener(_NoRedirects, *proxies)

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Sends a request, a POST where it has a body; returns the response's JSON.

        Raises UnavailableError where the server may do better later, ValueError where it refuses the request.
        """
        key = _key()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                said = response.read()
        except urllib.error.HTTPError as error:
            said = f"{self.url}{path} answers {error.code} {_cut(str(error.reason))}{_quoted(error)}"
            if error.code >= 500 or error.code in TRY_AGAIN:
                raise UnavailableError(said) from None
            remedy = f" The key is read from {KEY}." if error.code in (401, 403) else ""
            raise ValueError(f"{said}; expected an answer, as vLLM and SGLang give.{remedy}") from None
        except TimeoutError:
            raise UnavailableError(f"{self.url}{path} gave no answer in {self.timeout:g} seconds") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                reason = f"no answer in {self.timeout:g} seconds"
            raise UnavailableError(f"{self.url}{path}: {reason or type(error).__name__}") from None
        try:
            return json.loads(said)
        except (ValueError, RecursionError):
            raise OddAnswerError(
                f"{self.url}{path} answers what is no JSON ({_cut(said.decode(errors='replace'))})"
            ) from None

    def meet(self, target: str) -> None:
        """Looks up what is served. Raises ValueError where that is several models, none of them named as the target."""
        listed = self.call("/v1/models")
        try:
            models = [model for model in listed["data"] if not model.get("parent")]  # the others are adapters
            chosen = [model for model in models if target in (model["id"], model.get("root"))] or models
            names = _cut(", ".join(str(model["id"]) for model in models))
            if len({model["id"] for model in chosen}) == 1:
                length = chosen[0].get("max_model_len")
                self.model, self.max_length = str(chosen[0]["id"]), length if type(length) is int else None
                return
        except (KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{self.url}/v1/models answers {_short(listed)}; expected a list of models, as vLLM and SGLang give."
            ) from None
        raise ValueError(f"{self.url} serves {names or 'no model'}; expected one model, or one named {target}.")

    def ask(self, ask: Ask) -> Told:
        """Asks for an answer. Raises UnavailableError and ValueError as `call` does."""
        response = self.call(self.endpoint.path, self.endpoint.body(self.model, ask))
        try:
            told = self.endpoint.reading(response)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError):
            raise OddAnswerError(f"{self.url} answers {_short(response)}; expected ids") from None
        ids = told.ids
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise OddAnswerError(f"{self.url} answers with ids {_short(ids)}; expected a list of integers")
        if told.text is not None and not isinstance(told.text, str):
            raise OddAnswerError(f"{self.url} answers with the text {_short(told.text)}; expected words")
        if told.finish not in ("stop", "length"):  # an engine that shuts down aborts what it works on
            raise UnavailableError(f"{self.url} ended an answer for the reason {told.finish!r}")
        if told.num_prompt_tokens not in (None, len(ask.prompt)):
            raise ValueError(
                f"{self.url} read {told.num_prompt_tokens} tokens of a prompt of {len(ask.prompt)}; expected the ids as"
                " they are."
            )
        return told

    def choose_endpoint(self, ask: Ask) -> None:
        """Finds the way to ask that gives ids. Raises ValueError where there is none, UnavailableError as `call`
        does."""
        failures: list[Exception] = []
        for endpoint in ENDPOINTS.values():
            self.endpoint = endpoint
            try:
                self.ask(ask)
                return
            except (UnavailableError, ValueError) as error:
                failures.append(error)
        for error in failures:
            if isinstance(error, UnavailableError) and not isinstance(error, OddAnswerError):
                raise error
        said = "; ".join(str(error).rstrip(".") for error in failures)
        raise ValueError(
            f"{self.url} cannot be asked by ids: {said}. Expected a server of vLLM (0.10.2 or"
            " later) or SGLang: words read again as tokens are not always the tokens that were said."
        )


def _key() -> str:
    """Returns the key for servers, or an empty text. Raises ValueError for one that no request can carry."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{KEY} holds line breaks or other characters that no key has; set it again, or unset it.")
    return key


def _short(value: Any) -> str:
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    """Returns what a server said as it is told: without the key, and not at length."""
    text = text.replace(_key() or "\0", "...")
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."


def _quoted(error: urllib.error.HTTPError) -> str:
    try:
        said = error.read(READ_OF_ERROR).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        said = ""
    said = _cut(" ".join(said.split()))
    return f" ({said})" if said else ""


@dataclass
class Servers:
    """Servers that share requests, at most `most` at once over all of them. `tell` is told when one fails and when it
    is back. The servers of `urls` are met by `meet`."""

    urls: tuple[str, ...]
    target: str
    most: int
    patience: Patience = field(default_factory=Patience)
    tell: Tell = lambda line: None

    def __post_init__(self):
        self.all = [Server(url, self.patience.timeout) for url in self.urls]
        self._changed, self._telling = threading.Condition(), threading.Lock()

    @property
    def name(self) -> str:
        """The model and the servers, for the user."""
        return f"{self.all[0].model} on {', '.join(server.url for server in self.all)}"

    @property
    def identity(self) -> dict[str, Any]:
        """What answers follow from besides the target's files: the model's name on the servers."""
        return {"served": self.all[0].model}

    def meet(self, ask: Ask, max_length: int) -> None:
        """Finds out what each server serves and how it is asked.

        Raises RuntimeError for one that cannot be reached, ValueError for one that gives no ids, is shorter than
        `max_length` tokens, or serves under another name than the first.
        """
        for server in self.all:
            self._patiently(lambda server=server: server.meet(self.target))
            self._patiently(lambda server=server: server.choose_endpoint(ask))
            if ask.sampling["repetition_penalty"] != 1 and not server.endpoint.penalises_prompts:
                raise ValueError(
                    f"{server.url}: SGLang leaves the prompt out of a repetition_penalty, which is"
                    f" {ask.sampling['repetition_penalty']}; expected 1, or a server of vLLM."
                )
            needed = max_length + server.endpoint.spare
            if server.max_length is not None and server.max_length < needed:
                raise ValueError(
                    f"{server.url} takes {server.max_length} tokens with their answer, and max_length is {max_length};"
                    f" expected at least {needed} there (vLLM: --max-model-len, SGLang: --context-length), or a"
                    f" max_length of {server.max_length - server.endpoint.spare}."
                )
            if server.model != self.all[0].model:
                raise ValueError(
                    f"{server.url} serves {server.model}, {self.all[0].url} {self.all[0].model}; expected the same"
                    " target everywhere, under one name (--served-model-name)."
                )

    def answers_by_server(self, asks: list[Ask]) -> Iterator[tuple[str, list[Told]]]:
        """Yields the address of each server and its own answers to prompts. Raises RuntimeError for one that fails."""
        for server in self.all:
            yield server.url, [self._patiently(lambda server=server, ask=ask: server.ask(ask)) for ask in asks]

    def _patiently(self, call: Callable[[], Result]) -> Result:
        """Returns what a call of a server returns, tried a few times. Raises RuntimeError when it was in vain."""
        for tried in range(1, AT_START):
            try:
                return call()
            except UnavailableError:
                time.sleep(self.patience.pause_after(tried))
        try:
            return call()
        except UnavailableError as error:
            raise RuntimeError(f"{error}; expected a server that is ready. Start it first, or leave it out.") from None

    def answers(self, asks: list[Ask]) -> list[Told]:
        """Returns the answers to prompts, in their order.

        Raises RuntimeError naming the last failure where a request was tried too often, ValueError where a server
        refuses one.
        """
        waiting, done = SimpleQueue[int](), SimpleQueue[tuple[int, Told | Exception]]()
        stop = threading.Event()
        for index in range(len(asks)):
            waiting.put(index)

        def work() -> None:
            while not stop.is_set() and not waiting.empty():
                try:
                    index = waiting.get(block=False)
                except Empty:  # another thread took the last one
                    return
                try:
                    done.put((index, self._answer(asks[index], stop)))
                except Exception as error:
                    done.put((index, error))

        # Threads that wait for a server must not keep the program from ending.
        for _ in range(min(self.most, len(asks))):
            threading.Thread(target=work, daemon=True).start()
        told = dict[int, Told]()
        try:
            while len(told) < len(asks):
                index, outcome = done.get()
                if isinstance(outcome, Exception):
                    raise outcome
                told[index] = outcome
        finally:
            stop.set()
            with self._changed:
                self._changed.notify_all()
        return [told[index] for index in range(len(asks))]

    def _answer(self, ask: Ask, stop: threading.Event) -> Told:
        for tried in range(1, self.patience.tries + 1):
            with self._chosen(stop) as server:
                known = server.failures
                try:
                    if known:
                        self._meet_again(server)
                    told = server.ask(ask)
                except UnavailableError as error:
                    self._failed(server, known, error)
                    if tried == self.patience.tries or self._are_lost():
                        raise RuntimeError(
                            f"{error}, after {max(tried, server.failures)} tries; shards that are complete are kept."
                            " Start the server again, and the same command goes on."
                        ) from None
                else:
                    self._succeeded(server)
                    return told
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def _chosen(self, stop: threading.Event) -> Iterator[Server]:
        """A context with a server that is free of failures, or, of those that failed, whose pause is over and that no
        other request tries."""
        with self._changed:
            while True:
                if stop.is_set():
                    raise RuntimeError("the other requests have ended")
                now = time.monotonic()
                ready = [s for s in self.all if not s.failures or (s.not_before <= now and not s.is_tried)]
                if ready:
                    break
                times = [s.not_before - now for s in self.all if not s.is_tried]
                self._changed.wait(max(0.01, min(times, default=1.0)))
            server = min(ready, key=lambda s: (s.in_flight, s.failures))
            server.in_flight += 1
            tries = server.failures > 0
            server.is_tried = server.is_tried or tries
        try:
            yield server
        finally:
            with self._changed:
                server.in_flight -= 1
                server.is_tried = server.is_tried and not tries
                self._changed.notify_all()

    def _meet_again(self, server: Server) -> None:
        """Looks whether a server that failed serves what it served. Raises ValueError where it serves something else,
        UnavailableError where it is not ready yet."""
        before = server.model, server.max_length
        try:
            server.meet(self.target)
        except ValueError as error:  # while it loads a server may know no path, and no model
            raise UnavailableError(str(error)) from None
        now = server.model, server.max_length
        if now != before:
            server.model, server.max_length = before  # what the next request compares with
            raise ValueError(
                f"{server.url} serves {now[0]}, {now[1]} tokens long, now; expected {before[0]},"
                f" {before[1]} tokens long, as before it failed."
            )

    def _failed(self, server: Server, known: int, error: UnavailableError) -> None:
        """Notes a failure, once for requests that fail together: `known` is what one knew when it began."""
        with self._changed:
            if server.failures != known:
                return
            server.failures += 1
            pause = self.patience.pause_after(server.failures)
            server.not_before = time.monotonic() + pause
        self._say(f"{error}; it is left out for {pause:g} seconds")

    def _succeeded(self, server: Server) -> None:
        with self._changed:
            was_out, server.failures = server.failures > 0, 0
            self._changed.notify_all()
        if was_out:
            self._say(f"{server.url} answers again")

    def _say(self, line: str) -> None:
        with self._telling:  # requests fail in threads of their own
            self.tell(line)

    def _are_lost(self) -> bool:
        with self._changed:
            return all(server.failures >= self.patience.tries for server in self.all)
