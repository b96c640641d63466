"""`Eagle31CandidateGenerator`: what drafts, in this library's loop and in transformers' own assisted loop."""

from contextlib import ExitStack
from math import prod

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper
from transformers.generation.candidate_generator import CandidateGenerator

from ..features import capture_states, decoder_layers
from ..modeling import Eagle31DrafterModel
from .drafting import DraftSession, Proposal

# What the target draws at: its own temperature when sampling. Greedy text is drawn at 0, but the drafter's guess of it is not certain;
# on the demo pair trees are deepest at 0.15 to 0.25 (at 1, as in EAGLE-2, they are a third shallower than chains are long).
GREEDY_TREE_TEMPERATURE = 0.25


def tree_temperature(processors: LogitsProcessorList, do_sample: bool) -> float:
    """The temperature at which the drafter's probabilities say best which nodes the target will visit."""
    if not do_sample:
        return GREEDY_TREE_TEMPERATURE
    return prod(processor.temperature for processor in processors if isinstance(processor, TemperatureLogitsWarper))


class Eagle31CandidateGenerator(CandidateGenerator):
    """Drafts for one sequence. A context manager: the target's states are captured only within it.

    `num_assistant_tokens`: longest chain. `confidence_threshold`: a chain ends after a token the drafter gives less probability.
    `max_length`: no draft reaches past it. `num_padding`: left-padding tokens of the prompt. `num_cached`: tokens of the prompt the
    target's cache already held; the drafter starts after them. `tree_top_k`, `tree_total_tokens`: the shape of `propose`'s trees.
    Raises ValueError when drafter and target do not fit.
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
        num_padding: int = 0,
        num_cached: int = 0,
        tree_top_k: int = 1,
        tree_total_tokens: int = 0,
    ):
        drafter.load_target_embeddings(target)
        self.target = target
        self.layer_ids = drafter.config.resolve_layer_ids(len(decoder_layers(target)))
        self.num_assistant_tokens, self.max_length = num_assistant_tokens, max_length
        self.num_padding = num_padding
        self.tree_top_k, self.tree_total_tokens = tree_top_k, tree_total_tokens
        self.num_read, self._captured_from = max(num_padding, num_cached), num_cached
        vocab_size = target.config.get_text_config().vocab_size
        processors = logits_processor if logits_processor is not None else LogitsProcessorList()
        self.tree_temperature = tree_temperature(processors, do_sample)
        self.session = DraftSession(drafter, vocab_size, processors, do_sample, confidence_threshold)
        self._stack = ExitStack()

    def __enter__(self) -> "Eagle31CandidateGenerator":
        self._captured = self._stack.enter_context(capture_states(self.target, self.layer_ids))
        return self

    def __exit__(self, *exc_info) -> None:
        self._stack.close()

    @property
    def model_kwargs_overrides(self) -> dict:
        return {}

    def get_candidates(
        self, input_ids: Tensor, model_kwargs=None, model_outputs=None, is_first_iteration: bool = False, n_last_matches: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """(1, L) -> (1, L + K) and, when sampling, the logits (1, K, V) the drafts were drawn from. The first call drafts nothing."""
        if is_first_iteration:
            return input_ids, None
        proposal = self.propose(input_ids)
        return torch.cat((input_ids, proposal.ids), dim=1), proposal.logits

    def propose(self, input_ids: Tensor) -> Proposal:
        """(1, L) -> a chain, or with `tree_top_k` above 1 a tree, on the device of `input_ids`; nothing where the text is at its end."""
        depth = min(self.num_assistant_tokens, self.max_length - input_ids.shape[1] - 1)
        if depth < 1:
            return Proposal(input_ids[:, :0])
        length = input_ids.shape[1] - 1  # the token chosen last has no state yet
        # Captured rows of rejected drafts follow the accepted ones, those of padding come first.
        states = self._captured.take()[:, self.num_read - self._captured_from : length - self._captured_from]
        start = self.num_read - self.num_padding
        self.num_read = self._captured_from = length
        if self.tree_top_k > 1:
            shape = (depth, self.tree_top_k, self.tree_total_tokens, self.tree_temperature)
            proposal = self.session.propose_tree(input_ids, states, start, *shape)
        else:
            proposal = self.session.propose_chain(input_ids, states, start, depth)
        return proposal.to(input_ids.device)

    def not_capturing(self):
        """Within it forwards of the target are somebody else's."""
        return self._captured.paused()

    def keep(self, path: list[int]) -> None:
        """Only these rows of the last forward were accepted."""
        self._captured.keep_of_last(path)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing to adapt: the depth is the caller's."""
