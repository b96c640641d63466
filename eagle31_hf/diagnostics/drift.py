"""Attention drift: states that grow and attention that turns to the drafter's own keys, the deeper a chain is.

K depths, n aux hidden states. Source: Attention Drift (arXiv 2605.09992).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ..modeling import Eagle31DrafterModel
from .acceptance import chain_knobs, counts_of, measure_acceptance
from .chains import Chain, recorded_chains

NUM_FIRST = 8  # keys at the beginning of a text, one of which is the sink
NUM_RECENT = 24  # keys before a chain that are told apart
OF_DEPTH = ("states", "cosines", "entropies", "agreement")  # figures with a number for each depth


@dataclass(frozen=True)
class Drift:
    """Means over `num_chains` chains of K tokens.

    `sink`: the key, counted from the text's first, that gets the most attention of the first ones. `inputs` (n + 1,):
    norms of each aux hidden state, and of the fused state, where a chain begins. By depth: `states`, norms of the state
    fed forward; `cosines`, between it and the fused state; `masses` (K, 4) in the order of `attention_mass.KINDS` and
    `entropies` in nats, of layer 0; `agreement`, the share of drafted tokens that the target would choose, too, after
    the same drafted tokens; `attention` (K, 3 + NUM_RECENT + K), the masses key by key: of the sink, of the other keys
    of the prompt, less the NUM_RECENT ones before the chain, of these, of the key at which the chain begins, and of the
    keys it made.
    """

    num_chains: int
    sink: int
    inputs: list[float]
    states: list[float]
    cosines: list[float]
    masses: list[list[float]]
    entropies: list[float]
    agreement: list[float]
    attention: list[list[float]]

    @property
    def growth(self) -> float:
        """The factor by which the state's norm grows from the first depth to the last."""
        return self.states[-1] / self.states[0]


def measure_drift(
    target: PreTrainedModel, drafter: Eagle31DrafterModel, prompt: Tensor, depth: int, max_new_tokens: int
) -> dict[str, Any]:
    """Continues a prompt (1, T) greedily by chains of `depth` tokens. Returns plain figures: those of `counts_of`, and
    the means over its chains that `drift_of` takes. Raises ValueError for a target that cannot be drafted for."""
    with recorded_chains(target, drafter) as recorder:
        stats = measure_acceptance(target, drafter, [prompt], chain_knobs(depth), max_new_tokens)
    return counts_of(stats) | means_of(recorder.chains, depth)


def means_of(chains: Iterable[Chain], depth: int) -> dict[str, Any]:
    """Returns the number of chains of full depth, and means over them as plain lists: those of `Chain`, and of
    `attention_parts`."""
    full = [chain for chain in chains if len(chain.agreement) == depth]
    means = {"chains": len(full)}
    if not full:
        return means
    parts = [
        {name: torch.tensor(getattr(chain, name)).float() for name in ("inputs", *OF_DEPTH)} | attention_parts(chain)
        for chain in full
    ]
    return means | {name: torch.stack([part[name] for part in parts]).double().mean(0).tolist() for name in parts[0]}


def attention_parts(chain: Chain) -> dict[str, Tensor]:
    """Returns the attention of layer 0, by depth and key.

    `first` (K, NUM_FIRST): of the text's first keys. `recent` (K, NUM_RECENT): of the keys just before the chain, the
    nearest last, less those that are among the first. `own` (K, NUM_FIRST): of the key at which the chain begins, were
    each of the first keys the sink: 0 where it is that itself. `made` (K, K): of the keys that the chain made.
    """
    begin, depth = chain.begin, len(chain.weights)
    weights = torch.zeros(depth, begin + 1 + depth)
    for k, row in enumerate(chain.weights):
        weights[k, : len(row)] = row
    of_text = weights[:, : begin + 1]
    before = of_text[:, NUM_FIRST:begin][:, -NUM_RECENT:]
    return {
        "first": pad(of_text[:, :NUM_FIRST], (0, max(0, NUM_FIRST - begin - 1))),
        "recent": pad(before, (NUM_RECENT - before.shape[1], 0)),
        "own": weights[:, begin, None] * (torch.arange(NUM_FIRST) != begin),
        "made": weights[:, begin + 1 :],
    }


def drift_of(figures: Sequence[Mapping[str, Any]]) -> Drift:
    """Returns the means over all chains of several prompts, of figures that `measure_drift` returned.

    Raises ValueError where no chain was of full depth.
    """
    figures = [one for one in figures if one["chains"]]
    if not figures:
        raise ValueError("no chain is as deep as asked for; expected longer texts, or chains that are less deep.")
    counts = torch.tensor([one["chains"] for one in figures]).double()

    def mean(name: str) -> Tensor:
        values = torch.tensor([one[name] for one in figures], dtype=torch.float64)
        return (values * counts.view(-1, *[1] * (values.dim() - 1))).sum(0) / counts.sum()

    first, made = mean("first"), mean("made")
    sink = int(first.mean(0).argmax())
    of_sink, of_own = first[:, sink], mean("own")[:, sink]
    of_chain = made.sum(-1)
    of_prompt = 1 - of_sink - of_own - of_chain
    recent = mean("recent")
    keys = torch.cat(((of_sink[:, None], (of_prompt - recent.sum(-1))[:, None], recent, of_own[:, None], made)), dim=-1)
    return Drift(
        num_chains=int(counts.sum()),
        sink=sink,
        inputs=mean("inputs").tolist(),
        masses=torch.stack((of_sink, of_prompt, of_own, of_chain), dim=-1).tolist(),
        attention=keys.tolist(),
        **{name: mean(name).tolist() for name in OF_DEPTH},
    )
