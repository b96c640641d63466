"""Draft trees without a text to decode: their topology, their expansion, the masks that verify them, the cache they leave behind.

`golden_trees.safetensors`: of the original EAGLE 3 code, the trees of a round and of one that follows it (`..2`): `tree_tokens` (1, N),
`tree_mask` (1, 1, N, N), depths `tree_pos` (N,), captured `features2` (B, T, 3 * 96) and `input_ids2` of the second round.
"""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from close import FORWARD, assert_close
from conftest import NO_SPECIAL_TOKENS, PRUNED_IDS, TARGETS, VOCAB, WIDTH, build_drafter, build_target, greedy_text
from observers import InterruptError, raise_at, speculate
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DynamicCache,
    FalconConfig,
    LlamaConfig,
    LogitsProcessorList,
    MistralConfig,
    MptConfig,
)

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.features import decoder_layers, target_states
from eagle31_hf.generation import drafting, selftest
from eagle31_hf.generation.cache import keep_path, recording_past
from eagle31_hf.generation.drafting import DraftSession
from eagle31_hf.generation.target import tree_masks
from eagle31_hf.generation.tree import Candidates, DraftTree

GOLDEN = Path(__file__).parents[1] / "fixtures" / "original-eagle3"
SCORES = 2e-4  # fp32: sums of six log-probabilities of logits up to 30, over states that were fed back five times
NAMES = ["eagle31", "eagle3", "norm_before_fc", "two_layers", "window_4", "pruned", "own_embedding", "mla", "padded_vocabulary"]

OTHERS = {"vocab_size": VOCAB, "initializer_range": 0.5, "use_cache": True} | NO_SPECIAL_TOKENS
OTHER_TARGETS = {
    "deepseek": (DeepseekV3Config, {
        "hidden_size": WIDTH, "intermediate_size": 40, "moe_intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 3,
        "num_key_value_heads": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    }),
    "bloom": (BloomConfig, {"hidden_size": WIDTH, "n_layer": 4, "n_head": 3}),
    "mpt": (MptConfig, {"d_model": WIDTH, "n_layers": 4, "n_heads": 3, "max_seq_len": 128}),
    "falcon": (FalconConfig, {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 3, "alibi": False}),
    "falcon_alibi": (FalconConfig, {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 3, "alibi": True}),
}  # fmt: skip


@cache
def build_other(kind: str):
    """One of OTHER_TARGETS."""
    config_class, fields = OTHER_TARGETS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**OTHERS | fields), attn_implementation="eager").eval()
    model.generation_config.use_cache = True  # a config of MPT's turns it off
    return model


def path_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    """Token ids from below the root to the node."""
    ids = []
    while tree.parents[node] >= 0:
        ids.append(int(tree.ids[node]))
        node = int(tree.parents[node])
    return tuple(reversed(ids))


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    return {path_of(tree, node) for node in range(len(tree.ids))}


def assert_well_formed(tree: DraftTree) -> None:
    """Connected, each node after its parent and unlike its siblings; depths and ancestors are those the parents say."""
    assert tree.parents[0] == -1
    for node, parent in enumerate(tree.parents.tolist()):
        expected = set(range(node, node + 1))
        if node:
            assert 0 <= parent < node, f"node {node} hangs on {parent}"
            expected |= set(tree.ancestors[parent].nonzero().flatten().tolist())
            assert tree.depths[node] == tree.depths[parent] + 1
        assert set(tree.ancestors[node].nonzero().flatten().tolist()) == expected
    assert tree.depths[0] == 0
    assert len(paths_of(tree)) == len(tree.ids), "two siblings hold the same token"


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
    tree = DraftTree.from_parents(torch.arange(100, 100 + count), torch.tensor(parents), max_depth=max(1, count - 1))
    assert_well_formed(tree)
    assert tree.depth == max(len(path_of(tree, node)) for node in range(count))
    for node, children in enumerate(tree.children()):
        assert children == {100 + child: child for child, parent in enumerate(parents) if parent == node}
    moved = tree.to(torch.device("cpu"))
    assert all(getattr(moved, name).equal(getattr(tree, name)) for name in ("ids", "parents", "depths", "ancestors"))


@pytest.mark.parametrize("deepest", range(1, 12))
def test_the_deepest_node_knows_all_its_ancestors(deepest):
    """Steps are doubled: no depth between two powers may lose any."""
    tree = DraftTree.from_parents(torch.arange(deepest + 1), torch.arange(-1, deepest), max_depth=deepest)
    assert tree.ancestors.equal(torch.ones(deepest + 1, deepest + 1).tril().bool())
    assert tree.depths.tolist() == list(range(deepest + 1))


# --- expansion, without a model ---


def expand(log_probs_of, depth: int, top_k: int, width: int) -> tuple[Candidates, list[list[tuple[int, ...]]]]:
    """`log_probs_of(path)` -> log-probabilities (V,). The candidates, and the frontier's paths by level."""
    candidates, frontier = Candidates(torch.tensor(3)), [()]
    frontiers: list[list[tuple[int, ...]]] = [frontier]
    for _ in range(depth):
        best = torch.stack([log_probs_of(path) for path in frontier]).topk(top_k)
        rows = candidates.extend(best.values, best.indices, width)
        frontier = [(*frontier[row], int(token)) for row, token in zip(rows.tolist(), candidates.frontier_ids.tolist(), strict=True)]
        frontiers.append(frontier)
    return candidates, frontiers


def random_log_probs(path: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    return torch.randn(VOCAB, generator=generator).log_softmax(-1)


SHAPES = [(1, 1, 5), (1, 4, 60), (2, 3, 5), (4, 3, 10), (5, 2, 7), (3, 11, 60), (6, 4, 2), (4, 4, 1000)]  # depth, top_k, total


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
    assert tree.ids[0] == 3, "the root is the token committed last"


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


@torch.no_grad()
def test_the_trees_are_the_original_codes():
    golden = load_file(GOLDEN / "golden.safetensors") | load_file(GOLDEN / "golden_trees.safetensors")
    drafter = Eagle31DrafterModel.from_pretrained(GOLDEN).eval()
    drafter.set_input_embeddings(nn.Embedding.from_pretrained(golden["embed"]))
    session, position = DraftSession(drafter, 500, LogitsProcessorList(), False, 0.0), 0
    for suffix, features in (("", golden["features"]), ("2", golden["features2"])):
        tree = session.propose_tree(golden[f"input_ids{suffix}"], features, position, 8, 10, 60).tree
        position += features.shape[1]
        assert_close(f"tokens{suffix}", tree.ids[None], golden[f"tree_tokens{suffix}"])
        assert_close(f"ancestors{suffix}", tree.ancestors[None, None], golden[f"tree_mask{suffix}"])
        assert_close(f"depths{suffix}", tree.depths, golden[f"tree_pos{suffix}"])
        assert_well_formed(tree)
        assert session.past_key_values.get_seq_length() == position, "rows that are not the target's stayed in the cache"


# --- the drafter's side ---


class Kept(Candidates):
    """Remembers the last expansion."""

    last: Candidates

    def best(self, count: int) -> DraftTree:
        Kept.last = self
        return super().best(count)


def begin(drafter, vocab_size: int = VOCAB) -> DraftSession:
    return DraftSession(drafter, vocab_size, LogitsProcessorList(), False, 0.0)


def states_for(target, drafter, text: Tensor) -> Tensor:
    return target_states(target, text, drafter.config.resolve_layer_ids(len(decoder_layers(target))))[0]


class Oracle:
    """Log-probabilities after every path, by target id: the path run as a chain of single rows, with a cache of its own."""

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
                torch.tensor([[token]]), hidden_states=out.last_hidden_state[:, -1:], position_ids=torch.tensor([[num_rows + i]]),
                past_key_values=out.past_key_values,
            )  # fmt: skip
        log_probs = (out.logits[0, -1] / self.temperature).log_softmax(-1)
        ids = torch.arange(len(log_probs)) if self.drafter.d2t is None else self.drafter.draft_to_target_ids()
        return torch.full((VOCAB + 5,), -torch.inf).index_put((ids,), log_probs)[:VOCAB]


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_every_node_is_scored_as_its_path_run_as_a_chain(target, make_drafter, monkeypatch, name, attention):
    monkeypatch.setattr(drafting, "Candidates", Kept)
    drafter = make_drafter(target, name, attention)
    text, num_rows, temperature = greedy_text(target)[:, :10], 9, 0.7
    states, oracle = states_for(target, drafter, text), Oracle(drafter, text, states_for(target, drafter, text)[:, :num_rows], 0.7)
    session = begin(drafter)
    session.propose_tree(text[:, :6], states[:, :5], 0, 3, 3, 9, temperature)  # an earlier round, whose own rows must be gone
    proposal = session.propose_tree(text, states[:, 5:num_rows], 5, 6, 3, 30, temperature)  # deeper than the window of four
    assert session.past_key_values.get_seq_length() == num_rows

    scored, found = DraftTree.from_parents(torch.cat(Kept.last.ids), torch.cat(Kept.last.parents), 6), torch.cat(Kept.last.scores)
    for node in range(1, len(scored.ids)):
        path = path_of(scored, node)
        expected = sum(float(oracle(path[:i])[token]) for i, token in enumerate(path))
        assert abs(float(found[node]) - expected) < SCORES, f"score of {path}"

    _, frontiers = expand(oracle, 6, 3, 3)
    shown = {path_of(scored, int(parent)) for parent in scored.parents[1:]}
    assert shown == {path for frontier in frontiers[:-1] for path in frontier}, "other nodes went on than the best of each level"
    assert_well_formed(proposal.tree)
    assert proposal.tree.ids[0] == text[0, -1]
    assert_close("ids", proposal.ids, proposal.tree.ids[None, 1:])
    assert (proposal.num_rows, proposal.depth) == (30, int(proposal.tree.depths.max()))
    assert proposal.tree.depth > 4, "no path left the window of four"


@torch.no_grad()
@pytest.mark.parametrize(("depth", "top_k", "total"), [(1, 11, 60), (3, 11, 60), (4, 16, 30), (2, 2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_only_what_the_target_has(target, make_drafter, name, depth, top_k, total):
    drafter, text = make_drafter(target, name), greedy_text(target)[:, :10]
    tree = begin(drafter).propose_tree(text, states_for(target, drafter, text)[:, :9], 0, depth, top_k, total).tree
    assert_well_formed(tree)
    assert set(tree.ids[1:].tolist()) <= set(PRUNED_IDS if name == "pruned" else range(VOCAB))
    usable = min(top_k, len(PRUNED_IDS) if name == "pruned" else VOCAB)
    widths = [1, *(min(top_k, usable**level) for level in range(1, depth))]
    assert len(tree.ids) == min(total, 1 + usable * sum(widths))
    assert tree.depth <= depth


@torch.no_grad()
def test_a_tree_of_width_one_is_the_chain(target, make_drafter):
    for name in NAMES:
        drafter, text = make_drafter(target, name), greedy_text(target)[:, :10]
        states = states_for(target, drafter, text)[:, :9]
        chain, tree = begin(drafter).propose_chain(text, states, 0, 5), begin(drafter).propose_tree(text, states, 0, 5, 1, 60)
        assert_close(f"drafts of {name}", tree.ids, chain.ids)
        assert tree.tree.parents.tolist() == [-1, 0, 1, 2, 3, 4]


@torch.no_grad()
def test_a_better_budget_keeps_every_node(target, drafter):
    text = greedy_text(target)[:, :10]
    states, before = states_for(target, drafter, text)[:, :9], set()
    for total in (2, 5, 12, 40, 200):
        paths = paths_of(begin(drafter).propose_tree(text, states, 0, 4, 4, total).tree)
        assert before <= paths
        before = paths


@torch.no_grad()
@pytest.mark.parametrize("call", [1, 2, 4])
def test_the_cache_is_clean_when_expanding_fails(target, drafter, monkeypatch, call):
    text, session = greedy_text(target)[:, :10], begin(drafter)
    monkeypatch.setattr(session, "_likeliest", raise_at(call, session._likeliest))
    with pytest.raises(InterruptError):
        session.propose_tree(text, states_for(target, drafter, text)[:, :9], 0, 5, 3, 20)
    assert session.past_key_values.get_seq_length() == 9


# --- the target's side ---

TREE = DraftTree.from_parents(torch.tensor([8, 3, 7, 1, 1, 4, 9, 0, 5, 2]), torch.tensor([-1, 0, 0, 1, 2, 2, 3, 4, 6, 8]), max_depth=5)
BRANCH = [0, 1, 3, 6, 8]  # an accepted path
VERIFIED = [(kind, attention) for kind in TARGETS for attention in ("eager", "sdpa")] + [("deepseek", "eager"), ("falcon", "eager")]


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("length", [2, 7, 13])
@pytest.mark.parametrize(("kind", "attention"), VERIFIED, ids=[f"{k}-{a}" for k, a in VERIFIED])
def test_a_tree_is_read_as_its_paths_are(make_target, kind, attention, length, padding):
    """Logits at every node; and after one path was kept, those of two more tokens."""
    target = build_other(kind) if kind in OTHER_TARGETS else make_target(kind, attention)
    text = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
    past = DynamicCache(config=target.config)
    mask = (torch.arange(padding + length) >= padding).long()[None]
    padded, total = torch.nn.functional.pad(text, (padding, 0)), padding + length
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with recording_past(past):
        target(padded, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True)
        past.crop(0)
        masks = tree_masks(target, TREE, total, mask if padding else None)
        logits = target(
            TREE.ids[None], attention_mask=masks, position_ids=length + TREE.depths[None], past_key_values=past, use_cache=True
        ).logits
        for node in range(len(TREE.ids)):
            whole = torch.cat((text, TREE.ids[TREE.ancestors[node]][None]), dim=1)
            assert_close(f"logits at node {node}", logits[0, node], target(whole).logits[0, -1], 20 * FORWARD)
        keep_path(past, BRANCH, len(TREE.ids))
        assert past.get_seq_length() == total + len(BRANCH)
        committed = torch.cat((text, TREE.ids[BRANCH][None]), dim=1)
        for token in (6, 2):
            committed = torch.cat((committed, torch.tensor([[token]])), dim=1)
            mask = (torch.arange(padding + committed.shape[1]) >= padding).long()[None]
            last = torch.tensor([[committed.shape[1] - 1]])
            after = target(committed[:, -1:], attention_mask=mask, position_ids=last, past_key_values=past, use_cache=True).logits
            past.crop(0)
            assert_close("logits after the path", after[0, -1], target(committed).logits[0, -1], 20 * FORWARD)


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("padding", [0, 2])
def test_the_mask_of_the_target(window, padding):
    """Position by position, as the sequence of a node's own path says."""
    fields = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(**fields) if window is None else MistralConfig(sliding_window=window, num_key_value_heads=1, **fields)
    target, num_cached = AutoModelForCausalLM.from_config(config), 6
    mask = (torch.arange(num_cached + 1) >= padding).long()[None]
    got = tree_masks(target, TREE, num_cached, mask)[0, 0]
    held = num_cached if window is None else min(num_cached, window - 1)
    assert got.shape == (len(TREE.ids), held + len(TREE.ids))
    assert set(got.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}, "a mask is added"
    for node in range(len(TREE.ids)):
        reach = num_cached + int(TREE.depths[node]) - (window or 1000)
        for column in range(got.shape[1]):
            if column < held:
                position = num_cached - held + column
                expected = position >= padding and position > reach
            else:
                other = column - held
                expected = bool(TREE.ancestors[node, other]) and num_cached + int(TREE.depths[other]) > reach
            assert (got[node, column] == 0) == expected, f"node {node}, column {column}"


def fill(past: DynamicCache, width: int, num_tokens: int) -> None:
    """Rows are numbers: token t is t in keys and -t in values."""
    for layer in range(len(past.layers)):
        rows = torch.arange(float(num_tokens)).reshape(1, 1, -1, 1).expand(1, 2, num_tokens, width)
        past.update(rows, -rows, layer)


ROWS = {
    "first": [0], "all": [0, 1, 2, 3, 4, 5], "prefix": [0, 1, 2], "gap": [0, 2, 3, 5], "last": [0, 5], "chained_moves": [0, 3, 4, 5],
}  # fmt: skip


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kind", ["llama", "mistral_window_8", "gemma3_window_8"])
def test_keep_path(make_target, kind, rows):
    target, num_tokens, num_rows = make_target(kind), 13, 6
    past = DynamicCache(config=target.config)
    expected = [float(t) for t in range(num_tokens - num_rows)] + [float(num_tokens - num_rows + row) for row in rows]
    with recording_past(past):
        fill(past, 5, num_tokens)
        keep_path(past, rows, num_rows)
    for i, layer in enumerate(past.layers):
        held = layer.keys.shape[-2]
        assert layer.get_seq_length() == len(expected), f"layer {i}"
        assert held >= min(len(expected), 7), f"layer {i} lost what its window sees"
        assert layer.keys[0, 0, :, 0].tolist() == expected[-held:]
        assert (-layer.values[0, 1, :, 4]).tolist() == expected[-held:]


@torch.no_grad()
def test_keep_path_of_a_latent_cache():
    """DeepSeek's keys and values differ in width."""
    target = build_other("deepseek")
    past = target(torch.arange(10)[None], use_cache=True).past_key_values
    before = [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]
    keep_path(past, [0, 2, 3], 6)
    for layer, (keys, values) in zip(past.layers, before, strict=True):
        kept = [0, 1, 2, 3, 4, 6, 7]
        assert keys.shape[-1] != values.shape[-1]
        assert_close("keys", layer.keys, keys[..., kept, :])
        assert_close("values", layer.values, values[..., kept, :])


# --- the self-test ---


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What the self-test logs, beginning with nothing known."""
    lines: list[str] = []
    monkeypatch.setattr(selftest, "_verdicts", {})
    monkeypatch.setattr(selftest.logger, "warning", lambda text, *args: lines.append(text % args))
    return lines


TAKEN = [(kind, dtype) for kind in (*TARGETS, "falcon") for dtype in (torch.float32, torch.bfloat16)] + [("deepseek", torch.float32)]


@pytest.mark.parametrize(("kind", "dtype"), TAKEN, ids=[f"{kind}-{dtype}" for kind, dtype in TAKEN])
def test_targets_that_take_trees(warnings, kind, dtype):
    target = build_other(kind) if kind in OTHER_TARGETS else build_target(kind)
    try:
        assert selftest.why_no_trees(target.to(dtype)) is None
    finally:
        target.float()
    assert warnings == []


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon_alibi"])
def test_targets_that_do_not(warnings, prompt, kind):
    """Positions counted by slot: they fall back to chains, and say so once."""
    target = build_other(kind)
    drafter = build_drafter(target)
    greedy = {"max_new_tokens": 16, "do_sample": False}
    chain, chain_stats = speculate(target, drafter, prompt, **greedy)
    assert warnings == []
    for _ in range(2):
        output, stats = speculate(target, drafter, prompt, draft_tree_top_k=4, **greedy)
        assert_close("text", output, target.generate(prompt, **greedy))
        assert_close("text of chains", output, chain)
        assert stats.accepted_per_round == chain_stats.accepted_per_round
        assert stats.drafted_per_position == chain_stats.drafted_per_position
    assert len(warnings) == 1
    assert f"chains instead of trees for {type(target).__name__}" in warnings[0]


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_an_implementation_without_masks_is_not_even_tried(warnings, monkeypatch, implementation):
    target = build_target("llama")
    monkeypatch.setattr(target.config, "_attn_implementation_internal", implementation)
    monkeypatch.setattr(target, "forward", lambda *args, **kwargs: pytest.fail("the target was run"))
    assert f"attention implementation {implementation}" in selftest.why_no_trees(target)
    assert len(warnings) == 1


def test_layers_of_another_type_are_not_even_tried(warnings, monkeypatch):
    target = build_target("gemma3_window_8")
    monkeypatch.setattr(target.config, "layer_types", ["chunked_attention", "full_attention"] * 2)
    monkeypatch.setattr(target, "forward", lambda *args, **kwargs: pytest.fail("the target was run"))
    assert "layers of type chunked_attention" in selftest.why_no_trees(target)


def wrong_mask(original):
    """A target that reads a tree as if it were a sequence."""

    def forward(*args, attention_mask=None, **kwargs):
        if attention_mask is not None:
            masks = attention_mask.values() if isinstance(attention_mask, dict) else [attention_mask]
            for mask in masks:
                mask[..., -mask.shape[2] :] = mask.new_full((mask.shape[2],) * 2, torch.finfo(mask.dtype).min).triu(1)
        return original(*args, attention_mask=attention_mask, **kwargs)

    return forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", TARGETS)
def test_a_tree_read_as_a_sequence_is_noticed(warnings, monkeypatch, kind, dtype):
    target = build_target(kind).to(dtype)
    monkeypatch.setattr(target, "forward", wrong_mask(target.forward))
    assert "differ from those over its paths" in selftest.why_no_trees(target)


def test_positions_read_by_slot_are_noticed(warnings, monkeypatch):
    target = build_target("gpt2")
    original = target.forward
    monkeypatch.setattr(target, "forward", lambda *args, position_ids=None, **kwargs: original(*args, **kwargs))
    assert "differ from those over its paths" in selftest.why_no_trees(target)


def test_the_self_test_runs_once_and_draws_no_random_numbers(warnings, prompt, monkeypatch):
    target = build_target("llama")
    drafter, calls, tried = build_drafter(target), [], selftest._error
    monkeypatch.setattr(selftest, "_error", lambda model: calls.append(model) or tried(model))
    for seed in (0, 1):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        assert selftest.why_no_trees(target) is None
        assert torch.get_rng_state().equal(state)
        speculate(target, drafter, prompt, max_new_tokens=6, draft_tree_top_k=3)
    assert len(calls) == 1


@pytest.mark.parametrize("order", [("falcon", "falcon_alibi"), ("falcon_alibi", "falcon")], ids="-".join)
def test_a_verdict_is_not_that_of_another_config(warnings, order):
    for kind in order:
        assert (selftest.why_no_trees(build_other(kind)) is None) == (kind == "falcon")


def test_low_precision_does_not_hide_a_wrong_target(warnings):
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
