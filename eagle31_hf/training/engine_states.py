"""States of a target that servers of vLLM run: asked for text by text, stored or streamed while a drafter is trained.

vLLM's method `extract_hidden_states` gives the states (T, n + 1, ht) of a request's prompt: those that a drafter reads,
and last those of layer id L, of L layers, which the final norm reads. Source: vLLM's documentation, "Hidden State
Extraction".
T tokens of a text, n aux hidden states, ht target width.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from ..targets.ends import ACTIVATION_DTYPES, execution_device
from ..targets.layers import capture_states, num_layers_of
from .ends import TargetEnds, ends_from_checkpoint
from .engine_server import Request, Server
from .engines import GREEDY, UNLIKELY
from .kinds import Tokens
from .packing import tokens_at
from .servers import EngineOptions, Servers, Tell

States = tuple[Tensor, Tensor]  # of a text: aux hidden states (T, n*ht), and those that enter the head (T, ht)
PROBE = (1, 2, 3, 5, 8, 13, 21, 34)  # ids of a text that servers are asked for first
MAX_RELATIVE_ERROR = 0.5  # of a state; quantization stays below it


@dataclass
class EngineStates:
    """Gives the states of texts, as servers of vLLM that were met give them.

    `ends`: the target's embedding and head; `norm`: its final norm, which makes of the last layer's output what the
    head reads. `server_layers`: `layer_ids`, and after them the last layer, whose output a server gives, too;
    `server_options`: with what vLLM is started to give them; `probe`: the request by which servers are checked.
    """

    servers: Servers
    ends: TargetEnds
    norm: nn.Module
    layer_ids: list[int]

    def __post_init__(self):
        self.scoring = self.ends.scoring
        self.num_layers = num_layers_of(self.ends.config.get_text_config(decoder=True))
        self.server_layers = [*self.layer_ids, self.num_layers]
        self.server_options = options_of_server(self.server_layers, "FOLDER")
        self.probe = _request([token % self.ends.embedding.num_embeddings for token in PROBE])

    def of_texts(self, texts: Sequence[Tensor]) -> list[States]:
        """Returns the states of texts (T,), in their order.

        Raises RuntimeError where the servers fail, ValueError for states that are not of these texts and layers.
        """
        found = self.servers.each(self._ask, [_request(text.tolist()) for text in texts])
        return [(states[:, :-1].flatten(1), self._entering_head(states[:, -1])) for states, _ in found]

    @torch.no_grad()
    def _entering_head(self, last: Tensor) -> Tensor:
        """Returns the states that enter the head (T, ht) from the output of the last layer (T, ht)."""
        return self.norm(last.to(next(self.norm.parameters(), last))).to(last)

    def _ask(self, server: Server, request: Request) -> tuple[Tensor, list[int]]:
        """Returns the states (T, n + 1, ht) of a request's prompt, and the ids that the server says next. Raises
        UnavailableError where they are not to be had now."""
        states, ids = server.states(request)
        if states is None:
            raise ValueError(
                f"{server.url} gives no hidden states; expected a server of vLLM with{self.server_options}"
            )
        if states.dtype not in ACTIVATION_DTYPES:
            raise ValueError(
                f"{server.url} gives states of dtype {states.dtype}; expected one of"
                f" {', '.join(str(dtype) for dtype in ACTIVATION_DTYPES)}."
            )
        expected = (len(request.prompt), len(self.server_layers), self.ends.embedding.embedding_dim)
        if states.shape != expected:
            raise ValueError(
                f"{server.url} gives states of shape {tuple(states.shape)}; expected {expected}: of the layers"
                f" {self.layer_ids}, and the last one's output. Start it with{self.server_options}"
            )
        return states, ids

    def check(self) -> None:
        """Compares, on a short text, what each server says next with what the target's own head makes of its last
        state. Raises ValueError for a server that runs another target, or gives another layer last."""
        for server in self.servers.all:
            states, ids = self.servers.patiently(self._ask, server, self.probe)
            if not states.isfinite().all():
                raise ValueError(f"{server.url} gives states that are not finite; expected finite ones.")
            said = self.ends.logits(self._entering_head(states[-1:, -1])).softmax(-1)[0]
            if not ids or ids[0] >= len(said) or said[ids[0]] < UNLIKELY * said.max():
                raise ValueError(
                    f"{server.url} goes on with id {ids and ids[0]}, and by the target's own norm and head its last"
                    f" states say {int(said.argmax())}; expected a server of the target that gives the states of layer"
                    f" {self.num_layers} last. Start it with{self.server_options}"
                )

    @torch.no_grad()
    def compare(self, target: PreTrainedModel) -> None:
        """Compares the states of a short text with the target's own, where this machine can run it. Raises ValueError
        for those that are nearer to another layer's."""
        ids = torch.tensor([self.probe.prompt], device=execution_device(target))
        every = [*range(self.num_layers + 1)]
        with capture_states(target, every) as captured:
            target(input_ids=ids, use_cache=False)
        ours = captured.take()[0].float().cpu().unflatten(-1, (len(every), -1))
        for server in self.servers.all:
            theirs = self.servers.patiently(self._ask, server, self.probe)[0].float()
            away = (theirs[:, :, None] - ours[:, None]).norm(dim=-1) / ours.norm(dim=-1)[:, None]  # (T, n + 1, L + 1)
            distance, nearest = away.mean(0).min(-1)
            if nearest.tolist() != self.server_layers or distance.max() > MAX_RELATIVE_ERROR:
                raise ValueError(
                    f"{server.url} gives states that are nearest to those of the target's layers {nearest.tolist()},"
                    f" off by up to {distance.max():.2g} of their size; expected"
                    f" {self.server_layers}. Start it with{self.server_options}"
                )


def engine_states(
    outline: PreTrainedModel,
    options: EngineOptions,
    layer_ids: list[int],
    max_length: int,
    tell: Tell,
    revision: str | None = None,
) -> EngineStates | None:
    """Returns the source of a target's states at these layers, of texts of at most `max_length` tokens, or None where
    the servers of the engine give none. `outline`: the target on the meta device, whose name says where its checkpoint
    is.

    Raises RuntimeError for a server that cannot be reached, ValueError where only some give states, for states of other
    layers or of another target, and for a target whose ends cannot be read alone.
    """
    servers = Servers(options, outline.name_or_path, tell)
    ask = _request([*PROBE[:2]])
    servers.meet(ask, max_length, after=1)
    silent = [server.url for server in servers.all if servers.patiently(server.states, ask)[0] is None]
    if len(silent) == len(servers.all):
        return None
    if silent:
        raise ValueError(f"{silent[0]} gives no hidden states, and other servers do; expected the same of all.")
    source = EngineStates(servers, *ends_from_checkpoint(outline, revision), layer_ids)
    source.check()
    tell(f"states by {servers.name}")
    return source


def _request(ids: list[int]) -> Request:
    """Returns a request for the states of these ids, and one greedy token."""
    return Request(ids, 1, 0, GREEDY, [])


def options_of_server(layer_ids: list[int], folder: str) -> str:
    """Returns the options of `vllm serve` with which it writes the states of these layers into a folder."""
    ids = {"eagle_aux_hidden_state_layer_ids": layer_ids}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": {"hf_config": ids}}
    connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    transfer = {**connector, "kv_connector_extra_config": {"shared_storage_path": folder}}
    return f" --speculative-config '{json.dumps(method)}' --kv-transfer-config '{json.dumps(transfer)}'"


class StreamedStates(Dataset):
    """Examples whose states are asked for when the examples are: {"input_ids", "answers", "states", "last_states"}, as
    those of a store. `lengths` are those of the examples."""

    def __init__(self, examples: Any, source: EngineStates):
        self.examples, self.source = examples, source
        self.lengths: list[int] = examples.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Returns several examples, for whose states the servers are asked at once."""
        texts = [self.tokens(index) for index in indices]
        states = self.source.of_texts([text.input_ids for text in texts])
        return [
            {"input_ids": text.input_ids, "answers": text.answers, "states": aux, "last_states": last}
            for text, (aux, last) in zip(texts, states, strict=True)
        ]

    def tokens(self, index: int) -> Tokens:
        """Returns the tokens of an example, without its states."""
        return tokens_at(self.examples, range(len(self))[index])
