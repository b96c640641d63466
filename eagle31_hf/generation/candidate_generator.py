"""`Eagle31CandidateGenerator`: the drafter in transformers' own assisted loop."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..modeling import Eagle31DrafterModel, drafter_in
from ..targets.ends import num_logits
from ..targets.layers import capture_states, decoder_layers
from .draft_sampler import DraftSampler
from .drafter_runner import runner_of
from .noise import Noise
from .planning.plan import Plan
from .proposer import Proposer
from .unread_states import UnreadStates


class Eagle31CandidateGenerator(CandidateGenerator):
    """Drafts chains for one sequence. A context manager: the target's states are captured only within it.

    `num_assistant_tokens`: longest chain. `confidence_threshold`: chains end after a token the drafter gives less
    probability. `max_length`: no draft reaches past it. `num_padding`: left-padding tokens of the prompt. `num_cached`:
    tokens of the prompt the target's cache already held; the drafter starts after them. Raises ValueError when drafter
    and target do not fit.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(
        self,
        drafter: Eagle31DrafterModel,
        target: PreTrainedModel,
        num_assistant_tokens: int,
        max_length: int,
        logits_processor: LogitsProcessorList | None = None,
        do_sample: bool = False,
        confidence_threshold: float = 0.0,
        num_padding: tuple[int, ...] | list[int] = (0,),
        num_cached: int = 0,
    ):
        drafter = drafter_in(drafter)
        drafter.load_target_embeddings(target)
        self.target = target
        self.layer_ids = drafter.config.resolve_layer_ids(len(decoder_layers(target)))
        self.num_assistant_tokens = num_assistant_tokens
        self.max_length = max_length
        vocab_size = num_logits(target)
        noise = Noise(1, vocab_size, drafter.like.device, is_coupled=False) if do_sample else None
        processors = LogitsProcessorList() if logits_processor is None else logits_processor
        first_slot = max(num_padding[0], num_cached)
        runner = runner_of(drafter, [first_slot - num_padding[0]])
        self.proposer = Proposer(
            runner, DraftSampler(drafter, vocab_size, processors, noise, confidence_threshold, num_sequences=1)
        )
        self.unread = UnreadStates(runner.read, [first_slot], num_cached)
        self._stack = ExitStack()

    def __enter__(self) -> "Eagle31CandidateGenerator":
        self.unread.captured = self._stack.enter_context(capture_states(self.target, self.layer_ids))
        return self

    def __exit__(self, *exc_info) -> None:
        self._stack.close()

    def get_candidates(
        self,
        input_ids: Tensor,
        model_kwargs=None,
        model_outputs=None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """(1, L) -> (1, L + K) and, when sampling, the logits (1, K, V) the drafts were drawn from. The first call
        drafts nothing."""
        if is_first_iteration:
            return input_ids, None
        self.unread.queue_text(input_ids)
        depth = min(self.num_assistant_tokens, self.max_length - input_ids.shape[1] - 1)
        if depth < 1:
            return input_ids, None
        drafts = self.proposer.propose(self.unread.take(), [input_ids], Plan(depth)).to(input_ids.device)
        return torch.cat((input_ids, drafts.ids), dim=1), drafts.logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Does nothing: the depth is the caller's choice."""
