"""A captured round moves hardly more bytes than it must: those of the weights, and of the context's keys and values.
Counted at the shapes of real models on the meta device, whose tensors have shapes and no data.

python tests/generation/test_round_bytes.py prints the figures.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine import DRAFT_VOCABULARY, SHAPES, SHARED_FIELDS
from on_gpu.floors import Floor
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, LogitsProcessorList, Qwen3Config

from eagle31_hf import Eagle31Config, Eagle31DrafterModel
from eagle31_hf.cache import adopt
from eagle31_hf.cache.arena import Arena, move_into
from eagle31_hf.generation.captured import fused_drafter
from eagle31_hf.generation.captured.carry import Carry
from eagle31_hf.generation.captured.drafting import Parts, Side
from eagle31_hf.generation.captured.round import Round
from eagle31_hf.generation.draft_sampler import DraftSampler
from eagle31_hf.generation.planning.plan import Plan
from eagle31_hf.generation.rejection_sampler import RejectionSampler
from eagle31_hf.targets.layers import capture_states
from eagle31_hf.targets.recurrent import Mixers

CONTEXT, CAPACITY, WIDTH = 2048, 4096, 9  # tokens of the context; slots of the arenas; tokens a round commits at most
AT_MOST = 1.05  # times the bytes that have to be read
TARGETS = {"llama-3.1-8b": LlamaConfig, "qwen3-8b": Qwen3Config}


def chain_of(depth: int) -> Plan:
    return Plan(depth, top_k=1, max_nodes=depth + 1)


PLANS = {"chain of 5": chain_of(5), "tree of 60": Plan(8, top_k=8, max_width=8, max_nodes=60)}
MOVE_NOTHING = {
    "view", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze", "squeeze", "alias",
    "detach", "split", "split_with_sizes", "as_strided", "unbind", "empty", "empty_like", "new_empty", "empty_strided",
    "lift_fresh",
}  # fmt: skip


def size(*tensors: Tensor) -> int:
    """Returns the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def of_tree_attention(args: tuple, out: Tensor) -> int:
    """Returns the bytes of queries and outputs, and of the keys and values of slots that hold a token."""
    q, keys, values = args[:3]
    return size(q, out) + (size(keys) + size(values)) * (CONTEXT + q.shape[2]) // keys.shape[2]


# Operations that read or write a part of a tensor they are given: their arguments and result -> bytes they move.
OF_A_PART = {
    "embedding": lambda args, out: 2 * size(out),
    "gather": lambda args, out: 2 * size(out) + size(args[2]),
    "index_select": lambda args, out: 2 * size(out),
    "scatter_": lambda args, out: 3 * size(args[3]),
    "tree_attention": of_tree_attention,
    "rope_append": lambda args, out: 2 * size(*args[0]) + size(*args[1]),
    "embed_norms": lambda args, out: 2 * size(out),
    "likeliest_tokens": lambda args, out: size(args[0], *out),
}


class Bytes(TorchDispatchMode):
    """A context that counts the bytes of every operation's tensors, `moved`, by the operation's name."""

    def __init__(self):
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in OF_A_PART:
            self.moved[name] += OF_A_PART[name](args, out)
        elif name not in MOVE_NOTHING:
            leaves = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)}
            self.moved[name] += size(*leaves.values())
        return out


def models(name: str) -> tuple[Any, Eagle31DrafterModel]:
    """Makes a target of a real shape and a drafter for it, in bf16 and without data."""
    fields = SHAPES[name]
    shared = {key: fields[key] for key in SHARED_FIELDS}
    vocabularies = {"vocab_size": fields["vocab_size"], "draft_vocab_size": DRAFT_VOCABULARY}
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(TARGETS[name](**fields), dtype=torch.bfloat16).eval()
        config = Eagle31Config(**shared, **vocabularies, aux_hidden_state_layer_ids=[2, 16, 29])
        drafter = Eagle31DrafterModel(config).eval().to(torch.bfloat16)
    drafter.set_input_embeddings(target.get_input_embeddings())  # `load_target_embeddings` wants data
    return target, drafter


def side(model: Any) -> Side:
    """Gives a model a cache in an arena that holds a context."""
    cache, arena = adopt.slot_cache(model.config)[0], Arena(CAPACITY)
    return Side(model, cache, move_into(cache, arena), arena, mixers=Mixers(model, cache))


def draft_sampler(drafter: Eagle31DrafterModel) -> DraftSampler:
    """Makes the sampler of greedy drafts. It reads the draft vocabulary, which is here one with data."""
    held = drafter.d2t
    drafter.d2t = torch.zeros(DRAFT_VOCABULARY, dtype=torch.long)
    sampler = DraftSampler(drafter, drafter.config.vocab_size, LogitsProcessorList(), None, 0.0, 1)
    drafter.d2t, sampler.draft_ids = held, held
    return sampler


@contextmanager
def round_of(target: Any, drafter: Eagle31DrafterModel) -> Iterator[Round]:
    """A context with a round for one sequence of CONTEXT tokens, decoded greedily."""
    states = drafter.like.new_empty(0, drafter.config.num_aux_states * drafter.config.target_hidden_size)
    carry = Carry.empty((1, 1), WIDTH, CAPACITY, states)
    round_, of_target = Round(carry), side(target)
    with capture_states(target, drafter.config.aux_hidden_state_layer_ids, of_target.cache) as of_target.states:
        round_.parts = Parts(
            of_target,
            side(drafter),
            draft_sampler(drafter),
            RejectionSampler(LogitsProcessorList(), None),
            [None] * (target.config.num_hidden_layers + 1),
        )
        yield round_


@pytest.fixture
def without_data(monkeypatch):
    answer_without_data(monkeypatch)


def answer_without_data(monkeypatch):
    """Answers whether rows of an embedding can be read, which needs data. That drafters of these classes are fused is
    shown where nodes are counted."""
    monkeypatch.setattr(fused_drafter, "_can_look_up", lambda table: True)


def moved_by(run: Callable[[], None]) -> Counter[str]:
    """Counts the bytes that operations of a function move, by name. It is run once before: that makes the arenas'
    buffers."""
    run()
    with Bytes() as counted:
        run()
    return counted.moved


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", TARGETS)
def test_bytes_of_a_round(name, plan, without_data):
    target, drafter = models(name)
    floor = Floor.of(target, drafter)
    with torch.no_grad(), round_of(target, drafter) as round_:
        moved = moved_by(lambda: round_.draft(plan)), moved_by(lambda: round_.verify(plan))
    needed = floor.draft(CONTEXT, plan.depth), floor.verify(CONTEXT)
    assert all(one.total() >= least for one, least in zip(moved, needed, strict=True))  # nothing was left out
    assert sum(one.total() for one in moved) <= AT_MOST * sum(needed), moved


@pytest.mark.parametrize("name", TARGETS)
def test_bytes_of_a_draft_step(name, without_data):
    target, drafter = models(name)
    floor = Floor.of(target, drafter)
    with torch.no_grad(), round_of(target, drafter) as round_:
        five, six = (moved_by(lambda depth=depth: round_.draft(chain_of(depth))) for depth in (5, 6))
    needed = floor.draft(CONTEXT, 6) - floor.draft(CONTEXT, 5)
    assert needed <= six.total() - five.total() <= AT_MOST * needed, six - five


def print_figures():
    """Prints bytes over the least there can be: of drafting, of verifying, and of the round."""
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        answer_without_data(monkeypatch)
        for name in TARGETS:
            target, drafter = models(name)
            floor = Floor.of(target, drafter)
            with round_of(target, drafter) as round_:
                for title, plan in PLANS.items():
                    parts = (lambda plan=plan: round_.draft(plan)), (lambda plan=plan: round_.verify(plan))
                    moved = [moved_by(part).total() for part in parts]
                    needed = floor.draft(CONTEXT, plan.depth), floor.verify(CONTEXT)
                    shares = [a / b for a, b in zip((*moved, sum(moved)), (*needed, sum(needed)), strict=True)]
                    print(name, title, "draft {:.4f}, verify {:.4f}, round {:.4f}".format(*shares))


if __name__ == "__main__":
    print_figures()
