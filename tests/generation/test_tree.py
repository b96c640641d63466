"""Draft trees without a text to decode: their topology, their expansion, the masks that verify them, the cache they
leave behind.

`golden_trees.safetensors`: of the original EAGLE 3 code, the trees of a round and of one that follows it (`..2`):
`tree_tokens` (1, N), `tree_mask` (1, 1, N, N), depths `tree_pos` (N,), captured `features2` (B, T, 3 * 96) and
`input_ids2` of the second round.
"""

from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from close import TARGET_FORWARD, assert_close
from conftest import PRUNED_IDS, TARGETS, VOCAB, build_drafter, build_target, greedy_text
from observers import InterruptError, raise_at, speculate, tree_of
from other_targets import OTHER_TARGETS, build_other
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LogitsProcessorList, MistralConfig

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.features import decoder_layers, target_states
from eagle31_hf.generation import drafting, selftest
from eagle31_hf.generation.cache import keep_paths, slots
from eagle31_hf.generation.drafting import DraftSession, Fixed, Proposal, Reading
from eagle31_hf.generation.target import slot_masks
from eagle31_hf.generation.tree import Candidates, DraftTree

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


def path_of(tree: DraftTree, node: int, row: int = 0) -> tuple[int, ...]:
    """Token ids from below the root to the node."""
    ids = []
    while tree.parents[row, node] >= 0:
        ids.append(int(tree.ids[row, node]))
        node = int(tree.parents[row, node])
    return tuple(reversed(ids))


def paths_of(tree: DraftTree, row: int = 0) -> set[tuple[int, ...]]:
    return {path_of(tree, node, row) for node in range(tree.ids.shape[1])}


def assert_well_formed(tree: DraftTree) -> None:
    """Connected, each node after its parent and unlike its siblings; depths and ancestors are those the parents say."""
    rows, count = tree.ids.shape
    assert (tree.parents.shape, tree.depths.shape, tree.ancestors.shape) == (
        (rows, count),
        (rows, count),
        (rows, count, count),
    )
    for row in range(rows):
        parents, depths, ancestors = tree.parents[row].tolist(), tree.depths[row].tolist(), tree.ancestors[row]
        assert (parents[0], depths[0]) == (-1, 0)
        for node, parent in enumerate(parents):
            expected = {node}
            if node:
                assert 0 <= parent < node, f"node {node} hangs on {parent}"
                expected |= set(ancestors[parent].nonzero().flatten().tolist())
                assert depths[node] == depths[parent] + 1
            assert set(ancestors[node].nonzero().flatten().tolist()) == expected
        assert len(paths_of(tree, row)) == count, "two siblings hold the same token"


def assert_rows_equal(tree: DraftTree, alone: list[DraftTree]) -> None:
    """Row by row the trees of batches of one."""
    for field in fields(DraftTree):
        for row, expected in enumerate(alone):
            assert_close(
                f"{field.name} of row {row}", getattr(tree, field.name)[row : row + 1], getattr(expected, field.name)
            )


# --- topology ---


@pytest.mark.parametrize("count", [1, 2, 3, 9, 33])
@pytest.mark.parametrize("shape", ["random", "chain", "star"])
def test_from_parents(count, shape):
    generator = torch.Generator().manual_seed(count)
    parents = {
        "random": [-1] + [int(torch.randint(node, (1,), generator=generator)) for node in range(1, count)],
        "chain": list(range(-1, count - 1)),
        "star": [-1] + [0] * (count - 1),
    }[shape]
    tree = DraftTree.from_parents(
        torch.arange(100, 100 + count)[None], torch.tensor([parents]), max_depth=max(1, count - 1)
    )
    assert_well_formed(tree)
    assert tree.depth == max(len(path_of(tree, node)) for node in range(count))
    for node, children in enumerate(tree.children()[0]):
        assert children == {100 + child: child for child, parent in enumerate(parents) if parent == node}
    assert_rows_equal(tree.to(torch.device("cpu")), [tree])


def random_parents(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([[-1] + [int(torch.randint(node, (1,), generator=generator)) for node in range(1, count)]])


def test_rows_are_trees_of_their_own():
    """A deep one beside a flat one too."""
    ids = torch.arange(100, 140).reshape(4, 10)
    parents = torch.cat(
        (random_parents(10, 1), random_parents(10, 2), torch.arange(-1, 9)[None], torch.tensor([[-1] + [0] * 9]))
    )
    log_probs = -torch.rand(4, 10, generator=torch.Generator().manual_seed(3))
    tree = DraftTree.from_parents(ids, parents, 9, log_probs)
    alone = [DraftTree.from_parents(ids[b : b + 1], parents[b : b + 1], 9, log_probs[b : b + 1]) for b in range(4)]
    assert_well_formed(tree)
    assert_rows_equal(tree, alone)
    assert tree.children() == [one.children()[0] for one in alone]
    assert tree.depth == 9


@pytest.mark.parametrize("deepest", range(1, 12))
def test_the_deepest_node_knows_all_its_ancestors(deepest):
    """Steps are doubled: no depth between two powers may lose any."""
    tree = DraftTree.from_parents(torch.arange(deepest + 1)[None], torch.arange(-1, deepest)[None], max_depth=deepest)
    assert tree.ancestors.equal(torch.ones(1, deepest + 1, deepest + 1).tril().bool())
    assert tree.depths.tolist() == [list(range(deepest + 1))]


# --- expansion, without a model ---


def expand(log_probs_of, depth: int, top_k: int, width: int) -> tuple[Candidates, list[list[tuple[int, ...]]]]:
    """`log_probs_of(path)` -> log-probabilities (V,). The candidates, and the frontier's paths by level."""
    candidates, frontier = Candidates(torch.tensor([[3]])), [()]
    frontiers: list[list[tuple[int, ...]]] = [frontier]
    for _ in range(depth):
        best = torch.stack([log_probs_of(path) for path in frontier]).topk(top_k)
        rows = candidates.extend(best.values[None], best.indices[None], width)
        frontier = [
            (*frontier[row], int(token))
            for row, token in zip(rows[0].tolist(), candidates.frontier_ids[0].tolist(), strict=True)
        ]
        frontiers.append(frontier)
    return candidates, frontiers


def random_log_probs(path: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    return torch.randn(VOCAB, generator=generator).log_softmax(-1)


# depth, top_k, total
SHAPES = [(1, 1, 5), (1, 4, 60), (2, 3, 5), (4, 3, 10), (5, 2, 7), (3, 11, 60), (6, 4, 2), (4, 4, 1000)]


@pytest.mark.parametrize(("depth", "top_k", "total"), SHAPES)
def test_expansion_and_reranking(depth, top_k, total):
    """The best of each level go on; of everything scored the best are kept."""
    candidates, _ = expand(random_log_probs, depth, top_k, top_k)
    tree = candidates.best(total - 1)
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
    assert tree.ids[0, 0] == 3, "the root is the token committed last"
    for node in range(1, tree.ids.shape[1]):
        *parents, token = path_of(tree, node)
        assert_close(
            "log-probability given the parent", tree.log_probs[0, node], random_log_probs(tuple(parents))[token]
        )


@pytest.mark.parametrize("total", [2, 6, 11, 40])
@pytest.mark.parametrize("ties", [False, True], ids=["random", "ties"])
def test_rows_are_expanded_and_reranked_alone(total, ties):
    """The best of two batched expansions of different scores are those of each."""
    generator = torch.Generator().manual_seed(total)
    both, alone = (
        Candidates(torch.tensor([[3], [5]])),
        [Candidates(torch.tensor([[3]])), Candidates(torch.tensor([[5]]))],
    )
    width = 1
    for next_width in (3, 4, 2, 5):
        log_probs = torch.rand(2, width, 4, generator=generator).log()
        log_probs, ids = (
            torch.round(log_probs) if ties else log_probs,
            torch.randint(500, (2, width, 4), generator=generator),
        )
        rows = both.extend(log_probs, ids, next_width)
        expected = [one.extend(log_probs[b : b + 1], ids[b : b + 1], next_width) for b, one in enumerate(alone)]
        assert_close("parents' rows", rows, torch.cat(expected))
        for name in ("frontier", "frontier_ids", "frontier_scores"):
            assert_close(name, getattr(both, name), torch.cat([getattr(one, name) for one in alone]))
        width = next_width
    assert_rows_equal(both.best(total - 1), [one.best(total - 1) for one in alone])


def test_scores_of_ones_own_choose_and_log_probabilities_stay():
    """A child's chance to be accepted is not the probability the drafter gives it."""
    candidates = Candidates(torch.tensor([[3]]))
    candidates.extend(
        torch.tensor([[[-0.1, -2.0]]]), torch.tensor([[[7, 8]]]), 2, scores=torch.tensor([[[-3.0, -0.5]]])
    )
    assert candidates.frontier_ids.tolist() == [[8, 7]]
    tree = candidates.best(1)
    assert tree.ids.tolist() == [[3, 8]]
    assert_close("log-probabilities", tree.log_probs, torch.tensor([[0.0, -2.0]]))


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
    candidates, _ = expand(log_probs_of, depth=5, top_k=3, width=3)
    assert_well_formed(candidates.best(total - 1))


# --- golden ---


def begin(drafter, vocab_size: int = VOCAB, num_rows: int = 1) -> DraftSession:
    return DraftSession(drafter, vocab_size, LogitsProcessorList(), None, 0.0, [0] * num_rows)


def propose(session: DraftSession, text: Tensor, states: Tensor, shape: tuple[int, int, int]) -> Proposal:
    """A tree of (depth, top_k, total) after the text (1, L), whose unread states (1, M, n*ht) end before its last
    token."""
    num_new = states.shape[1]
    return session.propose_tree(Reading(states, text[:, -num_new:], [num_new]), [text], Fixed(*shape), shape[0], 10**9)


@torch.no_grad()
def test_the_trees_are_the_original_codes(monkeypatch):
    """Which scores them at temperature 1."""
    monkeypatch.setattr(drafting, "TREE_TEMPERATURE", 1.0)
    golden = load_file(GOLDEN / "golden.safetensors") | load_file(GOLDEN / "golden_trees.safetensors")
    drafter = Eagle31DrafterModel.from_pretrained(GOLDEN).eval()
    drafter.set_input_embeddings(nn.Embedding.from_pretrained(golden["embed"]))
    session, position = begin(drafter, 500), 0
    for suffix, features in (("", golden["features"]), ("2", golden["features2"])):
        tree = propose(session, golden[f"input_ids{suffix}"], features, (8, 10, 60)).tree
        position += features.shape[1]
        assert_close(f"tokens{suffix}", tree.ids, golden[f"tree_tokens{suffix}"])
        assert_close(f"ancestors{suffix}", tree.ancestors[None], golden[f"tree_mask{suffix}"])
        assert_close(f"depths{suffix}", tree.depths[0], golden[f"tree_pos{suffix}"])
        assert_well_formed(tree)
        assert session.past_key_values.get_seq_length() == position, (
            "rows that are not the target's stayed in the cache"
        )


# --- the drafter's side ---


class Kept(Candidates):
    """Remembers the last expansion."""

    last: Candidates

    def best(self, count: int) -> DraftTree:
        Kept.last = self
        return super().best(count)


def states_for(target, drafter, text: Tensor) -> Tensor:
    return target_states(target, text, drafter.config.resolve_layer_ids(len(decoder_layers(target))))[0]


class Oracle:
    """Log-probabilities after every path, by target id: the path run as a chain of single rows, with a cache of its
    own."""

    def __init__(self, drafter, tokens: Tensor, states: Tensor, temperature: float):
        self.drafter, self.tokens, self.states, self.temperature = drafter, tokens, states, temperature
        self.known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, path: tuple[int, ...]) -> Tensor:
        if path not in self.known:
            self.known[path] = self.run(path)
        return self.known[path]

    def run(self, path: tuple[int, ...]) -> Tensor:
        num_rows = self.states.shape[1]
        rows = torch.arange(num_rows)[None]
        out = self.drafter(self.tokens[:, 1:], target_hidden_states=self.states, position_ids=rows, use_cache=True)
        for i, token in enumerate(path):
            out = self.drafter(
                torch.tensor([[token]]),
                hidden_states=out.last_hidden_state[:, -1:],
                position_ids=torch.tensor([[num_rows + i]]),
                past_key_values=out.past_key_values,
            )
        logits = out.logits[0, -1] / self.temperature
        ids = torch.arange(len(logits)) if self.drafter.d2t is None else self.drafter.draft_to_target_ids()
        # Padding rows of its vocabulary are no tokens, so the others share their probability.
        return torch.full((VOCAB + 5,), -torch.inf).index_put((ids,), logits)[:VOCAB].log_softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_every_node_is_scored_as_its_path_run_as_a_chain(target, make_drafter, monkeypatch, name, attention):
    monkeypatch.setattr(drafting, "Candidates", Kept)
    monkeypatch.setattr(drafting, "TREE_TEMPERATURE", 0.7)
    drafter = make_drafter(target, name, attention)
    text, num_rows = greedy_text(target)[:, :10], 9
    states, oracle = (
        states_for(target, drafter, text),
        Oracle(drafter, text, states_for(target, drafter, text)[:, :num_rows], 0.7),
    )
    session = begin(drafter)
    propose(session, text[:, :6], states[:, :5], (3, 3, 9))  # an earlier round, whose own rows must be gone
    proposal = propose(session, text, states[:, 5:num_rows], (6, 3, 30))  # deeper than the window of four
    assert session.past_key_values.get_seq_length() == num_rows

    scored = DraftTree.from_parents(torch.cat(Kept.last.ids, dim=1), torch.cat(Kept.last.parents, dim=1), 6)
    found = torch.cat(Kept.last.scores, dim=1)[0]
    paths = [path_of(scored, node) for node in range(1, scored.ids.shape[1])]
    expected = [sum(float(oracle(path[:i])[token]) for i, token in enumerate(path)) for path in paths]
    assert_close("scores", found[1:], torch.tensor(expected), TARGET_FORWARD)

    _, frontiers = expand(oracle, 6, 3, 3)
    shown = {path_of(scored, int(parent)) for parent in scored.parents[0, 1:]}
    assert shown == {path for frontier in frontiers[:-1] for path in frontier}, (
        "other nodes went on than the best of each level"
    )
    assert_well_formed(proposal.tree)
    assert proposal.tree.ids[0, 0] == text[0, -1]
    assert_close("ids", proposal.ids, proposal.tree.ids[:, 1:])
    assert (proposal.num_rows, proposal.depth) == (30, int(proposal.tree.depths.max()))
    assert proposal.tree.depth > 4, "no path left the window of four"


@torch.no_grad()
@pytest.mark.parametrize(("depth", "top_k", "total"), [(1, 11, 60), (3, 11, 60), (4, 16, 30), (2, 2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_only_what_the_target_has(target, make_drafter, name, depth, top_k, total):
    drafter, text = make_drafter(target, name), greedy_text(target)[:, :10]
    tree = tree_of(propose(begin(drafter), text, states_for(target, drafter, text)[:, :9], (depth, top_k, total)), text)
    assert_well_formed(tree)
    assert set(tree.ids[0, 1:].tolist()) <= set(PRUNED_IDS if name == "pruned" else range(VOCAB))
    usable = min(top_k, len(PRUNED_IDS) if name == "pruned" else VOCAB)
    widths = [1, *(min(top_k, usable**level) for level in range(1, depth))]
    assert tree.ids.shape[1] == min(total, 1 + usable * sum(widths))
    assert tree.depth <= depth


@torch.no_grad()
def test_a_tree_of_width_one_is_the_chain(target, make_drafter):
    for name in NAMES:
        drafter, text = make_drafter(target, name), greedy_text(target)[:, :10]
        states = states_for(target, drafter, text)[:, :9]
        chain = begin(drafter).propose_chain(Reading(states, text[:, 1:], [9]), [text], 5)
        tree = propose(begin(drafter), text, states, (5, 1, 60))
        assert_close(f"drafts of {name}", tree.ids, chain.ids)
        assert tree.tree is None, "a chain is verified as a sequence"
        assert (tree.depth, tree.num_rows) == (5, 6)
        assert tree.children() == chain.children()


@torch.no_grad()
def test_a_better_budget_keeps_every_node(target, drafter):
    text = greedy_text(target)[:, :10]
    states, before = states_for(target, drafter, text)[:, :9], set()
    for total in (2, 5, 12, 40, 200):
        paths = paths_of(tree_of(propose(begin(drafter), text, states, (4, 4, total)), text))
        assert before <= paths
        before = paths


@torch.no_grad()
@pytest.mark.parametrize("call", [1, 2, 4])
def test_the_cache_is_clean_when_expanding_fails(target, drafter, monkeypatch, call):
    text, session = greedy_text(target)[:, :10], begin(drafter)
    monkeypatch.setattr(session, "_likeliest", raise_at(call, session._likeliest))
    with pytest.raises(InterruptError):
        propose(session, text, states_for(target, drafter, text)[:, :9], (5, 3, 20))
    assert session.past_key_values.get_seq_length() == 9


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_drafted_for_as_if_alone(target, make_drafter, name, attention):
    """Rows that have read different numbers of tokens, round after round."""
    drafter, text = make_drafter(target, name, attention), greedy_text(target)
    states, together, alone = (
        states_for(target, drafter, text),
        begin(drafter, num_rows=2),
        [begin(drafter), begin(drafter)],
    )
    ends, shape = [0, 0], (6, 3, 20)
    for counts in ([9, 5], [1, 4], [2, 2]):
        begins, ends = ends, [end + count for end, count in zip(ends, counts, strict=True)]
        index = torch.tensor(
            [[begin + i if i < n else 0 for i in range(max(counts))] for begin, n in zip(begins, counts, strict=True)]
        )
        reading = Reading(states[0, index], text[0, index + 1], counts)
        texts = [text[:, : end + 1] for end in ends]
        trees = together.propose_tree(reading, texts, Fixed(*shape), shape[0], 10**9).tree
        for b, session in enumerate(alone):
            expected = tree_of(propose(session, texts[b], states[:, begins[b] : ends[b]], shape), texts[b])
            for field in ("ids", "parents", "depths", "ancestors"):
                assert_close(
                    f"{field} of row {b} after {ends}", getattr(trees, field)[b : b + 1], getattr(expected, field)
                )
        assert together.lengths == ends


# --- the target's side ---

TREE = DraftTree.from_parents(
    torch.tensor([[8, 3, 7, 1, 1, 4, 9, 0, 5, 2]]), torch.tensor([[-1, 0, 0, 1, 2, 2, 3, 4, 6, 8]]), max_depth=5
)
BRANCH = [0, 1, 3, 6, 8]  # an accepted path
VERIFIED = [(kind, attention) for kind in TARGETS for attention in ("eager", "sdpa")] + [
    ("deepseek", "eager"),
    ("falcon", "eager"),
]


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("length", [2, 7, 13])
@pytest.mark.parametrize(("kind", "attention"), VERIFIED, ids=[f"{k}-{a}" for k, a in VERIFIED])
def test_a_tree_is_read_as_its_paths_are(make_target, kind, attention, length, padding):
    """Logits at every node; and after one path was kept, those of two more tokens, the second in the cache as it is
    given back."""
    target = build_other(kind) if kind in OTHER_TARGETS else make_target(kind, attention)
    text = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
    past, num_nodes = DynamicCache(config=target.config), TREE.ids.shape[1]
    mask = (torch.arange(padding + length) >= padding).long()[None]
    padded, total = torch.nn.functional.pad(text, (padding, 0)), padding + length
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    committed = torch.cat((text, TREE.ids[:, BRANCH]), dim=1)

    def check_next(token: int) -> None:
        nonlocal committed
        committed = torch.cat((committed, torch.tensor([[token]])), dim=1)
        mask = (torch.arange(padding + committed.shape[1]) >= padding).long()[None]
        last = torch.tensor([[committed.shape[1] - 1]])
        after = target(
            committed[:, -1:], attention_mask=mask, position_ids=last, past_key_values=past, use_cache=True
        ).logits
        assert_close("logits after the path", after[0, -1], target(committed).logits[0, -1], TARGET_FORWARD)

    with slots(past, total + 64) as placement:
        placement.is_final = True
        target(padded, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True)
        placement.is_final = False
        placement.rows([total], num_nodes, TREE.ids.device)
        masks = slot_masks(target, past, [total], TREE.ancestors, TREE.depths, mask.bool() if padding else None)
        logits = target(
            TREE.ids, attention_mask=masks, position_ids=length + TREE.depths, past_key_values=past, use_cache=True
        ).logits
        placement.slots = placement.low = placement.high = None
        for node in range(num_nodes):
            whole = torch.cat((text, TREE.ids[:, TREE.ancestors[0, node]]), dim=1)
            assert_close(f"logits at node {node}", logits[0, node], target(whole).logits[0, -1], TARGET_FORWARD)
        keep_paths(past, [total], [BRANCH])
        assert past.get_seq_length() == total + len(BRANCH)
        check_next(6)
    assert past.get_seq_length() == total + len(BRANCH) + 1
    check_next(2)


# another tree in another row
SECOND = DraftTree.from_parents(TREE.ids, torch.tensor([[-1, 0, 1, 1, 3, 4, 0, 6, 7, 8]]), max_depth=5)


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("padding", [(0, 0), (2, 0), (1, 3)])
@pytest.mark.parametrize("starts", [(6, 6), (6, 4), (3, 9)])
def test_the_mask_of_the_target(window, padding, starts):
    """Slot by slot, as the sequence of a node's own path says."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = (
        LlamaConfig(**fields)
        if window is None
        else MistralConfig(sliding_window=window, num_key_value_heads=1, **fields)
    )
    target, past = AutoModelForCausalLM.from_config(config), DynamicCache(config=config)
    seen = torch.arange(4) >= torch.tensor(padding)[:, None]  # of a prompt of four tokens
    ancestors, depths = torch.cat((TREE.ancestors, SECOND.ancestors)), torch.cat((TREE.depths, SECOND.depths))
    got = slot_masks(target, past, list(starts), ancestors, depths, seen if any(padding) else None)
    num_nodes, seen_from = depths.shape[1], 0 if window is None else max(0, min(starts) - window + 1)
    assert got.shape == (2, 1, num_nodes, max(starts) + num_nodes - seen_from)
    assert set(got.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}, "a mask is added"
    for row, start in enumerate(starts):
        for node in range(num_nodes):
            position = start + int(depths[row, node])
            for column, other in enumerate(range(seen_from - start, max(starts) + num_nodes - start)):
                if other < 0:  # a token of the text
                    expected, at = start + other >= padding[row], start + other
                else:  # a node, or nothing yet
                    expected = other < num_nodes and bool(ancestors[row, node, other])
                    at = start + int(depths[row, other]) if expected else 0
                expected = expected and (window is None or position - at < window)
                assert (got[row, 0, node, column] == 0) == expected, f"row {row}, node {node}, slot {start + other}"


def fill(past: DynamicCache, width: int, num_tokens: int, num_rows: int = 1) -> None:
    """Slots are numbers: token t is t in keys and -t in values."""
    for layer in range(len(past.layers)):
        rows = torch.arange(float(num_tokens)).reshape(1, 1, -1, 1).expand(num_rows, 2, num_tokens, width)
        past.update(rows, -rows, layer)


ROWS = {
    "first": [0],
    "all": [0, 1, 2, 3, 4, 5],
    "prefix": [0, 1, 2],
    "gap": [0, 2, 3, 5],
    "last": [0, 5],
    "chained_moves": [0, 3, 4, 5],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kind", ["llama", "mistral_window_8", "gemma3_window_8"])
def test_keep_paths(make_target, kind, rows):
    target, num_tokens, num_rows = make_target(kind), 13, 6
    past = DynamicCache(config=target.config)
    found = [type(layer) for layer in past.layers]
    expected = [float(t) for t in range(num_tokens - num_rows)] + [float(num_tokens - num_rows + row) for row in rows]
    with slots(past, 64):
        fill(past, 5, num_tokens)
        keep_paths(past, [num_tokens - num_rows], [rows])
        assert past.get_seq_length() == len(expected)
    assert [type(layer) for layer in past.layers] == found, "the cache is not as it was handed in"
    for i, layer in enumerate(past.layers):
        held = layer.keys.shape[-2]
        assert layer.get_seq_length() == len(expected), f"layer {i}"
        assert held >= min(len(expected), 7), f"layer {i} lost what its window sees"
        assert layer.keys[0, 0, :, 0].tolist() == expected[-held:]
        assert (-layer.values[0, 1, :, 4]).tolist() == expected[-held:]


PATHS = [  # in rows that begin at different slots
    ([7, 5], [[0, 2, 3, 5], [0]]),
    ([5, 7], [[0, 1], [0, 5]]),
    ([7, 7], [[0, 1, 2, 3], [0, 3, 4]]),
    ([4, 6], [[], [0, 2]]),
]


@pytest.mark.parametrize(("starts", "paths"), PATHS, ids=str)
def test_keep_paths_of_two_rows(make_target, starts, paths):
    """Within the cache's slots: a row's tokens are those before its start and its path; what comes after is the mask's
    to hide."""
    past = DynamicCache(config=make_target("llama").config)
    with slots(past, 64):
        fill(past, 5, 13, num_rows=2)
        keep_paths(past, starts, paths)
        for layer in past.layers:
            assert layer.get_seq_length() == max(start + len(path) for start, path in zip(starts, paths, strict=True))
            for b, (start, path) in enumerate(zip(starts, paths, strict=True)):
                expected = [float(t) for t in range(start)] + [float(start + row) for row in path]
                assert layer.keys[b, 0, : len(expected), 0].tolist() == expected
                assert (-layer.values[b, 1, : len(expected), 4]).tolist() == expected


@torch.no_grad()
def test_keep_paths_of_a_latent_cache():
    """DeepSeek's keys and values differ in width."""
    target = build_other("deepseek")
    past = target(torch.arange(10)[None], use_cache=True).past_key_values
    before = [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]
    with slots(past, 64):
        keep_paths(past, [4], [[0, 2, 3]])
    for layer, (keys, values) in zip(past.layers, before, strict=True):
        kept = [0, 1, 2, 3, 4, 6, 7]
        assert keys.shape[-1] != values.shape[-1]
        assert_close("keys", layer.keys, keys[..., kept, :])
        assert_close("values", layer.values, values[..., kept, :])


# --- the self-test ---


TAKEN = [(kind, dtype) for kind in (*TARGETS, "falcon") for dtype in (torch.float32, torch.bfloat16)] + [
    ("deepseek", torch.float32)
]


@pytest.mark.parametrize(("kind", "dtype"), TAKEN, ids=[f"{kind}-{dtype}" for kind, dtype in TAKEN])
def test_targets_that_take_trees(logged_by_selftest, kind, dtype):
    target = build_other(kind) if kind in OTHER_TARGETS else build_target(kind)
    try:
        assert selftest.why_no_trees(target.to(dtype)) is None
    finally:
        target.float()
    assert logged_by_selftest == []


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon_alibi"])
def test_targets_that_do_not(logged_by_selftest, prompt, kind):
    """Positions counted by slot: they fall back to chains, and say so once."""
    target = build_other(kind)
    drafter = build_drafter(target)
    greedy = {"max_new_tokens": 16, "do_sample": False}
    chain, chain_stats = speculate(target, drafter, prompt, num_assistant_tokens=5, **greedy)
    assert logged_by_selftest == []
    for _ in range(2):
        output, stats = speculate(target, drafter, prompt, num_assistant_tokens=5, draft_tree_top_k=4, **greedy)
        assert_close("text", output, target.generate(prompt, **greedy))
        assert_close("text of chains", output, chain)
        assert stats.accepted_per_round == chain_stats.accepted_per_round
        assert stats.drafted_per_position == chain_stats.drafted_per_position
    assert len(logged_by_selftest) == 1
    assert f"chains instead of trees for {type(target).__name__}" in logged_by_selftest[0]


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_an_implementation_without_masks_is_not_even_tried(logged_by_selftest, monkeypatch, implementation):
    target = build_target("llama")
    monkeypatch.setattr(target.config, "_attn_implementation_internal", implementation)
    monkeypatch.setattr(target, "forward", lambda *args, **kwargs: pytest.fail("the target was run"))
    assert f"attention implementation {implementation}" in selftest.why_no_trees(target)
    assert len(logged_by_selftest) == 1


def test_layers_of_another_type_are_not_even_tried(logged_by_selftest, monkeypatch):
    target = build_target("gemma3_window_8")
    monkeypatch.setattr(target.config, "layer_types", ["chunked_attention", "full_attention"] * 2)
    monkeypatch.setattr(target, "forward", lambda *args, **kwargs: pytest.fail("the target was run"))
    assert "layers of type chunked_attention" in selftest.why_no_trees(target)


def wrong_mask(original):
    """A target that reads a tree as if it were a sequence."""

    def forward(*args, attention_mask=None, **kwargs):
        masks = attention_mask.values() if isinstance(attention_mask, dict) else [attention_mask]
        if "position_ids" in kwargs:  # a tree, not a sequence
            for mask in masks:
                mask[..., -mask.shape[2] :] = mask.new_full((mask.shape[2],) * 2, torch.finfo(mask.dtype).min).triu(1)
        return original(*args, attention_mask=attention_mask, **kwargs)

    return forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", TARGETS)
def test_a_tree_read_as_a_sequence_is_noticed(logged_by_selftest, monkeypatch, kind, dtype):
    target = build_target(kind).to(dtype)
    monkeypatch.setattr(target, "forward", wrong_mask(target.forward))
    assert "differ from those over its paths" in selftest.why_no_trees(target)


def test_positions_read_by_slot_are_noticed(logged_by_selftest, monkeypatch):
    target = build_target("gpt2")
    original = target.forward
    monkeypatch.setattr(target, "forward", lambda *args, position_ids=None, **kwargs: original(*args, **kwargs))
    assert "differ from those over its paths" in selftest.why_no_trees(target)


def test_the_self_test_runs_once_and_draws_no_random_numbers(logged_by_selftest, prompt, monkeypatch):
    target = build_target("llama")
    drafter, calls, tried = build_drafter(target), [], selftest._error
    monkeypatch.setattr(selftest, "_error", lambda model: calls.append(model) or tried(model))
    for seed in (0, 1):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        assert selftest.why_no_trees(target) is None
        assert torch.get_rng_state().equal(state)
        speculate(target, drafter, prompt, max_new_tokens=6, num_assistant_tokens=5, draft_tree_top_k=3)
    assert len(calls) == 1


@pytest.mark.parametrize("order", [("falcon", "falcon_alibi"), ("falcon_alibi", "falcon")], ids="-".join)
def test_a_verdict_is_not_that_of_another_config(logged_by_selftest, order):
    for kind in order:
        assert (selftest.why_no_trees(build_other(kind)) is None) == (kind == "falcon")


def test_low_precision_does_not_hide_a_wrong_target(logged_by_selftest):
    target = build_other("mpt")
    try:
        assert selftest.why_no_trees(target.bfloat16()) is not None
    finally:
        target.float()


def test_a_tree_is_as_deep_as_asked(target, drafter, prompt):
    """Not only by its word: rounds accept more than a tree one shallower could."""
    for depth in (1, 2, 4):
        shape = {"num_assistant_tokens": depth, "draft_tree_top_k": 3, "draft_tree_total_tokens": 24}
        _, stats = speculate(target, drafter, prompt, max_new_tokens=24, do_sample=False, **shape)
        assert max(stats.accepted_per_round) == depth == len(stats.drafted_per_position)
        assert all(a >= b for a, b in pairwise(stats.accepted_per_position))
