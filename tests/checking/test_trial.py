"""What a `Trial` finds in a tiny target: that drafts decide nothing when sampling, that nothing is kept, that training
fails."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OpenAIGPTConfig, XLMConfig

from eagle31_hf.checking import check_target, trial
from eagle31_hf.checking.check import CAPABILITIES
from eagle31_hf.generation import decoding

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4}
SPREAD = {"initializer_range": 0.5, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}


def make_trial(model_class: type = LlamaForCausalLM) -> trial.Trial:
    torch.manual_seed(0)
    target = model_class(LlamaConfig(**SMALL | SPREAD)).eval()
    return trial.Trial(target, trial.build_drafter(target))


def test_the_two_samples_are_drafted_differently():
    calls: list[dict[int, int]] = []  # for each call: length of the text -> the first token drafted after it

    def noting(target, *rules):
        first: dict[int, int] = {}
        calls.append(first)

        class Noting(Judge):
            def row_by_row(self, texts, proposal, *args):
                if proposal.ids.shape[1]:
                    first[texts.longest] = int(proposal.ids[0, 0])
                return super().row_by_row(texts, proposal, *args)

        return Noting(*rules)

    token = decoding.judge_of.set(noting)
    try:
        assert make_trial().sampling() == trial.Outcome(trial.SAME_TEXT)
    finally:
        decoding.judge_of.reset(token)
    one, other = calls
    both = one.keys() & other.keys()
    assert both
    assert any(one[length] != other[length] for length in both)


class Leaking(LlamaForCausalLM):
    """What it says of a token depends on the draft after it."""

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        out = super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        is_verifying = past_key_values is not None and past_key_values.get_seq_length() > input_ids.shape[1] > 1
        out.logits = out.logits.roll(int(input_ids[0, 1]), -1) if is_verifying else out.logits
        return out


def test_a_target_whose_text_depends_on_drafts_is_found_when_sampling():
    assert make_trial(Leaking).sampling() == trial.Outcome(
        trial.DIFFERENT, "with one seed the text depends on what is drafted"
    )


@pytest.mark.parametrize(
    "config",
    [OpenAIGPTConfig(n_embd=32, n_layer=3, n_head=2, n_positions=128), XLMConfig(emb_dim=32, n_layers=3, n_heads=2)],
    ids=["OpenAI GPT", "XLM"],
)
def test_a_target_that_keeps_no_cache_is_refused_in_these_words(config):
    report = check_target(config)
    assert {each.name: each.answer for each in report.capabilities} == dict.fromkeys(CAPABILITIES, "refused") | {
        "training": "works"
    }
    assert "keeps no cache" in report.verdict
    assert "please report" not in report.verdict


class Untrainable(LlamaForCausalLM):
    def requires_grad_(self, requires_grad=True):
        raise TypeError("no such thing")


def test_training_that_fails_is_not_called_a_refusal():
    """Nor does it keep the target from decoding with a drafter."""
    report = check_target(Untrainable(LlamaConfig(**SMALL)))
    assert (report["training"].answer, report["training"].text) == ("different", "TypeError: no such thing")
    assert (report.works, report.verdict) == (True, "works (wrong, please report it: training)")
