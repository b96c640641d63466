"""Trees as the target reads them: the masks that verify them, and the cache they leave behind."""

import families
import pytest
import torch
from close import TARGET_FORWARD, assert_close
from conftest import TARGETS, VOCAB
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig

from eagle31_hf.cache.adopt import keep_paths, slots
from eagle31_hf.cache.masks import SlotMask
from eagle31_hf.cache.transfer import Commit, Mirrored
from eagle31_hf.generation.tree import DraftTokens
from eagle31_hf.targets.masks import slot_masks

CPU = torch.device("cpu")

IDS = torch.tensor([[8, 3, 7, 1, 1, 4, 9, 0, 5, 2]])  # of all nodes, the root first
TREE = DraftTokens.tree(IDS[:, 1:], torch.tensor([[0, 0, 1, 2, 2, 3, 4, 6, 8]]), depth=5)
BRANCH = [0, 1, 3, 6, 8]  # an accepted path
VERIFIED = [(kind, attention) for kind in TARGETS for attention in ("eager", "sdpa")] + [
    ("DeepSeek-V3 (MLA)", "eager"),
    ("Falcon, rope", "eager"),
]


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("length", [2, 7, 13])
@pytest.mark.parametrize(("kind", "attention"), VERIFIED, ids=[f"{k}-{a}" for k, a in VERIFIED])
def test_a_tree_is_read_as_its_paths_are(make_target, kind, attention, length, padding):
    """Logits at every node; and after one path was kept, those of two more tokens, the second in the cache as it is
    given back."""
    target = (make_target if kind in TARGETS else families.build_target)(kind, attention)
    text = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
    past = DynamicCache(config=target.config)
    mask = (torch.arange(padding + length) >= padding).long()[None]
    padded, total = torch.nn.functional.pad(text, (padding, 0)), padding + length
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    committed = torch.cat((text, IDS[:, BRANCH]), dim=1)

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
        placement.place(Mirrored([total]), TREE.num_nodes, CPU)
        seen = mask.bool() if padding else None
        shared = SlotMask(Mirrored([total]), TREE.ancestors, TREE.depths, TREE.depths, seen)
        masks = slot_masks(target, past, shared)
        logits = target(
            IDS, attention_mask=masks, position_ids=length + TREE.depths, past_key_values=past, use_cache=True
        ).logits
        placement.clear()
        for node in range(TREE.num_nodes):
            whole = torch.cat((text, IDS[:, TREE.ancestors[0, node]]), dim=1)
            assert_close(f"logits at node {node}", logits[0, node], target(whole).logits[0, -1], TARGET_FORWARD)
        keep_paths(past, Mirrored([total]), Commit(CPU, IDS[:, BRANCH].tolist(), [BRANCH], [False]))
        assert past.get_seq_length() == total + len(BRANCH)
        check_next(6)
    assert past.get_seq_length() == total + len(BRANCH) + 1
    check_next(2)


# another tree in another sequence
SECOND = DraftTokens.tree(TREE.ids, torch.tensor([[0, 1, 1, 3, 4, 0, 6, 7, 8]]), depth=5)


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
    shared = SlotMask(Mirrored(starts), ancestors, depths, depths, seen if any(padding) else None)
    got = slot_masks(target, past, shared)
    num_nodes, seen_from = depths.shape[1], 0 if window is None else max(0, min(starts) - window + 1)
    assert got.shape == (2, 1, num_nodes, max(starts) + num_nodes - seen_from)
    assert set(got.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}, "a mask is added"
    for b, start in enumerate(starts):
        for node in range(num_nodes):
            position = start + int(depths[b, node])
            for column, other in enumerate(range(seen_from - start, max(starts) + num_nodes - start)):
                if other < 0:  # a token of the text
                    expected, at = start + other >= padding[b], start + other
                else:  # a node, or nothing yet
                    expected = other < num_nodes and bool(ancestors[b, node, other])
                    at = start + int(depths[b, other]) if expected else 0
                expected = expected and (window is None or position - at < window)
                assert (got[b, 0, node, column] == 0) == expected, f"sequence {b}, node {node}, slot {start + other}"
