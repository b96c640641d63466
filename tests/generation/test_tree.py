"""Draft trees without a text to decode: their topology, their expansion, and the drafter's side of them.

`golden_trees.safetensors`: of the original EAGLE 3 code, the trees of a round and of one that follows it (`..2`):
`tree_tokens` (1, N), `tree_mask` (1, 1, N, N), depths `tree_pos` (N,), captured `features2` (B, T, 3 * 96) and
`input_ids2` of the second round.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from close import TARGET_FORWARD, assert_close
from conftest import PRUNED_IDS, VOCAB, greedy_text
from observers import InterruptError, as_tree, raise_at, speculate
from proposers import build_proposer, propose, states_for
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TemperatureLogitsWarper

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.generation import draft_sampler, proposer
from eagle31_hf.generation.noise import Noise
from eagle31_hf.generation.planning.plan import UNLIMITED, Plan, Selection
from eagle31_hf.generation.proposer import Proposer
from eagle31_hf.generation.tree import DraftTokens, Expansion
from eagle31_hf.generation.unread_states import AuxStates

GOLDEN = Path(__file__).parents[1] / "fixtures" / "original-eagle3"
NAMES = [
    "eagle31",
    "eagle3",
    "norm_before_fc",
    "two_layers",
    "window_4",
    "pruned",
    "own_embedding",
    "mla",
    "padded_vocabulary",
]


def plan_of(depth: int, top_k: int, total: int) -> Plan:
    """Trees of so many levels, children a node, and nodes, the root included."""
    return Plan(depth, top_k, top_k, total)


def path_of(drafts: DraftTokens, node: int, b: int = 0) -> tuple[int, ...]:
    """Token ids from below the root to the node."""
    ids = []
    while node > 0:
        ids.append(int(drafts.ids[b, node - 1]))
        node = int(drafts.parents[b, node - 1])
    return tuple(reversed(ids))


def paths_of(drafts: DraftTokens, b: int = 0) -> set[tuple[int, ...]]:
    return {path_of(drafts, node, b) for node in range(drafts.num_nodes)}


def deepest(drafts: DraftTokens) -> int:
    """Levels of the deepest tree."""
    return max(drafts.on_host()[0].depths())


def assert_well_formed(drafts: DraftTokens) -> None:
    """Connected, each node after its parent and unlike its siblings; depths and ancestors are those the parents say."""
    drafts = as_tree(drafts)
    num_sequences, count = len(drafts.ids), drafts.num_nodes
    shapes = drafts.parents.shape, drafts.depths.shape, drafts.ancestors.shape
    assert shapes == (drafts.ids.shape, (num_sequences, count), (num_sequences, count, count))
    assert deepest(drafts) == int(drafts.depths.max()) <= drafts.depth
    for b in range(num_sequences):
        parents, depths, ancestors = [-1, *drafts.parents[b].tolist()], drafts.depths[b].tolist(), drafts.ancestors[b]
        assert depths[0] == 0
        for node, parent in enumerate(parents):
            expected = {node}
            if node:
                assert 0 <= parent < node, f"node {node} hangs on {parent}"
                expected |= set(ancestors[parent].nonzero().flatten().tolist())
                assert depths[node] == depths[parent] + 1
            assert set(ancestors[node].nonzero().flatten().tolist()) == expected
        assert len(paths_of(drafts, b)) == count, "two siblings hold the same token"


def assert_each_equals(drafts: DraftTokens, alone: list[DraftTokens], where: str = "", tolerance: float = 0.0) -> None:
    """Sequence by sequence the trees of batches of one; `tolerance`: of the log-probabilities."""
    drafts = as_tree(drafts)
    for b, expected in enumerate(map(as_tree, alone)):
        for name in ("ids", "parents", "depths", "ancestors", "log_probs"):
            ours, theirs = getattr(drafts, name), getattr(expected, name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                allowed = tolerance if name == "log_probs" else 0.0
                assert_close(f"{name} of sequence {b}{where}", ours[b : b + 1], theirs, allowed)


# --- topology ---


@pytest.mark.parametrize("count", [1, 2, 3, 9, 33])
@pytest.mark.parametrize("shape", ["random", "chain", "star"])
def test_trees_are_what_their_parents_say(count, shape):
    parents = {
        "random": random_parents(count, count),
        "chain": torch.arange(count - 1)[None],
        "star": torch.zeros(1, count - 1, dtype=torch.long),
    }[shape]
    tree = DraftTokens.tree(torch.arange(101, 100 + count)[None], parents, depth=max(1, count - 1))
    assert_well_formed(tree)
    assert tree.num_nodes == count
    assert deepest(tree) == max(len(path_of(tree, node)) for node in range(count))
    for node, children in enumerate(tree.on_host()[0].children[0]):
        assert children == {100 + child: child for child, parent in enumerate(parents[0].tolist(), 1) if parent == node}
    assert_each_equals(tree.to(torch.device("cpu")), [tree])


def random_parents(count: int, seed: int) -> Tensor:
    """Of `count` nodes, those of all but the root (1, count - 1)."""
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(node, (1,), generator=generator)) for node in range(1, count)]
    return torch.tensor([parents], dtype=torch.long)


def test_sequences_have_trees_of_their_own():
    """A deep one beside a flat one too."""
    ids = torch.arange(100, 136).reshape(4, 9)
    flat = torch.zeros(1, 9, dtype=torch.long)
    parents = torch.cat((random_parents(10, 1), random_parents(10, 2), torch.arange(9)[None], flat))
    log_probs = -torch.rand(4, 9, generator=torch.Generator().manual_seed(3))
    tree = DraftTokens.tree(ids, parents, 9, log_probs)
    alone = [DraftTokens.tree(ids[b : b + 1], parents[b : b + 1], 9, log_probs[b : b + 1]) for b in range(4)]
    assert_well_formed(tree)
    assert_each_equals(tree, alone)
    host = tree.on_host()[0]
    assert [host.children[b] for b in range(4)] == [one.on_host()[0].children[0] for one in alone]
    assert deepest(tree) == 9


@pytest.mark.parametrize("depth", range(1, 12))
def test_the_deepest_node_knows_all_its_ancestors(depth):
    """Steps are doubled: no depth between two powers may lose any."""
    tree = DraftTokens.tree(torch.arange(depth)[None], torch.arange(depth)[None], depth)
    assert tree.ancestors.equal(torch.ones(1, depth + 1, depth + 1).tril().bool())
    assert tree.depths.tolist() == [list(range(depth + 1))]


def test_all_of_it_moves_to_another_device():
    tree = DraftTokens.tree(torch.tensor([[7, 8]]), torch.tensor([[0, 1]]), 2, torch.tensor([[-0.5, -1.0]]))
    moved = tree.to(torch.device("meta"))
    for name in ("ids", "parents", "depths", "ancestors", "log_probs"):
        assert getattr(moved, name).device.type == "meta", name
    nothing = DraftTokens(tree.ids[:, :0], 0, guess=torch.tensor([[4]]), guess_log_probs=torch.tensor([[-0.1]]))
    moved = nothing.to(torch.device("meta"))
    assert (moved.guess.device.type, moved.guess_log_probs.device.type) == ("meta", "meta")


# --- expansion, without a model ---


def expand(log_probs_of, depth: int, top_k: int, width: int) -> tuple[Expansion, list[list[tuple[int, ...]]]]:
    """`log_probs_of(path)` -> log-probabilities (V,). The candidates, and the frontier's paths by level."""
    expansion, frontier = Expansion(torch.tensor([[3]])), [()]
    frontiers: list[list[tuple[int, ...]]] = [frontier]
    for _ in range(depth):
        best = torch.stack([log_probs_of(path) for path in frontier]).topk(top_k)
        expansion.extend(best.indices[None], best.values[None])
        ids, from_node = expansion.advance(width)
        parents = [0] if from_node is None else from_node[0].tolist()
        frontier = [(*frontier[parent], token) for parent, token in zip(parents, ids[0].tolist(), strict=True)]
        frontiers.append(frontier)
    return expansion, frontiers


def random_log_probs(path: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    return torch.randn(VOCAB, generator=generator).log_softmax(-1)


# depth, top_k, total
SHAPES = [(1, 1, 5), (1, 4, 60), (2, 3, 5), (4, 3, 10), (5, 2, 7), (3, 11, 60), (6, 4, 2), (4, 4, 1000), (5, 1, 4)]


@pytest.mark.parametrize(("depth", "top_k", "total"), SHAPES)
def test_expansion_and_reranking(depth, top_k, total):
    """The best of each level go on; of everything scored the best are kept."""
    expansion, _ = expand(random_log_probs, depth, top_k, top_k)
    tree = as_tree(expansion.best(total - 1))
    assert_well_formed(tree)
    frontier, scored = {(): 0.0}, dict[tuple[int, ...], float]()
    for _ in range(depth):
        level = {}
        for path, score in frontier.items():
            values, ids = random_log_probs(path).topk(top_k)
            level |= {(*path, int(token)): score + float(value) for token, value in zip(ids, values, strict=True)}
        scored |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:top_k])
    kept = sorted(scored, key=lambda path: -scored[path])[: total - 1]
    assert paths_of(tree) == {(), *kept}
    for node in range(1, tree.num_nodes):
        *parents, token = path_of(tree, node)
        expected = random_log_probs(tuple(parents))[token]
        assert_close("log-probability given the parent", tree.log_probs[0, node - 1], expected)


@pytest.mark.parametrize("total", [2, 6, 11, 40])
@pytest.mark.parametrize("ties", [False, True], ids=["random", "ties"])
def test_sequences_are_expanded_and_reranked_alone(total, ties):
    """The best of two batched expansions of different scores are those of each."""
    generator = torch.Generator().manual_seed(total)
    both, alone = Expansion(torch.tensor([[3], [5]])), [Expansion(torch.tensor([[root]])) for root in (3, 5)]
    width = 1
    for next_width in (3, 4, 2, 5):
        log_probs = torch.rand(2, width, 4, generator=generator).log()
        log_probs = torch.round(log_probs) if ties else log_probs
        ids = torch.randint(500, (2, width, 4), generator=generator)
        both.extend(ids, log_probs)
        for b, one in enumerate(alone):
            one.extend(ids[b : b + 1], log_probs[b : b + 1])
        each = [one.advance(next_width) for one in alone]
        for name, got, expected in zip(
            ("frontier", "its parents"), both.advance(next_width), zip(*each, strict=True), strict=True
        ):
            assert_close(name, got, torch.cat(expected))
        width = next_width
    assert_each_equals(both.best(total - 1), [one.best(total - 1) for one in alone])


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_a_tree_whose_depth_is_known_is_the_same(count):
    """A planner that has ranked the candidates says how deep the best lie, and whether they are a chain."""
    expansion, _ = expand(random_log_probs, depth=5, top_k=3, width=2)
    tree = expansion.best(count)
    assert_each_equals(expansion.best(count, deepest(tree)), [tree])
    certain, _ = expand(TIES["certain"], depth=5, top_k=3, width=2)
    chain = certain.best(5, 5, is_chain=True)
    assert chain.is_chain
    assert_each_equals(chain, [certain.best(5)])


def test_scores_of_ones_own_choose_and_log_probabilities_stay():
    """A child's chance to be accepted is not the probability the drafter gives it."""
    expansion = Expansion(torch.tensor([[3]]))
    scores = torch.tensor([[[-3.0, -0.5]]])
    expansion.extend(torch.tensor([[[7, 8]]]), torch.tensor([[[-0.1, -2.0]]]), scores)
    assert expansion.advance(2)[0].tolist() == [[8, 7]]
    tree = expansion.best(1)
    assert tree.ids.tolist() == [[8]]
    assert_close("log-probabilities", tree.log_probs, torch.tensor([[-2.0]]))


TIES = {
    "certain": lambda path: torch.full((VOCAB,), -torch.inf).index_fill(0, torch.tensor([len(path)]), 0.0),
    "uniform": lambda path: torch.zeros(VOCAB),
    "two_values": lambda path: torch.where(torch.arange(VOCAB) % 2 == 0, 0.0, -1.0),
    "all_but_impossible": lambda path: torch.full((VOCAB,), -1e30),
}


@pytest.mark.parametrize("total", [2, 3, 6, 11, 24])
@pytest.mark.parametrize("log_probs_of", TIES.values(), ids=TIES)
def test_ties_leave_the_tree_connected(log_probs_of, total):
    """A child that loses nothing to its parent must not be kept without it."""
    expansion, _ = expand(log_probs_of, depth=5, top_k=3, width=3)
    assert_well_formed(expansion.best(total - 1))


# --- golden ---


@torch.no_grad()
def test_the_trees_are_the_original_codes(monkeypatch):
    """Which scores them at temperature 1."""
    monkeypatch.setattr(draft_sampler, "SCORE_TEMPERATURE", 1.0)
    golden = load_file(GOLDEN / "golden.safetensors") | load_file(GOLDEN / "golden_trees.safetensors")
    drafter = Eagle31DrafterModel.from_pretrained(GOLDEN).eval()
    drafter.set_input_embeddings(nn.Embedding.from_pretrained(golden["embed"]))
    ours, position = build_proposer(drafter, vocab_size=500), 0
    for suffix, features in (("", golden["features"]), ("2", golden["features2"])):
        text = golden[f"input_ids{suffix}"]
        num_new = features.shape[1]
        tree = ours.propose(AuxStates(features, text[:, -num_new:], [num_new]), [text], plan_of(8, 10, 60))
        position += num_new
        assert_close(f"tokens{suffix}", torch.cat((text[:, -1:], tree.ids), dim=1), golden[f"tree_tokens{suffix}"])
        assert_close(f"ancestors{suffix}", tree.ancestors[None], golden[f"tree_mask{suffix}"])
        assert_close(f"depths{suffix}", tree.depths[0], golden[f"tree_pos{suffix}"])
        assert_well_formed(tree)
        assert ours.runner.past_key_values.get_seq_length() == position, (
            "tokens that are not the target's stayed in the cache"
        )


# --- the drafter's side ---


class Kept(Expansion):
    """Remembers the last expansion."""

    last: Expansion

    def best(self, *args, **kwargs) -> DraftTokens:
        Kept.last = self
        return super().best(*args, **kwargs)


class Oracle:
    """Log-probabilities after every path, by target id: the path run as a chain of single tokens, with a cache of its
    own."""

    def __init__(self, drafter, tokens: Tensor, states: Tensor, temperature: float):
        self.drafter, self.tokens, self.states, self.temperature = drafter, tokens, states, temperature
        self.known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, path: tuple[int, ...]) -> Tensor:
        if path not in self.known:
            self.known[path] = self.run(path)
        return self.known[path]

    def run(self, path: tuple[int, ...]) -> Tensor:
        num_read = self.states.shape[1]
        read = torch.arange(num_read)[None]
        out = self.drafter(self.tokens[:, 1:], target_hidden_states=self.states, position_ids=read, use_cache=True)
        for i, token in enumerate(path):
            out = self.drafter(
                torch.tensor([[token]]),
                hidden_states=out.last_hidden_state[:, -1:],
                position_ids=torch.tensor([[num_read + i]]),
                past_key_values=out.past_key_values,
            )
        logits = out.logits[0, -1] / self.temperature
        ids = torch.arange(len(logits)) if self.drafter.d2t is None else self.drafter.draft_to_target_ids()
        # Padding of its vocabulary is no tokens, so the others share their probability.
        return torch.full((VOCAB + 5,), -torch.inf).index_put((ids,), logits)[:VOCAB].log_softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize(("name", "attention"), [*((name, "sdpa") for name in NAMES), ("window_4", "eager")])
def test_every_node_is_scored_as_its_path_run_as_a_chain(target, make_drafter, monkeypatch, name, attention):
    monkeypatch.setattr(proposer, "Expansion", Kept)
    monkeypatch.setattr(draft_sampler, "SCORE_TEMPERATURE", 0.7)
    drafter = make_drafter(target, name, attention)
    text, num_read = greedy_text(target)[:, :10], 9
    states = states_for(target, drafter, text)
    oracle, ours = Oracle(drafter, text, states[:, :num_read], 0.7), build_proposer(drafter)
    propose(ours, text, states, 0, 5, plan_of(3, 3, 9))  # an earlier round, whose own tokens must be gone
    drafts = propose(ours, text, states, 5, num_read, plan_of(6, 3, 30))  # deeper than the window of four
    assert ours.runner.past_key_values.get_seq_length() == num_read

    scored = Expansion.best(Kept.last, UNLIMITED)
    paths = [path_of(scored, node) for node in range(1, scored.num_nodes)]
    expected = [sum(float(oracle(path[:i])[token]) for i, token in enumerate(path)) for path in paths]
    assert_close("scores", torch.cat(Kept.last.scores, dim=1)[0], torch.tensor(expected), TARGET_FORWARD)

    _, frontiers = expand(oracle, 6, 3, 3)
    shown = {path_of(scored, int(parent)) for parent in scored.parents[0]}
    assert shown == {path for frontier in frontiers[:-1] for path in frontier}, (
        "other nodes went on than the best of each level"
    )
    assert_well_formed(drafts)
    assert paths_of(drafts) <= paths_of(scored)
    assert drafts.num_nodes == 30
    assert deepest(drafts) > 4, "no path left the window of four"


@torch.no_grad()
@pytest.mark.parametrize(("depth", "top_k", "total"), [(1, 11, 60), (3, 11, 60), (4, 16, 30), (2, 2, 2)])
@pytest.mark.parametrize("name", ["eagle31", "pruned", "padded_vocabulary"])
def test_drafts_only_what_the_target_has(target, make_drafter, name, depth, top_k, total):
    drafter, text = make_drafter(target, name), greedy_text(target)[:, :10]
    states = states_for(target, drafter, text)
    tree = propose(build_proposer(drafter), text, states, 0, 9, plan_of(depth, top_k, total))
    assert_well_formed(tree)
    assert set(tree.ids[0].tolist()) <= set(PRUNED_IDS if name == "pruned" else range(VOCAB))
    usable = min(top_k, len(PRUNED_IDS) if name == "pruned" else VOCAB)
    widths = [1, *(min(top_k, usable**level) for level in range(1, depth))]
    assert tree.num_nodes == min(total, 1 + usable * sum(widths))
    assert deepest(tree) <= depth


class WidthOne:
    """A controller that goes on with the best node of every level, and has all candidates verified."""

    def calibration(self, log_probs: Tensor, level: int) -> Tensor:
        return log_probs

    def width(self, scores: Tensor, level: int) -> int:
        return 1

    def select(self, limit: int) -> Selection:
        return Selection(limit)


def with_noise(drafter, temperature: float) -> Proposer:
    """A proposer that guesses with noise, the same for every one."""
    torch.manual_seed(0)
    noise = Noise(1, VOCAB, torch.device("cpu"), is_coupled=True, first_slot=10)
    return build_proposer(drafter, [TemperatureLogitsWarper(temperature)], noise)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [None, 8.0], ids=["greedy", "by_noise"])
@pytest.mark.parametrize("name", ["eagle31", "pruned", "window_4", "padded_vocabulary"])
def test_a_tree_of_width_one_is_the_chain(target, make_drafter, name, temperature):
    """The likeliest tokens, compared with others, are those that a chain takes without comparing them."""
    drafter, text = make_drafter(target, name), greedy_text(target)[:, :10]
    states = states_for(target, drafter, text)

    def drafted(plan: Plan) -> DraftTokens:
        ours = build_proposer(drafter) if temperature is None else with_noise(drafter, temperature)
        return propose(ours, text, states, 0, 9, plan)

    chain = drafted(Plan(5))
    for plan in (plan_of(5, 1, 60), Plan(5, 1, 1, 60, WidthOne())):
        tree = drafted(plan)
        assert_close("drafts", tree.ids, chain.ids)
        assert tree.is_chain, "a chain is verified as a sequence"
        assert (tree.depth, tree.num_nodes) == (5, 6)
        assert tree.on_host()[0].children[0] == chain.on_host()[0].children[0]
        assert (tree.log_probs is not None) == plan.is_scored


@torch.no_grad()
@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize(("plan", "chooses"), [(Plan(5), "draw"), (plan_of(5, 3, 20), "scored")])
def test_the_cache_is_clean_when_drafting_fails(target, drafter, monkeypatch, plan, chooses, call):
    text, ours = greedy_text(target)[:, :10], build_proposer(drafter)
    monkeypatch.setattr(ours.sampler, chooses, raise_at(call, getattr(ours.sampler, chooses)))
    with pytest.raises(InterruptError):
        propose(ours, text, states_for(target, drafter, text), 0, 9, plan)
    assert ours.runner.past_key_values.get_seq_length() == 9


def test_a_tree_is_as_deep_as_asked(target, drafter, prompt):
    """Not only by its word: rounds accept more than a tree one shallower could."""
    for depth in (1, 2, 4):
        shape = {"num_assistant_tokens": depth, "draft_tree_top_k": 3, "draft_tree_total_tokens": 24}
        _, stats = speculate(target, drafter, prompt, max_new_tokens=24, do_sample=False, **shape)
        assert max(stats.accepted_per_round) == depth == len(stats.drafted_per_position)
        assert all(a >= b for a, b in pairwise(stats.accepted_per_position))
