"""A prompt in pieces is the same prompt: `prefill_chunk_size` saves memory and changes nothing else.

B sequences, L tokens of the prompt, n captured layers of width ht.
"""

import pytest
import torch
from close import TARGET_FORWARD, assert_close
from conftest import WIDTH, build_drafter, build_target, greedy_text
from draftings import DRAFTINGS, steady_clock
from observers import speculate
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.generation import unread_states
from eagle31_hf.generation.drafter_runner import DrafterRunner
from eagle31_hf.generation.unread_states import AuxStates
from eagle31_hf.targets.layers import CapturedStates

LONG = 400
# Three prompts with 0, 4 and 12 tokens of padding.
PADDED = torch.tensor(
    [[1, 2, 3, 5, 8, 2, 7, 10, 2, 10, 6, 8, 2], [0, 0, 0, 0, 9, 0, 7, 7, 1, 6, 2, 2, 5], [0] * 12 + [3]]
)
MASK = torch.tensor([[1] * 13, [0] * 4 + [1] * 9, [0] * 12 + [1]])


def knobs(way: str) -> dict:
    return {**DRAFTINGS[way], "max_new_tokens": 15, "do_sample": False}


@pytest.fixture
def runners(monkeypatch) -> list[DrafterRunner]:
    """The drafter's side of every call."""
    made, original = [], DrafterRunner.__init__

    def note(self, *args):
        original(self, *args)
        made.append(self)

    monkeypatch.setattr(DrafterRunner, "__init__", note)
    return made


@pytest.fixture
def fused(monkeypatch) -> list[int]:
    """How many tokens of each sequence the drafter takes at once."""
    counts, original = [], Eagle31DrafterModel.fuse_target_states

    def note(self, states: Tensor, *masks) -> Tensor:
        counts.append(states.shape[1])
        return original(self, states, *masks)

    monkeypatch.setattr(Eagle31DrafterModel, "fuse_target_states", note)
    return counts


@pytest.fixture
def handed(monkeypatch) -> list[int]:
    """How many tokens' states are put together for the drafter, in which pieces it then takes them."""
    counts, original = [], DrafterRunner.read

    def note(self, unread: AuxStates, *depth):
        counts.append(unread.states.shape[1])
        return original(self, unread, *depth)

    monkeypatch.setattr(DrafterRunner, "read", note)
    return counts


@pytest.fixture
def held(monkeypatch) -> list[int]:
    """How many tokens' states are held, noted whenever one is captured."""
    counts, original = [], CapturedStates.append

    def note(self, index: int, states: Tensor) -> None:
        original(self, index, states)
        counts.append(max(sum(part.shape[1] for part in parts) for parts in self._chunks))

    monkeypatch.setattr(CapturedStates, "append", note)
    return counts


# --- the same text ---


def test_with_a_static_cache(target, drafter):
    """transformers then fills the cache before the first chunk."""
    prompt = greedy_text(target)[:, :13]
    output, _ = speculate(
        target, drafter, prompt, cache_implementation="static", prefill_chunk_size=5, **knobs("chain")
    )
    assert_close("text", output, target.generate(prompt, max_new_tokens=15, do_sample=False))


# --- the same drafts ---


@pytest.mark.parametrize(
    ("name", "size"), [("eagle31", 1), ("two_layers", 3), ("window_4", 3), ("window_4", 13), ("mla", 50)]
)
def test_the_drafters_cache_is_that_of_the_whole_prompt(target, make_drafter, runners, name, size):
    """Else drafts would be worse after a chunked prompt, and nobody would notice."""
    drafter, prompt = make_drafter(target, name), greedy_text(target)[:, :13]
    whole = speculate(target, drafter, prompt, **knobs("chain"))[1]
    pieces = speculate(target, drafter, prompt, prefill_chunk_size=size, **knobs("chain"))[1]
    assert pieces.accepted_per_round == whole.accepted_per_round
    assert_same_states_read(*runners)


@pytest.mark.parametrize("size", [1, 3])
def test_the_drafters_cache_of_a_batch(target, drafter, runners, size):
    for chunk in (None, size):
        common = {"attention_mask": MASK, "pad_token_id": 0, "prefill_chunk_size": chunk}
        speculate(target, drafter, PADDED, **common, **knobs("chain"))
    assert_same_states_read(*runners)


def assert_same_states_read(whole: DrafterRunner, pieces: DrafterRunner) -> None:
    """As much of every sequence, and the same keys of it."""
    assert pieces.lengths.host == whole.lengths.host
    layers = zip(pieces.past_key_values.layers, whole.past_key_values.layers, strict=True)
    for i, (got, expected) in enumerate(layers):
        window = expected.window or 100
        for b, length in enumerate(whole.lengths.host):
            first = max(0, length - window + 1)
            for name, ours, theirs in zip(("keys", "values"), got.buffers, expected.buffers, strict=True):
                ours, theirs = (
                    ours[b, :, first - got.first : length - got.first],
                    theirs[b, :, first - expected.first : length - expected.first],
                )
                assert_close(f"{name} of layer {i}, sequence {b}", ours, theirs, TARGET_FORWARD)


# --- memory ---


@pytest.mark.parametrize(("way", "size"), [("chain", 1), ("tree", 3), ("auto", 13), ("chain", 50)])
def test_states_are_read_as_soon_as_their_chunk_has_run(target, drafter, fused, held, way, size):
    """Held until the prompt has ended, they would take the memory the chunks were to save."""
    prompt = greedy_text(target)[:, :13]
    with steady_clock(target, drafter):
        output, _ = speculate(target, drafter, prompt, prefill_chunk_size=size, **(knobs(way) | {"max_new_tokens": 1}))
    assert output.shape[1] == 14
    num_chunks, chunk = -(-13 // size), min(size, 13)
    assert sum(fused) == 12, "the state of the last token waits for the token after it"
    assert max(fused) <= chunk
    assert max(held) == chunk
    assert len(held) == 3 * num_chunks


@pytest.mark.parametrize("batch", [False, True], ids=["alone", "batch"])
def test_a_long_prompt_is_read_in_pieces(target, drafter, runners, fused, handed, monkeypatch, batch):
    """A drafter's forward over all of it at once would be the largest of the whole call, and so would a copy of all the
    states."""
    prompt, common = (
        (PADDED, {"attention_mask": MASK, "pad_token_id": 0}) if batch else (greedy_text(target)[:, :13], {})
    )
    whole = speculate(target, drafter, prompt, **common, **knobs("chain"))[1]
    assert max(fused) == max(handed) == 12
    fused.clear()
    handed.clear()
    monkeypatch.setattr(unread_states, "READ_AT_ONCE", 5)
    pieces = speculate(target, drafter, prompt, **common, **knobs("chain"))[1]
    assert max(fused) == max(handed) == 5
    assert pieces.accepted_per_round == whole.accepted_per_round
    assert_same_states_read(*runners)


@pytest.mark.parametrize("way", DRAFTINGS)
def test_drafting_goes_on_after_long_bursts_were_read_ahead(target, drafter, fused, monkeypatch, prompt, way):
    """As they are where nothing has been drafted for long: states are not held until drafting pays again."""
    monkeypatch.setattr(unread_states, "READ_AT_ONCE", 2)
    with steady_clock(target, drafter):
        output, stats = speculate(target, drafter, prompt, **knobs(way))
    assert_close("text", output, target.generate(prompt, max_new_tokens=15, do_sample=False))
    assert max(stats.accepted_per_round) > 2


class LivingBytes(TorchDispatchMode):
    """The most bytes that tensors made within it took at the same time."""

    def __init__(self):
        super().__init__()
        self.peak, self._living = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for x in tree_leaves(output):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self._living.setdefault(storage.data_ptr(), (StorageWeakRef(storage), storage.nbytes()))
        self._living = {where: entry for where, entry in self._living.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._living.values()))
        return output


@torch.no_grad()
def peak(target, prompt: Tensor, **kwargs) -> int:
    with LivingBytes() as living:
        target.generate(prompt, max_new_tokens=1, do_sample=False, **kwargs)
    return living.peak


def test_the_drafter_adds_its_cache_and_a_chunks_states_to_the_peak():
    """Not the states of the prompt, of which a chunk is a small part."""
    target = build_target("qwen3", max_position_embeddings=1024)
    drafter = build_drafter(target, max_position_embeddings=1024)
    prompt = torch.randint(0, 11, (1, LONG), generator=torch.Generator().manual_seed(0))
    drafting = {"assistant_model": drafter, "num_assistant_tokens": 4}
    speculate(target, drafter, prompt[:, :2], max_new_tokens=2)  # what is made once, is made
    added = peak(target, prompt, prefill_chunk_size=25, **drafting) - peak(target, prompt, prefill_chunk_size=25)
    whole = peak(target, prompt, **drafting) - peak(target, prompt)
    states = 4 * LONG * 3 * WIDTH
    config = drafter.config
    own_keys = 4 * (LONG + 256 + LONG // 4) * 2 * config.num_key_value_heads * config.head_dim
    target_keys = 4 * (LONG // 4 + 256) * 4 * 2 * target.config.head_dim  # the headroom of the target's buffers
    masks = 4 * 25 * LONG * target.config.num_attention_heads  # of a chunk's rows
    assert added < own_keys + target_keys + masks
    assert whole > states, "the measure does not see the states"
