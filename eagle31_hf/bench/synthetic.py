"""Synthetic acceptance: the cost of the engine, measured without trained weights. The text that comes out is nobody's.

Source: vLLM's `rejection_sample_method="synthetic"` replaces the same comparison and leaves everything around it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..generation.rejection_sampler import Accepted, RejectionSampler, Walk, likeliest
from ..generation.request import decode_with
from ..generation.sequences import Sequences
from ..generation.stopping import Ends
from ..generation.tree import DraftTokens
from ..modeling import Eagle31DrafterModel

MARK = "_eagle31_benchmark"  # on models built to be timed; no other may be decoded with


class SyntheticSampler(RejectionSampler):
    """Accepts a draft at depth d + 1 with chance `survival[d]`, all in all, whatever the target says; never one past
    the end of the list."""

    def __init__(self, sampler: RejectionSampler, survival: Sequence[float], draws: Iterator[float]):
        super().__init__(sampler.processors, sampler.noise, sampler.keeps_scores)
        self.survival = survival
        self.draws = draws

    def accept(self, sequences: Sequences, drafts: DraftTokens, logits: Tensor, ends: Ends) -> Accepted:
        host, (chosen,) = drafts.on_host(likeliest(logits))
        walks = [
            None if sequences.finished[b] else self._walk_blindly(b, host.children(b), chosen[b], ends)
            for b in range(len(sequences))
        ]
        return Accepted.of(walks, ends.finished, host)

    def _walk_blindly(self, b: int, children: list[dict[int, int]], chosen: list[int], ends: Ends) -> Walk:
        """Accepts as many drafts as the next draw says, then adds a token that no draft proposes."""
        drawn, walk = next(self.draws), Walk([], [0], [])
        while True:
            node, depth = walk.path[-1], len(walk.path) - 1
            if not children[node] or depth >= len(self.survival) or drawn >= self.survival[depth]:
                others = (chosen[node], *range(len(children[node]) + 1))
                walk.tokens.append(next(token for token in others if token not in children[node]))
                ends.after(b, walk.tokens, [])
                return walk
            token, child = next(iter(children[node].items()))
            walk.tokens.append(token)
            walk.path.append(child)
            if ends.after(b, walk.tokens, []):
                return walk


def synthetic_decoding(
    drafter: Eagle31DrafterModel, knobs: dict[str, Any], survival: Sequence[float], seed: int = 0
) -> Callable[..., Any]:
    """A decoding method for `target.generate(custom_generate=...)` with synthetic acceptance.

    Only for targets built by `bench.engine`: RuntimeError for any other. ValueError unless the chances `survival` fall
    from at most 1.
    """
    if not all(1 >= before >= after >= 0 for before, after in zip([1.0, *survival], survival, strict=False)):
        raise ValueError(
            f"got the survival schedule {list(survival)}; expected chances from 1 to 0, none above the one before."
        )

    def decode(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if not getattr(model, MARK, False):
            raise RuntimeError(
                "synthetic acceptance makes up the text; it is for benchmarks, on models built by"
                " eagle31_hf.bench.engine."
            )
        draws = _evenly_spread(seed)
        return decode_with(
            model,
            drafter,
            *args,
            knobs=knobs,
            wrap_sampler=lambda sampler: SyntheticSampler(sampler, survival, draws),
            **kwargs,
        )

    return decode


def _evenly_spread(seed: int) -> Iterator[float]:
    """Numbers in [0, 1), one a sequence and round, that fill the interval evenly, so that a short run has the mean
    length of a long one."""
    n = 37 * seed
    while True:
        yield n * 0.6180339887498949 % 1.0
        n += 1
