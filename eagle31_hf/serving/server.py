"""transformers' server (`transformers serve`) for one target, which answers every request with its drafter.

Its handlers make the answers; what stands around them, routes, checks of requests and limits, is this library's own.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any, cast

import torch
import uvicorn
from jinja2 import TemplateError
from jinja2.defaults import DEFAULT_NAMESPACE
from starlette.middleware.cors import CORSMiddleware
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import Modality
from transformers.utils.chat_template_utils import _get_template_variables

from ..acceptance import watch_rounds
from ..cache.prefix_cache import MOST_TOKENS, PrefixCache
from ..errors import DraftingRefusedError
from ..modeling import Eagle31DrafterModel
from ..targets.context import checking_forwards, context_of, piece_of
from ..web.address import bound, url_of
from ..web.gate import Gate
from .app import FREE, ROUTES, App
from .body import Served
from .clients import GenerationThread, Limits, StopConditions, current_call
from .metrics import Metrics

TEMPLATE_FUNCTIONS = ("raise_exception", "strftime_now")  # which transformers gives every chat template
USUAL_ANSWER = 1024  # tokens of an answer whose request names no number, as in transformers' server
TEXT_ARGUMENTS = {"input_ids", "attention_mask", "streamer", "generation_config", "tokenizer"}
ENDING = 5  # seconds that answers have to end once a signal asks the server to stop


class DraftingServer(Serve):
    """Loads `target`, a folder or Hub repository, and serves it until it is stopped.

    `load_drafter` gets the target and returns its drafter; `knobs` are arguments of every generate() call, as
    num_assistant_tokens; `announce` is told the addresses; `prefix_cache_tokens` is `most_tokens` of a `PrefixCache`.
    Who may ask: `key`, which every request must bring, None: no key; `any_origin`: web pages of any origin; `hosts`:
    names that the server is known by, besides its address. `options` are those of `transformers serve`: host, port,
    device, dtype, reasoning and others. A request that cannot be drafted is answered by the target alone. Raises what
    loading raises, and what generate() does where the two do not fit each other: before a request is taken.
    """

    def __init__(
        self,
        target: str,
        load_drafter: Callable[[PreTrainedModel], Eagle31DrafterModel],
        knobs: dict[str, Any],
        announce: Callable[[str], None],
        prefix_cache_tokens: int = MOST_TOKENS,
        key: str | None = None,
        any_origin: bool = False,
        hosts: Sequence[str] = (),
        **options: Any,
    ):
        self.target = target
        self.load_drafter = load_drafter
        self.knobs = knobs
        self.announce = announce
        self.prefix_cache_tokens = prefix_cache_tokens
        self.key, self.any_origin = key, any_origin
        self.hosts = hosts
        self.metrics = Metrics()
        self.stop_conditions = StopConditions()
        # The base class calls `start_server` at the end, where everything is loaded. It would then wait for a thread
        # that serves; ours serves until it is stopped, and there is nothing left to wait for.
        super().__init__(target, non_blocking=True, **options)

    def start_server(self) -> None:
        """Has the target draft, and serves it."""
        manager: Any = self._model_manager
        target, processor = manager.load_model_and_processor(manager.process_model_name(self.target))
        # a text model may have come with the processor of another, by which transformers leaves images out
        reads_images = manager.get_model_modality(target, processor=processor) is not Modality.LLM
        served = Served(
            model=self.target,
            vocab_size=target.config.get_text_config(decoder=True).vocab_size,
            context=context_of(target),
            template_options=template_options(processor),
            template_arguments=template_arguments(processor),
            reads_images=reads_images and hasattr(processor, "image_processor"),
        )
        drafter = self.load_drafter(target)
        # a trial before anything is served: raises where drafter and target do not fit each other
        ids = torch.tensor([[1, 2, 3]], device=target.device)
        trial: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, **self.knobs}
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, **trial)
        answer = max(USUAL_ANSWER, target.generation_config.max_new_tokens or 0)
        limits = Limits(served.context, answer, piece_of(target, drafter, **self.knobs))
        target.generate = self._watched(target, drafter)  # of this model alone; the class keeps its own
        # From now on it has one name: transformers adds a revision, by which no client asks.
        manager.loaded_models = {self.target: manager.loaded_models[manager.process_model_name(self.target)]}
        manager.process_model_name = lambda name: name
        thread = self.generation = GenerationThread(limits)
        # All requests are of one model, and one thread answers them all.
        cast(Any, self._generation_state).get_manager = lambda *args, **kwargs: thread
        self.serve(self.application(served))

    def _watched(self, target: Any, drafter: Eagle31DrafterModel) -> Callable[..., Any]:
        """Returns a generate() with the drafter, which counts what is drafted, and ends once its client has gone."""
        alone, stop = cast(Any, target.generate), self.stop_conditions
        prefix_cache = PrefixCache(target, self.prefix_cache_tokens)
        drafted = partial(alone, assistant_model=drafter, **self.knobs)

        def drafted_from_cache(**kwargs: Any) -> Any:
            ids, config = kwargs["input_ids"], kwargs["generation_config"]
            with prefix_cache.text(ids, config.prefill_chunk_size, config) as text:
                counts = {"prefix_cache_queries": ids.shape[1], "prefix_cache_hits": text.num_reused}
                try:
                    found = drafted(**kwargs, **text.argument)
                except DraftingRefusedError:
                    counts = {}
                    raise
                finally:
                    for name, count in counts.items():
                        self.metrics.count(name, count)
                text.ids = getattr(found, "sequences", found)[0].tolist()
            return found

        def answer(*args: Any, **kwargs: Any) -> Any:
            with checking_forwards(target, stop.check):
                try:
                    with watch_rounds(stop.note_round):
                        is_text = kwargs.keys() <= TEXT_ARGUMENTS  # of images, say, the ids do not tell all
                        return drafted_from_cache(**kwargs) if is_text else drafted(*args, **kwargs)
                except DraftingRefusedError:  # before a token is generated: of beams, say, there are no drafts
                    self.metrics.count("requests_not_drafted")
                    return alone(*args, **kwargs, stopping_criteria=StoppingCriteriaList([stop]))

        def generate(*args: Any, **kwargs: Any) -> Any:
            call, processor = current_call(), kwargs.get("tokenizer")
            kwargs["tokenizer"] = getattr(processor, "tokenizer", processor)  # which reads stop strings
            with self.metrics.request():
                try:
                    stop.check()  # the client may have gone while others were answered
                    if call.seed is not None:
                        torch.manual_seed(call.seed)
                    return answer(*args, **kwargs)
                except Exception as error:
                    call.error = error
                    raise

        return generate

    def application(self, served: Served) -> Any:
        """Returns the ASGI application: the routes behind the gate."""
        handlers: dict[str, Any] = {
            "/v1/chat/completions": self._chat_handler.handle_request,
            "/v1/completions": self._completion_handler.handle_request,
            "/v1/responses": self._response_handler.handle_request,
        }
        gate = Gate(
            App(served, handlers, self.metrics).application(),
            [self.server.config.host, *self.hosts],
            lambda method, path: path in ROUTES,
            key=self.key,
            free=FREE,
            any_origin=self.any_origin,
        )
        if not self.any_origin:
            return gate
        return CORSMiddleware(gate, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])

    def serve(self, application: Any) -> None:
        """Serves in this thread until a signal ends it."""
        host, port = self.server.config.host, self.server.config.port
        config = uvicorn.Config(application, host, port, lifespan="off", timeout_graceful_shutdown=ENDING)
        self.server = uvicorn.Server(config)
        end = self.server.handle_exit

        def handle_exit(*signal: Any) -> None:
            """Handles a signal: whoever generates is told, and those who wait behind are refused at once."""
            self.stop_conditions.is_stopping.set()
            Thread(target=self.generation._thread._run, daemon=True).start()
            end(*signal)

        cast(Any, self.server).handle_exit = handle_exit
        where = url_of(host, port)
        self.announce(f"serving {self.target} at {where}/v1; counts of drafts at {where}/metrics")
        self.server.run(sockets=bound(host, port))


def template_options(processor: Any) -> frozenset[str]:
    """Returns the variables that a client may give the chat template: those it reads, less special tokens, functions
    and the arguments of what renders it."""
    tokenizer = getattr(processor, "tokenizer", processor)
    template = processor.chat_template or {}
    templates = template.values() if isinstance(template, dict) else [template]
    try:
        read = [_get_template_variables(each) for each in templates]
    except TemplateError:  # it renders no messages either, and says so to every request
        return frozenset()
    taken = {*template_arguments(processor), *tokenizer.special_tokens_map, *DEFAULT_NAMESPACE, *TEMPLATE_FUNCTIONS}
    return frozenset().union(*read) - taken


def template_arguments(processor: Any) -> frozenset[str]:
    """Returns the names of arguments of what renders a chat template: by them a client could name another template."""
    renderers = (processor.apply_chat_template, getattr(processor, "tokenizer", processor).apply_chat_template)
    return frozenset(name for each in renderers for name in inspect.signature(each).parameters) | {"messages"}
