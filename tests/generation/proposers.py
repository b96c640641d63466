"""The drafter's side of a call by itself: proposers, and the states they read. B sequences, L tokens of a text, n*ht
width of captured states."""

import torch
from conftest import VOCAB
from torch import Tensor
from transformers import LogitsProcessorList

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.generation.draft_sampler import DraftSampler
from eagle31_hf.generation.drafter_runner import DrafterRunner
from eagle31_hf.generation.noise import Noise
from eagle31_hf.generation.planning.plan import Plan
from eagle31_hf.generation.proposer import Proposer
from eagle31_hf.generation.tree import DraftTokens
from eagle31_hf.generation.unread_states import AuxStates
from eagle31_hf.targets.layers import decoder_layers, target_states


def build_proposer(
    drafter: Eagle31DrafterModel,
    processors=(),
    noise: Noise | None = None,
    threshold: float = 0.0,
    num_sequences: int = 1,
    vocab_size: int = VOCAB,
    first_position: int = 0,
) -> Proposer:
    """A proposer that has read nothing yet. `first_position`: of the first token it will read of each sequence."""
    sampler = DraftSampler(drafter, vocab_size, LogitsProcessorList(processors), noise, threshold, num_sequences)
    return Proposer(DrafterRunner(drafter, [first_position] * num_sequences), sampler)


def states_for(target, drafter: Eagle31DrafterModel, text: Tensor) -> Tensor:
    """The states (B, L, n*ht) that the drafter reads of texts (B, L)."""
    return target_states(target, text, drafter.config.resolve_layer_ids(len(decoder_layers(target))))[0]


def unread(text: Tensor, states: Tensor, start: int, stop: int) -> AuxStates:
    """Positions `start` to `stop` of a text (1, L), whose states are `states` (1, L, n*ht)."""
    return AuxStates(states[:, start:stop], text[:, start + 1 : stop + 1], [stop - start])


@torch.no_grad()
def propose(proposer: Proposer, text: Tensor, states: Tensor, start: int, stop: int, plan: Plan) -> DraftTokens:
    """The drafts after position `stop` of a text (1, L) whose token there has been chosen; positions `start` to `stop`
    are read first."""
    return proposer.propose(unread(text, states, start, stop), [text[:, : stop + 1]], plan)
