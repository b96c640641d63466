"""States and logits that training reads of a target: those the target alone has, texts packed or not.

B sequences, T tokens.
"""

from dataclasses import asdict

import pytest
import torch
from close import FORWARD, assert_close
from conftest import VOCAB, build_target
from torch import nn

from eagle31_hf.targets.layers import target_states
from eagle31_hf.training.documents import Text, texts_of
from eagle31_hf.training.ends import Scoring, find_scoring
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.store import save_target_parts
from eagle31_hf.training.target import StoredTarget, TargetReader, groups_of

DOCUMENTS = torch.tensor([[1] * 9 + [2] * 11, [1] * 14 + [0] * 6, [1] * 3 + [2] * 2 + [3] * 15])
SCALED = {"gemma3_window_8": ({"final_logit_softcapping": 3.0}, Scoring(1.0, 3.0)), "llama": ({}, Scoring())}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_window_8", "mistral_window_8"])
def test_every_text_is_read_as_it_is_alone(kind):
    target = build_target(kind)
    layers = len(next(module for module in target.modules() if isinstance(module, nn.ModuleList)))
    reader = TargetReader(target, [0, 1, layers])
    tokens = torch.randint(VOCAB, DOCUMENTS.shape, generator=torch.Generator().manual_seed(0))
    states, last = reader.read(tokens, DOCUMENTS)
    for b, start, end in texts_of(DOCUMENTS):
        wanted, logits = target_states(target, tokens[b : b + 1, start:end], [0, 1, layers])
        assert_close("states", states[b, start:end], wanted[0], FORWARD)
        assert_close("logits", reader.logits(last[b, start:end]), logits[0].float(), FORWARD)
    assert not states[1, 14:].any()
    assert not last[1, 14:].any()


@pytest.mark.parametrize("kind", SCALED)
def test_how_logits_are_made_is_found(kind):
    fields, wanted = SCALED[kind]
    assert find_scoring(build_target(kind, **fields)) == wanted


def test_a_scale_is_found():
    from transformers import AutoModelForCausalLM, CohereConfig

    config = CohereConfig(
        vocab_size=VOCAB,
        hidden_size=36,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        logit_scale=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    assert find_scoring(AutoModelForCausalLM.from_config(config).eval()).scale == pytest.approx(0.25, abs=1e-4)


def test_a_target_that_does_something_else_with_its_head_is_refused():
    target = build_target("llama", vocab_size=VOCAB + 1)  # another vocabulary: this model is changed
    head = target.lm_head
    target.lm_head = nn.Sequential(head, nn.Softmax(dim=-1))
    target.lm_head.weight = head.weight
    target.forward = lambda input_ids, use_cache: type(
        "Output", (), {"logits": head(target.model(input_ids).last_hidden_state) ** 2}
    )
    with pytest.raises(ValueError, match="do not follow from its last state"):
        find_scoring(target)


def test_a_target_that_overflows_is_refused():
    target = build_target("llama", vocab_size=VOCAB + 2)  # another vocabulary: this model is changed
    target.lm_head.weight.data[0] = float("inf")
    with pytest.raises(ValueError, match=r"not finite on a probe in torch.float32; load it in another dtype"):
        find_scoring(target)


def test_groups_hold_texts_of_like_length_within_bounds():
    texts = [Text(*text) for text in ((0, 0, 100), (0, 100, 110), (1, 0, 60), (1, 60, 111), (2, 0, 9))]
    groups = groups_of(texts, 200)
    assert sorted(text for group in groups for text in group) == sorted(texts)
    for group in groups:
        lengths = [text.length for text in group]
        assert 2 * min(lengths) >= max(lengths)
        assert len(group) * max(lengths) <= 200
    assert len(groups) == 3


def test_a_stored_target_says_what_the_target_says(tmp_path):
    target = build_target("llama")
    reader = TargetReader(target, [1])
    tokens = torch.arange(8)[None] % VOCAB
    _, last = reader.read(tokens, torch.ones_like(tokens))
    save_target_parts(tmp_path, target, asdict(reader.scoring))
    kept = StoredTarget(tmp_path, "me/target")
    assert_close("logits", kept.logits(last[0]), reader.logits(last[0]), FORWARD)
    assert not any(weight.requires_grad for weight in kept.parameters())
    ours, theirs = new_drafter(kept), new_drafter(target)
    for name, weight in theirs.state_dict().items():
        assert_close(name, ours.state_dict()[name], weight, 0.0)
    assert ours.get_input_embeddings().weight.equal(target.get_input_embeddings().weight)
