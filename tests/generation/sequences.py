"""Every continuation of a prompt over a small vocabulary, and how likely the target alone makes it. V target
vocabulary."""

import itertools

import torch
from conftest import build_target
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from eagle31_hf import Eagle31Config, Eagle31DrafterModel

V = 4


def small_target() -> PreTrainedModel:
    return build_target(vocab_size=V, num_hidden_layers=2, initializer_range=0.3)


def small_drafter(target: PreTrainedModel, draft_vocab_size: int = V - 1) -> Eagle31DrafterModel:
    """Of random weights and, by default, without one of the tokens: q is far from p, so that many drafts are
    rejected."""
    torch.manual_seed(0)
    config = Eagle31Config(
        vocab_size=V,
        draft_vocab_size=draft_vocab_size,
        hidden_size=36,
        intermediate_size=40,
        num_attention_heads=2,
        num_key_value_heads=1,
        aux_hidden_state_layer_ids=[0, 2],
        initializer_range=0.2,
    )
    drafter = Eagle31DrafterModel(config).eval()
    if draft_vocab_size < V:
        drafter.set_draft_vocabulary(torch.tensor([3, 0, 1]))
    drafter.load_target_embeddings(target)
    return drafter


def texts_after(prompt: list[int], length: int) -> Tensor:
    """The prompt and every continuation of `length` tokens, in the order of their numbers in base V: (V ** length,
    ...)."""
    continuations = torch.tensor(list(itertools.product(range(V), repeat=length)), dtype=torch.long).reshape(
        V**length, length
    )
    return torch.cat((torch.tensor([prompt]).expand(V**length, -1), continuations), dim=1)


@torch.no_grad()
def next_tokens(target: PreTrainedModel, prompt: list[int], processors: list, length: int) -> list[Tensor]:
    """The target alone: at [n] the distributions (V ** n, V) of the token after every continuation of n tokens."""
    texts = [texts_after(prompt, n) for n in range(length)]
    return [LogitsProcessorList(processors)(ids, target(ids).logits[:, -1]).double().softmax(-1) for ids in texts]


def likelihoods(target: PreTrainedModel, prompt: list[int], processors: list, length: int) -> Tensor:
    """The distribution (V ** length,) of whole continuations."""
    probabilities = torch.ones(1, dtype=torch.double)
    for p in next_tokens(target, prompt, processors, length):
        probabilities = (probabilities[:, None] * p).flatten()
    return probabilities


def numbers(tokens: Tensor) -> Tensor:
    """Continuations (B, length) -> their indices (B,) in `texts_after`."""
    return (tokens * V ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(1)
