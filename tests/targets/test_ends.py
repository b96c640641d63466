"""What a drafter and the targets it works for have of each other: a weak tie to two tables, and nothing in copies and
files."""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from close import assert_close
from conftest import build_drafter, build_target
from factories import VOCAB, build, inputs, target

from eagle31_hf import Eagle31DrafterModel, track_acceptance
from eagle31_hf.targets import ends
from eagle31_hf.training.fresh import new_drafter

SHARED = {"share_target_embeddings": True, "share_target_head": True, "draft_vocab_size": VOCAB}
GREEDY = {"max_new_tokens": 12, "do_sample": False}
DRAFTINGS = ({}, {"num_assistant_tokens": 4}, {"num_assistant_tokens": 4, "draft_tree_top_k": 2})


def scores(drafter: Eagle31DrafterModel) -> torch.Tensor:
    tokens, states = inputs(drafter)
    with torch.no_grad():
        return drafter(tokens, target_hidden_states=states).logits


def drafted(theirs, drafter: Eagle31DrafterModel, prompt: torch.Tensor, **drafting):
    """The text, and how many drafts were accepted in every round."""
    with track_acceptance() as stats:
        text = theirs.generate(prompt, assistant_model=drafter, **GREEDY, **drafting)
    return text, stats.accepted_per_round


def storages(module) -> set[int]:
    return {weight.untyped_storage().data_ptr() for weight in module.parameters()}


def test_the_target_can_go_while_its_drafters_stay(prompt):
    theirs = build_target()
    drafters = [new_drafter(theirs, head="scratch"), new_drafter(theirs, head="scratch", share_target_head=True)]
    for drafter in drafters:
        for drafting in DRAFTINGS:
            drafted(theirs, drafter.eval(), prompt, **drafting)
    parts = [
        weakref.ref(part)
        for part in (theirs, theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight)
    ]
    del theirs
    gc.collect()
    assert [part() for part in parts] == [None, None, None]
    for drafter in drafters:
        assert drafter.get_input_embeddings() is None
        with pytest.raises(RuntimeError, match=r"no embedding yet, or no longer.*which has to be kept"):
            drafter.embed(prompt)


@pytest.mark.parametrize("fields", [{"share_target_embeddings": True}, SHARED], ids=["embedding", "embedding_and_head"])
def test_a_deep_copy_is_tied_to_the_same_target_and_has_nothing_of_it(fields):
    drafter, theirs = build(**fields), target()
    drafter.load_target_embeddings(theirs)
    copied = copy.deepcopy(drafter)
    assert copied.get_input_embeddings() is theirs.get_input_embeddings()
    assert_close("logits", scores(copied), scores(drafter))
    assert not storages(copied) & (storages(drafter) | storages(theirs))
    assert set(copied.state_dict()) == set(drafter.state_dict())
    copied.load_target_embeddings(target())  # a tie of its own
    assert drafter.get_input_embeddings() is theirs.get_input_embeddings()


@pytest.mark.parametrize("fields", [{"share_target_embeddings": True}, SHARED], ids=["embedding", "embedding_and_head"])
def test_a_pickle_holds_what_save_pretrained_would_write(fields, tmp_path):
    drafter, theirs = build(**fields), target()
    alone = len(pickle.dumps(drafter))
    drafter.load_target_embeddings(theirs)
    assert len(pickle.dumps(drafter)) == alone
    drafter.save_pretrained(tmp_path)
    written = Eagle31DrafterModel.from_pretrained(tmp_path)
    file = io.BytesIO()
    torch.save(drafter, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(drafter)), torch.load(file, weights_only=False)):
        assert other.get_input_embeddings() is None
        assert set(other.state_dict()) == set(written.state_dict())
        for name, tensor in written.state_dict().items():
            assert_close(name, other.state_dict()[name], tensor)
        other.load_target_embeddings(theirs)
        assert_close("logits", scores(other), scores(drafter))


def test_an_unpickled_drafter_ties_itself_when_it_drafts(make_target, prompt):
    theirs = make_target()
    drafter = build_drafter(theirs)
    expected = drafted(theirs, drafter, prompt, num_assistant_tokens=4)
    found = drafted(theirs, pickle.loads(pickle.dumps(drafter)), prompt, num_assistant_tokens=4)
    assert_close("text and accepted drafts", found, expected)


def test_every_thread_has_the_target_it_tied():
    """Threads that draft for different targets with one drafter do not draft with each other's tables."""
    drafter, targets = build(**SHARED), [target(), target(rms_norm_eps=1e-3)]
    targets[1].get_input_embeddings().weight.data.mul_(-1)
    expected = []
    for theirs in targets:
        drafter.load_target_embeddings(theirs)
        expected.append(scores(drafter))
    assert not torch.equal(*expected)
    found, is_tied, turns = [], threading.Event(), threading.Barrier(2)

    def draft(i: int) -> None:
        torch.set_num_threads(1)
        if i == 0:
            is_tied.wait()
        # target 1 first, as it was tied last: that is no reason to leave it out
        drafter.load_target_embeddings(targets[i])
        is_tied.set()
        turns.wait()  # both are tied now
        found.append((i, scores(drafter)))

    threads = [threading.Thread(target=draft, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, logits in found:
        assert_close(f"logits for target {i}", logits, expected[i])
    assert len(found) == 2
    assert_close("logits where it was tied last", scores(drafter), expected[1])


def test_a_thread_that_tied_nothing_has_what_was_tied_last():
    drafter, theirs, found = build(**SHARED), target(), []
    drafter.load_target_embeddings(theirs)
    thread = threading.Thread(target=lambda: found.append(drafter.get_input_embeddings()))
    thread.start()
    thread.join()
    assert found == [theirs.get_input_embeddings()]


def test_a_thread_whose_target_is_gone_is_not_given_another_threads():
    drafter, first, second = build(**SHARED), target(), target()
    drafter.load_target_embeddings(first)
    thread = threading.Thread(target=drafter.load_target_embeddings, args=(second,))
    thread.start()
    thread.join()
    assert drafter.get_input_embeddings() is first.get_input_embeddings()
    del first
    gc.collect()
    assert drafter.get_input_embeddings() is None
    with pytest.raises(RuntimeError, match=r"no embedding yet, or no longer.*load_target_embeddings"):
        scores(drafter)


# Tables in other forms.


class StoredHead(torch.nn.Linear):
    """A head whose weight is stored in a dtype that nothing is computed in, as quantized ones are: it takes states as
    they come."""

    def __init__(self, stored: torch.dtype):
        super().__init__(20, 61, bias=False)
        self.weight = torch.nn.Parameter((100 * self.weight.detach()).to(stored), requires_grad=False)

    def forward(self, states):
        return states @ self.weight.to(states.dtype).T / 100


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_states_are_not_rounded_to_what_a_head_is_stored_in(stored):
    head, states = StoredHead(stored), torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))
    assert_close("scores", ends.scores_of(head, states), head(states))
    with pytest.raises(
        ValueError, match=f"the target's head is {stored} on cpu; expected it loaded, and not quantized"
    ):
        ends.weight_of(head, "head")


def test_embeddings_that_an_adapter_wraps():
    peft = pytest.importorskip("peft")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    for kind in ("llama", "gemma3"):
        drafter, theirs = build(share_target_embeddings=True), target(kind)
        vectors = theirs.get_input_embeddings().weight[ids].detach()
        config = peft.LoraConfig(target_modules=["embed_tokens"], init_lora_weights=False)
        adapted = peft.get_peft_model(theirs, config)
        drafter.load_target_embeddings(adapted)
        layer = theirs.get_input_embeddings()
        change = (
            layer.lora_embedding_A["default"][:, ids[0]].T
            @ layer.lora_embedding_B["default"].T
            * layer.scaling["default"]
        )
        assert_close("adapted vectors", drafter.embed(ids), vectors + change, 1e-5)
        with adapted.disable_adapter():
            assert_close("vectors", drafter.embed(ids), vectors, 1e-6)


def test_a_head_of_torchs_own_quantization(recwarn):
    """Its modules hold the weight behind a method."""
    head = torch.nn.Sequential(torch.nn.Linear(20, VOCAB))
    quantized = torch.ao.quantization.quantize_dynamic(head, {torch.nn.Linear}, torch.qint8)[0]
    states = torch.randn(3, 20)
    assert_close("scores", ends.scores_of(quantized, states), quantized(states))
    with pytest.raises(ValueError, match=r"the target's head is torch.qint8 .* expected it loaded, and not quantized"):
        ends.weight_of(quantized, "head")
