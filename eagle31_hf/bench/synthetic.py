"""Acceptance by decree: what the engine costs, measured without trained weights. The text that comes out is nobody's.

Source: vLLM's `rejection_sample_method="synthetic"` replaces the same comparison and leaves everything around it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from ..generation import decoding
from ..generation.drafting import Proposal
from ..generation.texts import Texts
from ..generation.verify import Ends, Judge, Verdict, likeliest

MARK = "_eagle31_benchmark"  # on models built to be timed; no other may be decoded with


def survival_of_length(mean_accepted_length: float, depth: int) -> list[float]:
    """The schedule of least variance: drafts are kept to position floor(length - 1), the next one with what is left as
    chance."""
    wanted = mean_accepted_length - 1
    return [min(max(wanted - position, 0.0), 1.0) for position in range(depth)]


@contextmanager
def synthetic_acceptance(survival: Sequence[float], seed: int = 0) -> Iterator[None]:
    """Within it a draft at depth d + 1 is accepted with chance `survival[d]`, all in all, whatever the target says;
    never past the end of the list. Only for targets built by `bench.engine`: RuntimeError for any other. ValueError
    unless the chances fall from at most 1.
    """
    if not all(1 >= before >= after >= 0 for before, after in zip([1.0, *survival], survival, strict=False)):
        raise ValueError(
            f"got the survival schedule {list(survival)}; expected chances from 1 to 0, none above the one before."
        )
    draws = _evenly_spread(seed)

    class Synthetic(Judge):
        def row_by_row(self, texts: Texts, proposal: Proposal, logits: Tensor, ends: Ends | None = None) -> Verdict:
            chosen, children = likeliest(logits).tolist(), proposal.children()
            assert ends is not None
            rows = [
                ([], [], []) if texts.finished[b] else _walk(next(draws), chosen[b], children[b], partial(ends, b))
                for b in range(texts.num_rows)
            ]
            return Verdict(*(list(part) for part in zip(*rows, strict=True)))

    def _walk(
        drawn: float, chosen: list[int], children: list[dict[int, int]], ends: Callable[[list[int], list[Tensor]], bool]
    ) -> tuple[list[int], list[int], list[Tensor]]:
        tokens, path = list[int](), [0]
        while not tokens or not ends(tokens, []):
            node, depth = path[-1], len(path) - 1
            if not children[node] or depth >= len(survival) or drawn >= survival[depth]:
                others = (chosen[node], *range(len(children[node]) + 1))
                tokens.append(next(token for token in others if token not in children[node]))
                ends(tokens, [])
                return tokens, path, []
            token, child = next(iter(children[node].items()))
            tokens.append(token)
            path.append(child)
        return tokens, path, []

    def judge(target: PreTrainedModel, *rules) -> Judge:
        if not getattr(target, MARK, False):
            raise RuntimeError(
                "synthetic acceptance makes up the text; it is for benchmarks, on models built by"
                " eagle31_hf.bench.engine."
            )
        return Synthetic(*rules)

    token = decoding.judge_of.set(judge)
    try:
        yield
    finally:
        decoding.judge_of.reset(token)


def _evenly_spread(seed: int) -> Iterator[float]:
    """Numbers in [0, 1), one a row and round, that fill the interval evenly, so that a short run has the mean length of
    a long one."""
    n = 37 * seed
    while True:
        yield n * 0.6180339887498949 % 1.0
        n += 1
