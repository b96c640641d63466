"""Drafting: the drafter reads the target's newly accepted states, then proposes a chain or tree of tokens.

B sequences, F nodes of a level, k children of a node, h drafter width.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .draft_sampler import DraftSampler
from .drafter_runner import DrafterRunner
from .planning.plan import Plan, Selection
from .tree import DraftTokens, Expansion, pick
from .unread_states import AuxStates


class Proposer:
    """Drafts for B sequences. A draft is a function of the committed text, and of noise that the target draws with,
    alone, so taking the target's own tokens is exact."""

    def __init__(self, runner: DrafterRunner, sampler: DraftSampler):
        self.runner = runner
        self.sampler = sampler

    def propose(self, unread: AuxStates, prefixes: list[Tensor], plan: Plan) -> DraftTokens:
        """Reads the states, then drafts as planned after every sequence (1, L_b), `plan.depth` levels at most.

        Of every level the likeliest children of the likeliest nodes are candidates; the best of all are drafted.
        """
        device = self.runner.like.device
        roots = [prefix[:, -1:].to(device) for prefix in prefixes]
        level = Level(roots[0] if len(roots) == 1 else torch.cat(roots), prefixes, plan)
        try:
            level.state, level.logits = self.runner.read(unread, plan.depth)
            while self._expand(level):
                pass
        finally:
            self.runner.settle()
        return level.drafted()

    def _expand(self, level: "Level") -> bool:
        """Adds the children of the frontier's nodes, and runs the best of them where the plan goes on from there."""
        expansion = level.expansion
        width = self._score(level) if level.plan.is_scored else self._draw(level)
        if width == 0 or expansion.levels == level.plan.depth:
            return False
        ids, from_node = expansion.advance(width)
        if self.sampler.reads_text:
            level.path_ids = torch.cat((pick(level.path_ids, from_node), ids[..., None]), dim=2)
        level.state, level.logits = self.runner.step(ids, pick(level.state, from_node), expansion)
        return True

    def _score(self, level: "Level") -> int:
        """Adds the likeliest children of every node. Returns how many of them the next level starts from."""
        plan, expansion = level.plan, level.expansion
        depth = expansion.levels
        noise = self.sampler.noise_after(level.prefixes, depth)
        log_probs, ids = self.sampler.scored(level.logits, plan.top_k, noise, level.prefixes, level.path_ids)
        if plan.controller is None:
            expansion.extend(ids, log_probs)
            return plan.max_width
        expansion.extend(ids, log_probs, plan.controller.calibration(log_probs, depth))
        return plan.controller.width(expansion.scores[-1], depth)

    def _draw(self, level: "Level") -> int:
        """Adds one child, as the target would choose it. Returns 0 where the drafter does not trust it, else 1."""
        noise = self.sampler.noise_after(level.prefixes, level.expansion.levels)
        ids, logits, is_trusted = self.sampler.draw(level.logits[:, -1], noise, level.prefixes, level.path_ids)
        if ids is None:
            return 0
        level.expansion.extend(ids[..., None])
        if self.sampler.noise is not None and not self.sampler.noise.is_coupled:
            level.drawn_from.append(logits)
        return int(is_trusted)


class Level:
    """An expansion under way: the candidates so far, and the states and logits of the level that was run last."""

    def __init__(self, root: Tensor, prefixes: list[Tensor], plan: Plan):
        self.plan = plan
        self.prefixes = prefixes
        self.expansion = Expansion(root)
        self.path_ids = root[:, None, :0]  # drafted up to every node (B, F, level), where processors read the text
        self.drawn_from = list[Tensor]()
        self.state = root  # until the drafter has read: then (B, F, h)
        self.logits = root  # then (B, F, Vd)

    def drafted(self) -> DraftTokens:
        """The best candidates, as many as the plan wants."""
        if not self.expansion.levels:  # the processors leave nothing to propose
            return DraftTokens.none(self.expansion.root)
        selection = Selection(self.plan.max_nodes - 1)
        if self.plan.controller is not None:
            selection = self.plan.controller.select(selection.count)
        drafts = self.expansion.best(selection.count, selection.depth, selection.is_chain)
        if self.drawn_from:
            return replace(drafts, logits=torch.stack(self.drawn_from, dim=1))
        if selection.count == 0:
            guess, log_prob = self.expansion.ids[0][:, :1], self.expansion.log_probs[0][:, :1]
            return replace(drafts, guess=guess, guess_log_probs=log_prob)
        return drafts
