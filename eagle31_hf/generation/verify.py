"""Which drafted tokens the target accepts. p is the target's distribution, q the draft's. B rows (texts of the batch),
K drafted tokens of a row, R nodes of a row in the verifying forward (the root, which is the text's last token, and the
drafts), V target vocabulary.

Positions are visited in order, while drafts are accepted and the text has not ended, so the logits processors see
exactly the prefixes, each once, that plain decoding would show them: processors that keep state of their own stay
correct. Criteria and streamer are told of a token before the processors are shown the next prefix, so those that know
of each other stay correct too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from . import processors
from .drafting import Proposal
from .randomness import Draws
from .texts import Texts

# Whether a row ends with the last of its new tokens, whose scores (1, V) are given too where they are kept; asked once
# for each of them.
Ends = Callable[[int, list[int], list[Tensor]], bool]


@dataclass
class Verdict:
    """For every row: `tokens`, the accepted drafts, then the target's own token unless a draft ended the text; `paths`,
    the nodes of the root and the accepted drafts; `scores`, the processed logits (1, V) of each token, where they are
    kept. All are empty for a row that had finished. Where a draft ended the text, or the path met logits that drafts
    may have spoiled, tokens are one fewer than the path's nodes.
    """

    tokens: list[list[int]]
    paths: list[list[int]]
    scores: list[list[Tensor]]

    def is_short(self, finished: list[bool]) -> bool:
        """Whether a row that has not `finished` met spoiled logits where its next token was to be chosen."""
        rows = zip(self.tokens, self.paths, finished, strict=True)
        return any(len(tokens) < len(path) and not has_finished for tokens, path, has_finished in rows)

    def cut(self, counts: list[int]) -> "Verdict":
        """The verdict with only the first `counts[b]` tokens of each row b."""
        kept = zip(self.tokens, self.paths, self.scores, counts, strict=True)
        cut = [(tokens[:n], path[:n], scores[:n]) for tokens, path, scores, n in kept]
        return Verdict(*(list(part) for part in zip(*cut, strict=True)))


@dataclass
class Judge:
    """Chooses the target's tokens: by argmax where `draws` is None, else by sampling. A token of `eos_token_ids` ends a
    row.

    Rejection sampling (arXiv 2211.17192) where drafts come with the logits they were drawn from; else the target's own
    token is drawn at every node, and while it is a child of the node, the walk descends. Either way tokens are
    distributed as the target's own.
    """

    processors: LogitsProcessorList
    draws: Draws | None
    eos_token_ids: set[int]
    keeps_scores: bool = False

    @property
    def only_compares(self) -> bool:
        """Whether it only compares logits, so that they may be of any dtype and are not written to."""
        return self.draws is None and not self.processors and not self.keeps_scores

    def row_by_row(self, texts: Texts, proposal: Proposal, logits: Tensor, ends: Ends | None = None) -> Verdict:
        """Target logits (B, R, V) -> for every row what it accepts, whatever the others do, up to the token with which
        it ends (by default one of `eos_token_ids`). Logits are fp32 and overwritten, unless `only_compares`."""
        facts = [are_spoiled(logits, proposal).long()]
        if self.draws is None and not self.processors:
            facts.append(likeliest(logits))  # all nodes at once
        spoiled, *chosen = torch.stack(facts).tolist()
        children = proposal.children()
        each = processors.by_row(self.processors, texts.num_rows)
        rows = [
            (
                ([], [], [])
                if texts.finished[b]
                else self._walk(
                    b,
                    texts,
                    proposal,
                    children[b],
                    logits[b],
                    each[b],
                    spoiled[b],
                    chosen[0][b] if chosen else None,
                    ends,
                )
            )
            for b in range(texts.num_rows)
        ]
        return Verdict(*(list(part) for part in zip(*rows, strict=True)))

    def _walk(
        self,
        b: int,
        texts: Texts,
        proposal: Proposal,
        children: list[dict[int, int]],
        logits: Tensor,
        row_processors: LogitsProcessorList,
        spoiled: list[int],
        chosen: list[int] | None,
        ends: Ends | None,
    ) -> tuple[list[int], list[int], list[Tensor]]:
        prefix, tokens = texts.row(b), list[int]()
        path, scores = [0], list[Tensor]()
        while True:
            node = path[-1]
            if spoiled[node]:  # before processors see it: they are shown every prefix once
                return tokens, path, scores
            if chosen is not None:
                row_scores = logits[node : node + 1]
                token = chosen[node]
            else:
                context = torch.cat((prefix, prefix.new_tensor([tokens], dtype=prefix.dtype)), dim=1)
                row_scores = row_processors(context, logits[node : node + 1])  # type: ignore[arg-type]
                if not self._can_choose(row_scores):
                    raise_no_distribution()
                draft = (
                    None
                    if proposal.logits is None or node >= proposal.ids.shape[1]
                    else proposal.ids[b, node : node + 1]
                )
                token = int(
                    self._choose(
                        b, context.shape[1], row_scores, draft, None if draft is None else proposal.logits[b, node]
                    )
                )
            tokens.append(token)
            if self.keeps_scores:
                scores.append(row_scores)
            is_draft = token in children[node]
            if is_draft:
                path.append(children[node][token])
            # Asked before the next prefix is shown to a processor: plain decoding shows none that goes past the end.
            has_ended = token in self.eos_token_ids if ends is None else ends(b, tokens, scores)
            if has_ended or not is_draft:
                return tokens, path, scores

    def together(
        self, texts: Texts, proposal: Proposal, logits: Tensor, ended: Callable[[Tensor, list[Tensor]], list[bool]]
    ) -> tuple[Verdict, list[bool]]:
        """As many tokens as all rows accept, up to the first with which a row ends: processors and criteria see the
        whole batch at one length, as in plain decoding. Also returns which rows have ended, by `ended` of the texts (B,
        L) and the new scores, (B, V) a token.

        Only for chains. With `eos_token_ids`, a row that has ended is padded and does not hold back the others.
        """
        rows = range(texts.num_rows)
        drafted = proposal.ids
        tokens = list[Tensor]()
        scores = list[Tensor]()
        spoiled = are_spoiled(logits, proposal).any(0).tolist()
        finished = texts.finished
        is_short = False
        going = torch.tensor(
            [not (finished and self.eos_token_ids) for finished in texts.finished], device=logits.device
        )
        for node in range(proposal.num_rows):
            context = torch.cat((texts.rows(), *tokens), dim=1)
            if is_short := bool(spoiled[node]):
                break
            scores.append(self.processors(context, logits[:, node]))  # type: ignore[arg-type]
            if not self._can_choose(scores[-1]):
                raise_no_distribution()
            if self.draws is None:
                token = scores[-1].argmax(-1)
            else:
                picked = [self._choose(b, context.shape[1], scores[-1][b : b + 1], None, None) for b in rows]
                token = torch.cat(picked)
            tokens.append(torch.where(going, token, texts.pad_token_id)[:, None])
            agrees = node < drafted.shape[1] and bool((token == drafted[:, node])[going].all())
            finished = ended(torch.cat((context, tokens[-1]), dim=1), scores)
            if not agrees or finished != texts.finished:
                break
        ids = torch.cat((drafted[:, :0], *tokens), dim=1).tolist()
        paths, each_scores = (
            [list(range(len(tokens) + is_short)) for _ in rows],
            [[row[b : b + 1] for row in scores] for b in rows],
        )
        return Verdict(ids, paths, each_scores), finished

    def _can_choose(self, scores: Tensor) -> bool:
        """Whether a token can be chosen from scores (B, V): always by argmax; where it is drawn, if they are
        distributions."""
        return self.draws is None or bool(scores.amax(-1).isfinite().all())

    def _choose(self, b: int, slot: int, p_logits: Tensor, candidate: Tensor | None, q_logits: Tensor | None) -> Tensor:
        """One token (1,): the argmax of p (1, V), or a sample of it: the candidate, a draft drawn from q, with
        probability min(1, p/q), else a token drawn from the residual max(p - q, 0). `slot`: the length of the text
        before the token."""
        if self.draws is None:
            return p_logits.argmax(-1)
        if candidate is None or q_logits is None:
            return self.draws.pick(b, slot, p_logits)
        p = p_logits.softmax(-1)
        q = q_logits.softmax(-1)
        x = candidate[None]
        if self.draws.uniform(b) * q[None].gather(1, x) < p.gather(1, x):
            return candidate
        residual = (p - q).clamp(min=0)
        # Where p and q agree to the last bit nothing is left to draw from; p itself is then the right distribution.
        return self.draws.pick(b, slot, (residual if residual.sum() > 0 else p).log())


def likeliest(logits: Tensor) -> Tensor:
    """Logits (B, R, V) -> every node's first largest id (B, R), as argmax finds it in fp32; max is four times as fast
    in bf16."""
    return logits.max(-1).indices


def are_spoiled(logits: Tensor, proposal: Proposal) -> Tensor:
    """Logits (B, R, V) -> the nodes (B, R) whose logits decide nothing, because drafts may have made them NaN.

    Where a draft's keys or values are not finite, nodes that do not see it become NaN too: they weigh it 0, and 0 times
    NaN is NaN. A state that is NaN makes every logit NaN, so a few of them tell; more than one, since models may mask
    ids of their own.
    """
    return logits[..., :8].isnan().any(-1) & (not proposal.is_plain)


def raise_no_distribution() -> None:
    """Has torch raise its error for scores that are no distribution; on the CPU, since on a GPU no later call of the
    process would work."""
    torch.multinomial(torch.tensor([float("nan")]), 1)
