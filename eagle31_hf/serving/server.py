"""transformers' server (`transformers serve`) for one target, which answers every request with its drafter."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.cli.serve import Serve
from transformers.utils import logging

from ..acceptance import watch_rounds
from ..errors import DraftingRefusedError
from ..modeling import Eagle31DrafterModel
from .address import url_of
from .clients import ClientGoneError, ClientWatch, GenerationThread, check_client
from .metrics import CONTENT_TYPE, Metrics

logger = logging.get_logger(__name__)
TRIAL = ([[1, 2, 3]], 4)  # the prompt that is tried before anything is served, and how many tokens of an answer


class DraftingServer(Serve):
    """Loads `target`, a folder or Hub repository, and serves it until it is stopped.

    `load_drafter` gets the target and returns its drafter; `knobs` are arguments of every generate() call, as
    num_assistant_tokens; `announce` is told the addresses. `options` are those of `transformers serve`: host, port,
    device, dtype, reasoning and others. A request that cannot be drafted is answered by the target alone. Raises what
    loading raises, and what generate() does where the two do not fit each other: before a request is taken.
    """

    def __init__(
        self,
        target: str,
        load_drafter: Callable[[PreTrainedModel], Eagle31DrafterModel],
        knobs: dict[str, Any],
        announce: Callable[[str], None],
        **options: Any,
    ):
        self.target = target
        self.load_drafter = load_drafter
        self.knobs = knobs
        self.announce = announce
        self.metrics = Metrics()
        # The base class calls `start_server` at the end, where everything is loaded. It would then wait for a thread
        # that serves; ours serves until it is stopped, and there is nothing left to wait for.
        super().__init__(target, non_blocking=True, **options)

    def start_server(self) -> None:
        """Has the target draft, and serves in this thread until a signal ends it."""
        manager: Any = self._model_manager
        target, _ = manager.load_model_and_processor(manager.process_model_name(self.target))
        alone: Any = target.generate
        drafted = partial(alone, assistant_model=self.load_drafter(target), **self.knobs)
        ids = torch.tensor(TRIAL[0], device=target.device)
        drafted(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TRIAL[1], do_sample=False)

        def generate(*args: Any, **kwargs: Any) -> Any:
            with self.metrics.request():
                check_client()  # it may have gone while others were answered
                try:
                    with watch_rounds(check_client):
                        return drafted(*args, **kwargs)
                except DraftingRefusedError:  # before a token is generated: of beams, say, there are no drafts
                    self.metrics.count("requests_not_drafted")
                    return alone(*args, **kwargs)

        # Of this model alone; the class keeps its own. A server that is started for one model never unloads it.
        target.generate = generate
        manager.get_gen_models = lambda *args, **kwargs: [_as_listed(self.target)]
        # All requests are of one model, and one thread answers them all.
        thread, state = GenerationThread(), cast(Any, self._generation_state)
        state.get_manager = lambda *args, **kwargs: thread
        app: Any = self.server.config.app
        app.get("/metrics")(self._metrics)
        app.add_exception_handler(ValueError, _refused)
        app.add_exception_handler(ClientGoneError, _unheard)
        app.add_middleware(ClientWatch)
        config = self.server.config
        where = url_of(config.host, config.port)
        self.announce(f"serving {self.target} at {where}/v1; counts of drafts at {where}/metrics")
        self.server.run()

    def _metrics(self) -> Any:
        from fastapi import Response

        return Response(self.metrics.as_text(), media_type=CONTENT_TYPE)


async def _refused(request: Any, error: Exception) -> Any:
    """Answers a request that generate() or the chat template refuses, by 400 and their words. Left to itself the server
    would answer 500, and close a connection that the client goes on using."""
    from fastapi.responses import JSONResponse

    logger.warning("a request was refused", exc_info=error)
    return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, status_code=400)


async def _unheard(request: Any, error: Exception) -> Any:
    """Ends a request whose client has gone: the status, which nobody reads, is in the log."""
    from fastapi.responses import Response

    return Response(status_code=499)


def _as_listed(name: str) -> dict[str, Any]:
    """Returns the model as /v1/models lists it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": name.partition("/")[0]}


def check_installed() -> None:
    """Raises ImportError, with what to do, where what serves is missing."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError("serving needs fastapi, uvicorn, openai and pydantic: pip install eagle31_hf[serve]")
