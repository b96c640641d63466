"""`Eagle31CandidateGenerator`: what drafts, in this library's loop and in transformers' own assisted loop."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from transformers import Cache, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..features import capture_states, decoder_layers
from ..modeling import Eagle31DrafterModel
from ..wrappers import drafter_in
from .drafting import READ_AT_ONCE, DraftSession, Policy, Proposal, Reading
from .randomness import Draws


class Eagle31CandidateGenerator(CandidateGenerator):
    """Drafts for the rows of a batch. A context manager: the target's states are captured only within it.

    `num_assistant_tokens`: longest chain. `confidence_threshold`: chains end after a token the drafter gives less
    probability in every row. `max_length`: no draft reaches past it. `num_padding`: left-padding tokens of each row of
    the prompt. `num_cached`: tokens of the prompt the target's cache already held; the drafter starts after them.
    `draws`: where sampled drafts come from, by default a source of their own. `past_key_values`: the cache that the
    target's forwards write to if they are this call's; None: all of them are. Raises ValueError when drafter and target
    do not fit.
    """

    requires_model_outputs = True

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
        draws: Draws | None = None,
        past_key_values: Cache | None = None,
    ):
        drafter = drafter_in(drafter)
        drafter.load_target_embeddings(target)
        self.target, self.past_key_values = target, past_key_values
        self.layer_ids = drafter.config.resolve_layer_ids(len(decoder_layers(target)))
        self.num_assistant_tokens, self.max_length = num_assistant_tokens, max_length
        # the first slot of each row the drafter reads
        self._first = [max(padding, num_cached) for padding in num_padding]
        self._captured_from = num_cached
        vocab_size = target.config.get_text_config().vocab_size
        if do_sample and draws is None:
            draws = Draws(len(num_padding), vocab_size, drafter.like.device, is_coupled=False)
        processors = logits_processor if logits_processor is not None else LogitsProcessorList()
        starts = [first - padding for first, padding in zip(self._first, num_padding, strict=True)]
        self.session = DraftSession(drafter, vocab_size, processors, draws, confidence_threshold, starts)
        self._unread: list[Reading] = []
        self._last_state: Tensor | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Eagle31CandidateGenerator":
        self._captured = self._stack.enter_context(capture_states(self.target, self.layer_ids, self.past_key_values))
        return self

    def __exit__(self, *exc_info) -> None:
        self._stack.close()

    @property
    def model_kwargs_overrides(self) -> dict:
        return {}

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
        for reading in self._captured_readings(input_ids):
            self._read_unread()
            self._unread.append(reading)
        self._captured_from = input_ids.shape[1] - 1  # captured rows of rejected drafts follow the accepted ones
        depth = min(self.num_assistant_tokens, self.max_length - input_ids.shape[1] - 1)
        proposal = self.propose([input_ids], depth) if depth > 0 else Proposal(input_ids[:, :0])
        return torch.cat((input_ids, proposal.ids), dim=1), proposal.logits

    def propose(
        self, contexts: list[Tensor], depth: int, policy: Policy | None = None, max_nodes: int = 10**9
    ) -> Proposal:
        """Chains of `depth` tokens after every text (1, L_b), or with a policy trees; on the device of the texts."""
        reading = Reading.joined(self._unread)
        self._unread = []
        if policy is None:
            proposal = self.session.propose_chain(reading, contexts, depth)
        else:
            proposal = self.session.propose_tree(reading, contexts, policy, depth, max_nodes)
        return proposal.to(contexts[0].device)

    @property
    def num_unread(self) -> int:
        """Tokens a row the drafter reads before it drafts."""
        return sum(reading.tokens.shape[1] for reading in self._unread)

    @contextmanager
    def reading_prompt(self, input_ids: Tensor) -> Iterator[None]:
        """Within it every forward of the target is a piece of the prompt (B, L), read as soon as it has run."""

        def read() -> None:
            for reading in self._captured_readings(input_ids):
                self.session.read(reading)

        self._captured.on_forward = read
        try:
            yield
        finally:
            self._captured.on_forward = None

    def _captured_readings(self, input_ids: Tensor) -> Iterator[Reading]:
        """What has been captured of the texts (B, L), piece by piece, as far as the tokens after it are known. The
        state of their last token is kept apart.
        """
        length = input_ids.shape[1]
        for states in self._captured.pieces(READ_AT_ONCE):
            first = self._captured_from
            self._captured_from += states.shape[1]
            end = min(self._captured_from, length - 1)
            if self._captured_from >= length:
                self._last_state = states[:, length - 1 - first : length - first]
            reading = Reading(states[:, : max(end - first, 0)], input_ids[:, first + 1 : end + 1], [])
            reading = reading.selected([list(range(max(start - first, 0), end - first)) for start in self._first])
            if max(reading.counts) > 0:
                yield reading

    def _read_unread(self) -> None:
        if self._unread:
            self.session.read(Reading.joined(self._unread))
            self._unread = []

    def keep(self, paths: list[list[int]], tokens: list[list[int]]) -> None:
        """Of the rows of the last forward `paths[b]` were accepted in row b, and `tokens[b]`, as many, come after them."""
        states = self._captured.take() if self._last_state is None else self._last_state
        self._last_state = None
        longest = max(len(row) for row in tokens)
        padded = torch.tensor(
            [row + [0] * (longest - len(row)) for row in tokens], dtype=torch.long, device=states.device
        )
        kept = Reading(states, states.new_zeros(states.shape[:2], dtype=torch.long), []).selected(paths)
        self._unread.append(Reading(kept.states, padded, kept.counts))
        # nothing was drafted for long; the next draft begins with reading the last of it
        if self.num_unread > READ_AT_ONCE:
            *earlier, last = self._unread
            self._unread = earlier
            self._read_unread()
            self._unread = [last]

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing to adapt: the depth is the caller's."""
