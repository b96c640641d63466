"""Options of an engine, and servers of one that share requests. A server that fails is left out for a while, longer
each time, and tried again."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

from .engine_server import Request, Server, UnavailableError, base_of

AT_START = 4  # tries to reach a server before anything is written
LOOK = 0.02  # seconds between looks at whether a server is free
Tell = Callable[[str], None]  # is told one line at a time
Result = TypeVar("Result")


@dataclass(frozen=True)
class EngineOptions:
    """The servers that answer instead of generate().

    `urls`: their addresses. `requests`: how many prompts they are asked at once, all together. `states_folder`: where
    this machine has the folder that servers write hidden states into, None: under the name that they have. `timeout`:
    seconds that a server may be silent. `tries` of a request, and of servers that all fail, with pauses between them
    that double from `pause` to `longest_pause` seconds. Raises ValueError for what is no address, and without time or
    tries.
    """

    urls: tuple[str, ...]
    requests: int = 64
    states_folder: str | None = None
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
        if not self.urls or self.requests < 1:
            raise ValueError(f"the engine is {self.urls}, requests {self.requests}; expected at least one of each.")
        for url in self.urls:
            base_of(url)

    def pause_after(self, failures: int) -> float:
        """Returns the pause in seconds after so many failures in a row."""
        return min(self.longest_pause, self.pause * 2.0 ** (failures - 1))


@dataclass
class Servers:
    """The servers that the options name, of the target of this name. They share requests, and are met by `meet`. `tell`
    is told when one fails and when it is back."""

    options: EngineOptions
    target: str
    tell: Tell = lambda line: None

    def __post_init__(self):
        urls = dict.fromkeys(map(base_of, self.options.urls))
        self.all = [Server(url, self.options.timeout, self.options.states_folder) for url in urls]
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The model and the servers, for the user."""
        return f"{self.all[0].model} on {', '.join(server.url for server in self.all)}"

    @property
    def identity(self) -> dict[str, Any]:
        """The source of the answers besides the target's files: the model's name on the servers."""
        return {"served": self.all[0].model}

    def meet(self, request: Request, max_length: int, after: int = 0) -> None:
        """Finds out what each server serves and how it is asked.

        Raises RuntimeError for one that cannot be reached, ValueError for one that gives no ids, is shorter than
        `max_length` tokens and `after` more, or serves under another name than the first.
        """
        for server in self.all:
            self.patiently(server.meet, self.target)
            self.patiently(server.choose_endpoint, request)
            if request.sampling["repetition_penalty"] != 1 and not server.endpoint.penalises_prompts:
                raise ValueError(
                    f"{server.url}: SGLang leaves the prompt out of a repetition_penalty, which is"
                    f" {request.sampling['repetition_penalty']}; expected 1, or a server of vLLM."
                )
            spare = server.endpoint.spare + after
            needed = max_length + spare
            if server.max_length is not None and server.max_length < needed:
                raise ValueError(
                    f"{server.url} takes {server.max_length} tokens with their answer, and max_length is {max_length};"
                    f" expected at least {needed} there (vLLM: --max-model-len, SGLang: --context-length), or a"
                    f" max_length of {server.max_length - spare}."
                )
            if server.model != self.all[0].model:
                raise ValueError(
                    f"{server.url} serves {server.model}, {self.all[0].url} {self.all[0].model}; expected the same"
                    " target everywhere, under one name (--served-model-name)."
                )

    def patiently(self, call: Callable[..., Result], *given: Any) -> Result:
        """Returns what a call of one server returns, tried a few times. Raises RuntimeError when it was in vain."""
        tried = 0
        while True:
            try:
                return call(*given)
            except UnavailableError as error:
                tried += 1
                if tried == AT_START:
                    raise RuntimeError(
                        f"{error}; expected a server that is ready. Start it first, or leave it out."
                    ) from None
            time.sleep(self.options.pause_after(tried))

    def each(self, ask: Callable[[Server, Request], Result], requests: list[Request]) -> list[Result]:
        """Returns what `ask` returns for each request, in their order; it is called again, with this server or another,
        where it raises UnavailableError.

        Raises RuntimeError naming the last failure where a request was tried too often, ValueError where a server
        refuses one.
        """
        stop = threading.Event()

        def numbered(item: tuple[int, Request]) -> tuple[int, Result]:
            return item[0], self._answer(ask, item[1], stop)

        # Threads of this pool that wait for a server do not keep the program from ending.
        with ThreadPool(max(1, min(self.options.requests, len(requests)))) as pool:
            try:
                found = dict(pool.imap_unordered(numbered, enumerate(requests)))  # a refusal is raised at once
                return [found[number] for number in range(len(requests))]
            finally:
                stop.set()

    def _answer(self, ask: Callable[[Server, Request], Result], request: Request, stop: threading.Event) -> Result:
        for tried in range(1, self.options.tries + 1):
            server, began, is_trial = self._free(stop)
            try:
                if is_trial:
                    self._meet_again(server)
                result = ask(server, request)
            except UnavailableError as error:
                self._failed(server, began, error)
                if tried == self.options.tries or all(s.failures >= self.options.tries for s in self.all):
                    raise RuntimeError(
                        f"{error}, after {max(tried, server.failures)} tries; what is complete is kept."
                        " Start the server again, and the same command goes on."
                    ) from None
            else:
                self._succeeded(server, began)
                return result
            finally:
                with self._lock:
                    server.in_flight -= 1
                    server.is_tried = server.is_tried and not is_trial
        raise AssertionError("the last try returns or raises")

    def _free(self, stop: threading.Event) -> tuple[Server, float, bool]:
        """Waits for a server that is free of failures, or, of those that failed, whose pause is over and that no other
        request tries. Returns it, the time, and whether this request is the one that tries it."""
        while not stop.is_set():
            with self._lock:
                now = time.monotonic()
                ready = [s for s in self.all if not s.failures or (s.pause_ends <= now and not s.is_tried)]
                if ready:
                    server = min(ready, key=lambda s: (s.in_flight, s.failures))
                    server.in_flight += 1
                    is_trial = server.failures > 0
                    server.is_tried = server.is_tried or is_trial
                    return server, now, is_trial
            stop.wait(LOOK)
        raise RuntimeError("the other requests have ended")

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

    def _failed(self, server: Server, began: float, error: UnavailableError) -> None:
        """Notes a failure, unless the request `began` before one that is noted: requests that fail together count
        once, also where one of them fails after the server is back."""
        with self._lock:
            if began >= server.failed_at:
                server.failed_at = time.monotonic()
                server.failures += 1
                pause = self.options.pause_after(server.failures)
                server.pause_ends = server.failed_at + pause
                self.tell(f"{error}; it is left out for {pause:g} seconds")

    def _succeeded(self, server: Server, began: float) -> None:
        """Notes an answer. One to a request that `began` before the server failed does not show that it is back."""
        with self._lock:
            if server.failures and began >= server.failed_at:
                server.failures = 0
                self.tell(f"{server.url} answers again")
