"""A server of an inference engine (vLLM, SGLang, or another with their protocol) that answers prompts, token ids both
ways."""

import json
import os
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .states_file import read_states

try:  # huggingface-hub brings one of the two
    import httpx
except ImportError:
    import httpx2 as httpx  # type: ignore[no-redef]

KEY = "OPENAI_API_KEY"  # the environment variable
TRY_AGAIN = (408, 429)  # HTTP statuses besides 5xx
LOOPBACK = ("localhost", "127.0.0.1", "::1")
NO_BASES = ("/completions", "/models", "/generate")  # ends of paths below a server's address
LONGEST_QUOTE = 200  # characters of what a server says
ENDS = ("stop", "length", "repetition")  # why an answer ends


class Request(NamedTuple):
    """A prompt for an engine: its ids, the most tokens of the answer, the seed of a sampled one, what vLLM and SGLang
    sample by (a temperature and more), the ids that end the answer, and vLLM's settings by which it ends as soon as it
    repeats itself, where it will then be refused."""

    prompt: list[int]
    max_tokens: int
    seed: int
    sampling: dict[str, Any]
    stops: list[int]
    loop: dict[str, int] | None = None


class Completion(NamedTuple):
    """An engine's answer: its ids, why it ended (one of ENDS), the id the engine says it stopped at, its text (None: it
    gives none), how many tokens the engine read (None: it does not say), and the file with the prompt's hidden states
    (None: it gives none)."""

    ids: list[int]
    finish: str
    ended_by: Any = None
    text: str | None = None
    num_prompt_tokens: int | None = None
    states_path: str | None = None


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
    body: Callable[[str, Request], dict[str, Any]]
    reading: Callable[[Any], Completion]
    spare: int = 0
    penalises_prompts: bool = True


def _completions_body(model: str, request: Request) -> dict[str, Any]:
    seed = {"seed": request.seed} if request.sampling["temperature"] else {}
    loop = {"repetition_detection": request.loop} if request.loop else {}
    return {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "stop_token_ids": request.stops,
        "return_token_ids": True,
        **seed,
        **loop,
        **request.sampling,
    }


def _read_completions(response: Any) -> Completion:
    (choice,) = response["choices"]
    return Completion(
        choice["token_ids"],
        choice["finish_reason"],
        choice.get("stop_reason"),
        choice.get("text"),
        (response.get("usage") or {}).get("prompt_tokens"),
        (response.get("kv_transfer_params") or {}).get("hidden_states_path"),
    )


def _generate_body(model: str, request: Request) -> dict[str, Any]:
    seed = {"sampling_seed": request.seed} if request.sampling["temperature"] else {}
    params = {"max_new_tokens": request.max_tokens, "stop_token_ids": request.stops, **seed, **request.sampling}
    return {"input_ids": request.prompt, "sampling_params": params}


def _read_generate(response: Any) -> Completion:
    facts = response["meta_info"]
    finish = facts["finish_reason"]
    return Completion(
        response["output_ids"], finish["type"], finish.get("matched"), response.get("text"), facts.get("prompt_tokens")
    )


# SGLang keeps a few positions of its length for itself.
ENDPOINTS = (
    Endpoint("/v1/completions", _completions_body, _read_completions),
    Endpoint("/generate", _generate_body, _read_generate, spare=8, penalises_prompts=False),
)


def base_of(url: str) -> str:
    """Returns the address of a server without /v1. Raises ValueError for what is no http address of a server."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:  # of the port, or of an IPv6 address
        parts = httpx.URL()
    is_address = parts.scheme in ("http", "https") and parts.host and parts.port in (None, *range(1, 2**16))
    is_endpoint = parts.path.rstrip("/").endswith(NO_BASES)
    if not is_address or is_endpoint or parts.query or parts.fragment or len(url.split()) != 1:
        raise ValueError(f"got {url[:80]!r}, expected a server's address without a path, as http://localhost:8000")
    if parts.userinfo:
        raise ValueError(f"got an address of {parts.host} with a user name in it; expected the key in {KEY}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


_system_certificates = cache(ssl.create_default_context)  # read once, for all servers


class Server:
    """One server, at an address as `base_of` gives it: what it serves (`model`), how it is asked (`endpoint`), and how
    it has done lately. `states_folder`: where this machine has the folder into which it writes hidden states, None:
    under the name that the server has for it."""

    def __init__(self, url: str, timeout: float, states_folder: str | None = None):
        self.url, self.timeout = url, timeout
        self.states_folder = states_folder
        self.model = ""
        self.max_length: int | None = None
        self.endpoint = ENDPOINTS[0]
        self.failures = self.in_flight = 0
        self.is_tried = False  # by a request that finds out whether it is back
        self.failed_at = self.pause_ends = 0.0
        # A proxy is for what is elsewhere. No redirect is followed: the key would go wherever it leads.
        self._client = httpx.Client(
            base_url=url,
            timeout=timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            follow_redirects=False,
            trust_env=httpx.URL(url).host not in LOOPBACK,
            verify=_system_certificates(),
        )

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Sends a request, a POST where it has a body; returns the response's JSON.

        Raises UnavailableError where the server may do better later, ValueError where it refuses the request.
        """
        key = _key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            response = self._client.request("GET" if body is None else "POST", path, json=body, headers=headers)
        except httpx.TimeoutException:
            raise UnavailableError(f"{self.url}{path} gave no answer in {self.timeout:g} seconds") from None
        except httpx.RequestError as error:
            raise UnavailableError(f"{self.url}{path}: {error or type(error).__name__}") from None
        if not response.is_success:
            status, text = response.status_code, _quoted(response)
            said = f"{self.url}{path} answers {status} {_cut(response.reason_phrase)}{text and f' ({text})'}"
            if status >= 500 or status in TRY_AGAIN:
                raise UnavailableError(said)
            remedy = f" The key is read from {KEY}." if status in (401, 403) else ""
            raise ValueError(f"{said}; expected an answer, as vLLM and SGLang give.{remedy}")
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise OddAnswerError(f"{self.url}{path} answers what is no JSON ({_quoted(response)})") from None

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

    def complete(self, request: Request) -> Completion:
        """Asks for an answer. Raises UnavailableError and ValueError as `call` does."""
        completion = self._complete(request)
        if completion.states_path is not None:
            path = self._path_here(completion.states_path)
            with suppress(OSError, ValueError):  # nobody asked for them: they are left where they cannot be read
                read_states(path, request.prompt, self.timeout)
        return completion

    def states(self, request: Request) -> tuple[Tensor | None, list[int]]:
        """Asks for the hidden states of a prompt, see `read_states`; returns them, None where the server gives none,
        and the ids of its answer. Raises UnavailableError and ValueError as `call` does, and ValueError where this
        machine does not have what the server wrote."""
        completion = self._complete(request)
        if completion.states_path is None:
            return None, completion.ids
        try:
            path = self._path_here(completion.states_path)
            return read_states(path, request.prompt, self.timeout), completion.ids
        except OSError as error:
            raise UnavailableError(f"{self.url}: {error}") from None

    def _path_here(self, path: Any) -> Path:
        """Returns where this machine has the file of states that a response names. Raises ValueError for what is no
        name of such a file."""
        if not isinstance(path, str) or not path.endswith(".safetensors") or "\0" in path:
            raise ValueError(f"{self.url} says that its states are in {_short(path)}; expected a .safetensors file.")
        return Path(path) if self.states_folder is None else Path(self.states_folder, Path(path).name)

    def _complete(self, request: Request) -> Completion:
        response = self.call(self.endpoint.path, self.endpoint.body(self.model, request))
        try:
            completion = self.endpoint.reading(response)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError):
            raise OddAnswerError(f"{self.url} answers {_short(response)}; expected ids") from None
        ids = completion.ids
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise OddAnswerError(f"{self.url} answers with ids {_short(ids)}; expected a list of integers")
        if completion.text is not None and not isinstance(completion.text, str):
            raise OddAnswerError(f"{self.url} answers with the text {_short(completion.text)}; expected words")
        if completion.finish not in ENDS:  # an engine that shuts down aborts what it works on
            raise UnavailableError(f"{self.url} ended an answer for the reason {completion.finish!r}")
        if completion.num_prompt_tokens not in (None, len(request.prompt)):
            raise ValueError(
                f"{self.url} read {completion.num_prompt_tokens} tokens of a prompt of {len(request.prompt)}; expected"
                " the ids as they are."
            )
        return completion

    def choose_endpoint(self, request: Request) -> None:
        """Finds the way to ask that gives ids. Raises ValueError where there is none, UnavailableError as `call`
        does."""
        failures: list[Exception] = []
        for endpoint in ENDPOINTS:
            self.endpoint = endpoint
            try:
                self.complete(request)
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


def _quoted(response: httpx.Response) -> str:
    return _cut(" ".join(response.text.split()))
