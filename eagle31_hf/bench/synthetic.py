"""Acceptance by decree: what the engine costs, measured without trained weights. The text that comes out is nobody's.

Source: vLLM's `rejection_sample_method="synthetic"` replaces the same comparison and leaves everything around it.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from ..generation import decoding
from ..generation.drafting import Proposal
from ..generation.texts import Texts
from ..generation.verify import Judge, Verdict

MARK = "_eagle31_benchmark"  # on models built to be timed; no other may be decoded with


def survival_of_length(mean_accepted_length: float, depth: int) -> list[float]:
    """The schedule of least variance: drafts are kept to position floor(length - 1), the next one with what is left as chance."""
    wanted = mean_accepted_length - 1
    return [min(max(wanted - position, 0.0), 1.0) for position in range(depth)]


@contextmanager
def synthetic_acceptance(survival: Sequence[float], seed: int = 0) -> Iterator[None]:
    """Within it a draft at depth d + 1 is accepted with chance `survival[d]`, all in all, whatever the target says; never past the end of
    the list. Only for targets built by `bench.engine`: RuntimeError for any other. ValueError unless the chances fall from at most 1.
    """
    if not all(1 >= before >= after >= 0 for before, after in zip([1.0, *survival], survival, strict=False)):
        raise ValueError(f"got the survival schedule {list(survival)}; expected chances from 1 to 0, none above the one before.")
    conditional = [after / before if before else 0.0 for before, after in zip([1.0, *survival], survival, strict=False)]
    generator = random.Random(seed)

    class Synthetic(Judge):
        def row_by_row(self, texts: Texts, proposal: Proposal, logits: Tensor) -> Verdict:
            chosen, children = logits.argmax(-1).tolist(), proposal.children()
            rows = [([], [], []) if texts.finished[b] else _walk(b, chosen[b], children[b], logits) for b in range(texts.num_rows)]
            return Verdict(*(list(part) for part in zip(*rows, strict=True)))

    def _walk(b: int, chosen: list[int], children: list[dict[int, int]], logits: Tensor):
        tokens, path, scores = list[int](), [0], list[Tensor]()
        while True:
            node = path[-1]
            scores.append(logits[b, node : node + 1])
            depth = len(path) - 1
            if not children[node] or depth >= len(conditional) or generator.random() >= conditional[depth]:
                tokens.append(next(token for token in (chosen[node], 0, 1, 2, 3, 4, 5, 6, 7, 8) if token not in children[node]))
                return tokens, path, scores
            token, child = next(iter(children[node].items()))
            tokens.append(token)
            path.append(child)

    def judge(target: PreTrainedModel, *rules) -> Judge:
        if not getattr(target, MARK, False):
            raise RuntimeError("synthetic acceptance makes up the text; it is for benchmarks, on models built by eagle31_hf.bench.engine.")
        return Synthetic(*rules)

    token = decoding.judge_of.set(judge)
    try:
        yield
    finally:
        decoding.judge_of.reset(token)
