"""What a `Trial` finds in a tiny target: that drafts decide nothing when sampling, that nothing is kept, that training
fails."""

import pytest
import torch
from observers import noting
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, OpenAIGPTConfig, XLMConfig

from eagle31_hf.cache_names import IS_RENAMED, cache_in
from eagle31_hf.checking import check_target, trial
from eagle31_hf.generation.sequences import Sequences
from eagle31_hf.generation.tree import DraftTokens

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4}
SPREAD = {"initializer_range": 0.5, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}


def make_trial(model_class: type = LlamaForCausalLM) -> trial.Trial:
    torch.manual_seed(0)
    target = model_class(LlamaConfig(**SMALL | SPREAD)).eval()
    return trial.Trial(target, trial.build_drafter(target))


def first_draft(sequences: Sequences, drafts: DraftTokens, logits: Tensor) -> tuple[Sequences, int, int | None]:
    """The call's sequences, their length, and the first token drafted after them."""
    return sequences, sequences.longest, int(drafts.ids[0, 0]) if drafts.ids.shape[1] else None


def test_the_two_samples_are_drafted_differently():
    with noting(first_draft) as rounds:
        assert make_trial().capability("sampling").answer == trial.WORKS
    calls: dict[Sequences, dict[int, int]] = {}  # of each call: length of the text -> the first token drafted after it
    for call, length, token in rounds:
        calls.setdefault(call, {}).update({} if token is None else {length: token})
    one, other = calls.values()
    both = one.keys() & other.keys()
    assert both
    assert any(one[length] != other[length] for length in both)


class Leaking(LlamaForCausalLM):
    """What it says of a token depends on the draft after it."""

    def forward(self, input_ids=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        cache = cache_in(kwargs)
        is_verifying = cache is not None and cache.get_seq_length() > input_ids.shape[1] > 1
        out.logits = out.logits.roll(int(input_ids[0, 1]), -1) if is_verifying else out.logits
        return out


def test_a_target_whose_text_depends_on_drafts_is_found_when_sampling():
    assert make_trial(Leaking).capability("sampling") == trial.Capability(
        "sampling", trial.DIFFERENT, "with one seed the text depends on what is drafted"
    )


@pytest.mark.parametrize(
    "config",
    [OpenAIGPTConfig(n_embd=32, n_layer=3, n_head=2, n_positions=128), XLMConfig(emb_dim=32, n_layers=3, n_heads=2)],
    ids=["OpenAI GPT", "XLM"],
)
def test_a_target_that_keeps_no_cache_is_refused_in_these_words(config):
    report = check_target(config)
    assert {each.name: each.answer for each in report.capabilities} == dict.fromkeys(trial.CAPABILITIES, "refused") | {
        "training": "works"
    }
    # XLM's class fills a cache from transformers 5.24 on, and does not return it
    is_dropped = IS_RENAMED and config.model_type == "xlm"
    assert ("kept nothing in a cache" if is_dropped else "keeps no cache") in report.verdict
    assert "please report" not in report.verdict


class Untrainable(LlamaForCausalLM):
    def requires_grad_(self, requires_grad=True):
        raise TypeError("no such thing")


def test_training_that_fails_is_not_called_a_refusal():
    """Nor does it keep the target from decoding with a drafter."""
    report = check_target(Untrainable(LlamaConfig(**SMALL)))
    assert (report["training"].answer, report["training"].text) == ("different", "TypeError: no such thing")
    assert (report.works, report.verdict) == (True, "works (wrong, please report it: training)")
