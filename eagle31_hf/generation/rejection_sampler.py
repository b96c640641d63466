"""Acceptance: which drafted tokens the target takes, and the token it adds. p is the target's distribution, q the
draft's.

B sequences, K drafted tokens of each, N nodes (the root, which is the token committed last, and the drafts), V target
vocabulary.

Nodes are visited in the order of the text, while drafts are accepted and the text has not ended. So logits processors
see exactly the prefixes, each once, that plain decoding would show them: processors that keep state of their own stay
correct. Stopping criteria and streamer are told of a token before the processors are shown the next prefix, so those
that know of each other stay correct, too.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..acceptance import CHAINS, LOCK_STEP, PLAIN, TREES
from . import processors
from .noise import Noise
from .sequences import Ends, Sequences
from .tree import DraftTokens, HostDrafts

SLICES = 32  # of a row of logits, on a GPU


@dataclass
class Accepted:
    """The outcome of one verification, by sequence: `tokens`, the accepted drafts, then the target's own token (the
    bonus token) unless a draft ended the text; `paths`, as many nodes: those of the root and the accepted drafts whose
    keys are kept; `num_drafts`, how many drafts were accepted, None for a sequence that had ended before; `scores`, the
    processed logits (1, V) of each token, where they are kept; `finished`: which sequences have ended now.

    `is_short`: a path met logits that drafts may have spoiled, so its sequence got one token fewer. `drafts`: those
    that were verified; `kind`: of the round, PLAIN, CHAINS, TREES or LOCK_STEP.
    """

    tokens: list[list[int]]
    paths: list[list[int]]
    num_drafts: list[int | None]
    scores: list[list[Tensor]]
    finished: list[bool]
    is_short: bool
    drafts: HostDrafts
    kind: str = PLAIN

    @classmethod
    def of(cls, walks: list["Walk | None"], finished: list[bool], drafts: HostDrafts) -> "Accepted":
        """The outcome of walks through the drafts, None for a sequence that had ended before."""
        accepted = [None if walk is None else min(len(walk.path) - 1, len(walk.tokens)) for walk in walks]
        taken = [walk or Walk([], [], []) for walk in walks]
        return cls(
            tokens=[walk.tokens for walk in taken],
            paths=[walk.path[: len(walk.tokens)] for walk in taken],
            num_drafts=accepted,
            scores=[walk.scores for walk in taken],
            finished=finished,
            is_short=any(len(w.tokens) < len(w.path) and not ended for w, ended in zip(taken, finished, strict=True)),
            drafts=drafts,
            kind=PLAIN if not drafts.ids[0] else CHAINS if drafts.parents is None else TREES,
        )


@dataclass
class Walk:
    """The way through one sequence's drafts: its new tokens, the nodes they were chosen at, and their scores. Where a
    draft ended the text, or the last node's logits are spoiled, the path has one node more than there are tokens."""

    tokens: list[int]
    path: list[int]
    scores: list[Tensor]


class RejectionSampler:
    """Chooses the target's tokens: by argmax where `noise` is None, else by sampling.

    Rejection sampling where drafts come with the logits they were drawn from: of all drafts at once by block
    verification (arXiv 2403.10444), or, where processors are to be shown each prefix, one by one (arXiv 2211.17192).
    Else the target's own token is drawn at every node, and while it is a child of the node, the walk descends. Each
    way tokens are distributed as the target's own. `keeps_scores`: processed logits are asked for.
    """

    is_lock_step = False

    def __init__(self, processors: LogitsProcessorList, noise: Noise | None, keeps_scores: bool = False):
        self.processors = processors
        self.noise = noise
        self.keeps_scores = keeps_scores

    @property
    def only_compares(self) -> bool:
        """Returns whether it only compares logits, so that they may be of any dtype and are not written to."""
        return self.noise is None and not self.processors and not self.keeps_scores

    def accept(self, sequences: Sequences, drafts: DraftTokens, logits: Tensor, ends: Ends) -> Accepted:
        """Target logits (B, N, V) -> the tokens each sequence accepts, whatever the others do, up to the one with which
        it ends. Logits are fp32 and overwritten, unless `only_compares`."""
        choices = self._choices(sequences, drafts, logits)
        suspects = [] if drafts.is_plain else [are_spoiled(logits)]
        wanted = choices.wanted if isinstance(choices, AtAllNodes) else []
        host, found = drafts.on_host(*suspects, *wanted)
        spoiled = found.pop(0) if suspects else [[False]] * len(sequences)
        if isinstance(choices, AtAllNodes):
            choices.found = found
        return self.walked(sequences, host, spoiled, choices, ends)

    def walked(
        self, sequences: Sequences, drafts: HostDrafts, spoiled: list[list[bool]], choices: "Choices", ends: Ends
    ) -> Accepted:
        """The outcome of each sequence's walk through its drafts. `spoiled`: of every node, whether its logits decide
        nothing."""
        walks = [
            None if sequences.finished[b] else self._walk(b, drafts.children[b], spoiled[b], choices, ends)
            for b in range(len(sequences))
        ]
        return Accepted.of(walks, ends.finished, drafts)

    def _choices(self, sequences: Sequences, drafts: DraftTokens, logits: Tensor) -> "Choices":
        """The way tokens are chosen: at all nodes at once where that needs no prefix and no wait, else one by one."""
        if self.noise is None and not self.processors:
            return AtAllNodes([likeliest(logits)], logits)
        are_pointwise = processors.are(self.processors, processors.POINTWISE)
        is_coupled = self.noise is None or self.noise.is_coupled
        if self.noise is not None and not is_coupled and are_pointwise and drafts.logits is not None:
            return drawn_block(self.noise, drafts, self._processed(logits))
        if not are_pointwise or not is_coupled or not self.saves_waits(logits):
            return NodeByNode(self, sequences, drafts, logits)
        scores = self._processed(logits)
        if self.noise is None:
            return AtAllNodes([likeliest(scores)], scores)
        chosen = likeliest(scores + self._noise_at(sequences, drafts))
        return AtAllNodes([chosen, are_distributions(scores)], scores)

    def _processed(self, logits: Tensor) -> Tensor:
        """Target logits (B, N, V) as processors leave them that are functions of the scores alone."""
        return self.processors(None, logits.float().flatten(0, 1)).unflatten(0, logits.shape[:2])

    def choose_at_nodes(self, logits: Tensor, drafts: Any, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Target logits (B, N, V) and the noise (B, N, V) of their slots -> the token chosen after each node, and
        whether its scores are a distribution, both (B, N) int64; nothing is read on the host. `drafts`: those of a
        captured round. For processors that are functions of the scores alone."""
        scores = logits
        if self.processors or noise is not None:
            scores = self._processed(logits)
        if noise is None:
            return likeliest(scores), drafts.ones
        return likeliest(scores + noise), are_distributions(scores).long()

    def saves_waits(self, logits: Tensor) -> bool:
        """Returns whether work on nodes that are not reached is worth the waits it saves: not where the host
        computes."""
        return logits.device.type != "cpu"

    def choose(
        self, b: int, slot: int, scores: Tensor, draft: Tensor | None = None, q_logits: Tensor | None = None
    ) -> Tensor:
        """One token (1,) for a slot of sequence b: the argmax of p (1, V), or a sample of it: the draft (1,), drawn
        from q (1, V), with probability min(1, p/q), else a token drawn from the residual max(p - q, 0)."""
        if self.noise is None:
            return scores.argmax(-1)
        if not bool(are_distributions(scores).all()):
            raise_no_distribution()
        if draft is None or q_logits is None:
            return self.noise.pick(b, slot, scores)
        p, q = (x.softmax(-1).gather(1, draft[:, None]) for x in (scores, q_logits))
        if bool(self.noise.uniforms(b, 1) * q[:, 0] < p[:, 0]):
            return draft
        return self.noise.pick(b, slot, residual(scores, q_logits))

    def _noise_at(self, sequences: Sequences, drafts: DraftTokens) -> Tensor:
        """The noise (B, N, V) that every node's token is drawn with."""
        assert self.noise is not None
        lengths = sequences.lengths.host
        by_depth = [
            torch.stack([self.noise.of_slot(b, length + depth) for depth in range(drafts.depth + 1)])
            for b, length in enumerate(lengths)
        ]
        noise = torch.stack(by_depth)
        if drafts.depths is None:
            return noise
        depths = drafts.depths.clamp(max=drafts.depth)  # trees of sequences that have ended may be deeper
        return noise.gather(1, depths[..., None].expand(-1, -1, noise.shape[2]))

    def _walk(
        self, b: int, children: list[dict[int, int]], spoiled: list[bool], choices: "Choices", ends: Ends
    ) -> Walk:
        walk = Walk([], [0], [])
        while not spoiled[walk.path[-1]]:  # before processors see it: they are shown every prefix once
            node = walk.path[-1]
            token, scores = choices.token(b, node, walk.tokens)
            walk.tokens.append(token)
            if self.keeps_scores:
                walk.scores.append(scores)
            child = children[node].get(token)
            if child is not None:
                walk.path.append(child)
            # Asked before the next prefix is shown to a processor: plain decoding shows none that goes past the end.
            if ends.after(b, walk.tokens, walk.scores) or child is None:
                break
        return walk


class LockStepSampler(RejectionSampler):
    """Chooses the target's tokens for a batch whose sequences stay equally long: each gets as many as the one that
    accepts least. Processors and criteria see the whole batch at one length, as in plain decoding. Only for chains."""

    is_lock_step = True

    def accept(self, sequences: Sequences, drafts: DraftTokens, logits: Tensor, ends: Ends) -> Accepted:
        """Accepts as many tokens as all sequences do, up to the first with which one ends. With EOS ids, a sequence
        that has ended is padded and does not hold back the others."""
        all_b, drafted = range(len(sequences)), drafts.ids
        suspects = [] if drafts.is_plain else [are_spoiled(logits).any(0)]
        host, found = drafts.on_host(*suspects)
        spoiled = found[0] if suspects else [False]
        was_finished, is_short = sequences.finished, False
        agrees = True
        tokens, scores = list[Tensor](), list[Tensor]()
        is_padded = [finished and bool(ends.stopping.eos_token_ids) for finished in was_finished]
        going = torch.tensor([not padded for padded in is_padded], device=logits.device)
        for node in range(drafts.num_nodes):
            context = torch.cat((sequences.padded(), *tokens), dim=1)
            if is_short := bool(spoiled[node]):
                break
            scores.append(self.processors(context, logits[:, node]))  # type: ignore[arg-type]
            chosen = torch.cat([self.choose(b, context.shape[1], scores[-1][b : b + 1]) for b in all_b])
            token = torch.where(going, chosen, sequences.pad_token_id)
            tokens.append(token[:, None])
            agrees = node < drafted.shape[1] and bool((token == drafted[:, node])[going].all())
            ends.after_step(torch.cat((context, tokens[-1]), dim=1), scores)
            if not agrees or ends.finished != was_finished:
                break
        ids = torch.cat((drafted[:, :0], *tokens), dim=1).tolist()
        path = list(range(len(tokens) + agrees))  # a draft that ended a text, or led to spoiled logits, is in it
        each_scores = [[step[b : b + 1] for step in scores] for b in all_b]
        accepted = Accepted.of([Walk(ids[b], path, each_scores[b]) for b in all_b], ends.finished, host)
        accepted.is_short, accepted.kind = is_short, LOCK_STEP
        accepted.num_drafts = [None if was else n for was, n in zip(was_finished, accepted.num_drafts, strict=True)]
        return accepted


@dataclass
class AtAllNodes:
    """Chosen at once, by `scores` (B, N, V). `wanted`: the tokens (B, N) and, where that may fail, whether each node's
    scores are a distribution; `found`: the same as lists, once the host has read them."""

    wanted: list[Tensor]
    scores: Tensor
    found: list[Any] = field(default_factory=list)

    def token(self, b: int, node: int, tokens: list[int]) -> tuple[int, Tensor]:
        """Returns the token of sequence b at a node whose path gave `tokens`, and its scores (1, V)."""
        if len(self.found) > 1 and not self.found[1][b][node]:
            raise_no_distribution()
        return self.found[0][b][node], self.scores[b, node : node + 1]


class NodeByNode:
    """Chosen when a node is reached, since processors are to see its prefix."""

    def __init__(self, sampler: RejectionSampler, sequences: Sequences, drafts: DraftTokens, logits: Tensor):
        self.sampler = sampler
        self.drafts = drafts
        self.logits = logits
        self.processors = processors.by_sequence(sampler.processors, len(sequences))
        self.prefixes = sequences.prefixes()

    def token(self, b: int, node: int, tokens: list[int]) -> tuple[int, Tensor]:
        """Returns what that of `AtAllNodes` does."""
        new = self.prefixes[b].new_tensor([tokens], dtype=torch.long)
        context = torch.cat((self.prefixes[b], new), dim=1) if tokens else self.prefixes[b]
        scores = self.processors[b](context, self.logits[b, node : node + 1])  # type: ignore[arg-type]
        drawn: tuple[Tensor, ...] = ()
        if self.drafts.logits is not None and node < self.drafts.ids.shape[1]:
            drawn = self.drafts.ids[b, node : node + 1], self.drafts.logits[b, node : node + 1]
        return int(self.sampler.choose(b, context.shape[1], scores, *drawn)), scores


Choices = AtAllNodes | NodeByNode


def drawn_block(noise: Noise, drafts: DraftTokens, scores: Tensor) -> AtAllNodes:
    """Block verification of a chain (B is 1) that was drawn from the drafter, by `scores` (1, N, V): its drafts are
    chosen up to the last one that is accepted, then a token of what is left of p there.

    That token is never the next draft, so the walk ends with it: where p has more left than q has, the draft's chance
    is 1.
    """
    assert drafts.logits is not None
    ids = drafts.ids[0]
    p_logits, q_logits = scores[0], drafts.logits[0]
    chances, shares = block_chances(ids, p_logits, q_logits)
    accepts = noise.uniforms(0, len(ids)) < chances
    last = (accepts * torch.arange(1, len(ids) + 1, device=ids.device)).amax(0, keepdim=True)  # node (1,)
    rest = residual(p_logits[last], q_logits[last.clamp(max=len(ids) - 1)], shares[last])
    weights = torch.where(last < len(ids), rest, p_logits[last])
    own = (weights + noise.gumbel(0)).argmax(-1)
    return AtAllNodes([torch.cat((ids, own)).scatter(0, last, own)[None], are_distributions(scores)], scores)


def block_chances(drafts: Tensor, p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts (K,) drawn from q (K, V), verified by p (K + 1, V) -> the chances (K,) that all drafts up to each one are
    accepted, of which the last that comes true counts; and the shares (K + 1,) of p that nodes' residuals are of. Where
    p is no distribution the chain ends.

    The share of a node is w_i = min(w_(i-1) p/q, 1), p and q being those of its draft, and w_0 is 1. With the mass r_i
    of max(w_i p - q, 0) after it the chance is r_i / (r_i + 1 - w_i), at the end w_i. Source: arXiv 2403.10444,
    algorithm 2.
    """
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    place = drafts[:, None]
    ratios = (p[:-1].gather(1, place) / q.gather(1, place))[:, 0].nan_to_num(0.0)
    total = ratios.log().cumsum(0)  # of the logs of shares, before any of them is cut to 1
    shares = torch.cat((torch.ones_like(ratios[:1]), (total - total.cummax(0).values.clamp(min=0)).exp()))
    after = (shares[1:-1, None] * p[1:-1] - q[1:]).clamp(min=0).sum(-1)
    chances = after / (after + 1 - shares[1:-1])
    chances = torch.cat((chances, chances.new_full((1,), float("nan"))))
    return torch.where(chances.isnan(), shares[1:], chances), shares  # NaN: nothing follows, or p and q agree


def residual(p_logits: Tensor, q_logits: Tensor, share: Tensor | float = 1.0) -> Tensor:
    """Logits (1, V) of max(share p - q, 0), which the token in place of a rejected draft is drawn from."""
    p = p_logits.softmax(-1)
    rest = (share * p - q_logits.softmax(-1)).clamp(min=0)
    # Where p and q agree to the last bit nothing is left to draw from; p itself is then the right distribution.
    return torch.where(rest.sum() > 0, rest, p).log()


def likeliest(logits: Tensor, slices: int | None = None) -> Tensor:
    """Logits (B, N, V) -> every node's first largest id (B, N), as argmax finds it in fp32; max is four times as fast
    in bf16 on a CPU, and on a GPU so are `slices` of a row, which more of its processors read."""
    if slices is None:
        slices = SLICES if logits.is_cuda and logits.shape[-1] % SLICES == 0 else 1
    found = logits.unflatten(-1, (slices, -1)).max(-1)
    if slices == 1:
        return found.indices[..., 0]
    which = found.values.max(-1, keepdim=True).indices
    return (which * (logits.shape[-1] // slices) + found.indices.gather(-1, which))[..., 0]


def are_spoiled(logits: Tensor) -> Tensor:
    """Logits (B, N, V) -> the nodes (B, N) whose logits decide nothing, because drafts may have made them NaN.

    Where a draft's keys or values are not finite, nodes that do not see it become NaN, too: they weigh it 0, and 0
    times NaN is NaN. A state that is NaN makes every logit NaN, so a few of them tell; more than one, since models may
    mask ids of their own.
    """
    return logits[..., :8].isnan().any(-1)


def are_distributions(scores: Tensor) -> Tensor:
    """Scores (..., V) -> whether a token can be drawn from each (...)."""
    return scores.amax(-1).isfinite()


def raise_no_distribution() -> None:
    """Has torch raise its error for scores that are no distribution; on the CPU, since on a GPU no later call of the
    process would work."""
    torch.multinomial(torch.tensor([float("nan")]), 1)
