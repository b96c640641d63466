"""Fingerprints differ when what they are of does, and do not when it is only elsewhere or in a wider dtype."""

import copy
import pickle

import torch

from eagle31_hf.storage.fingerprints import digest, tokenizer_fingerprint, weights_fingerprint


def test_fingerprints_of_weights(make_target):
    target = copy.deepcopy(make_target("qwen3"))
    before = weights_fingerprint(target)
    assert before == weights_fingerprint(make_target("qwen3"))
    assert before != weights_fingerprint(make_target("llama"))
    for name, weight in target.named_parameters():
        for place in (0, -1):
            value = weight.data.flatten()[place].item()
            weight.data.view(-1)[place] = value + 1
            assert weights_fingerprint(target) != before, name
            weight.data.view(-1)[place] = value


def test_fingerprint_of_a_wider_dtype_and_of_integers(make_target):
    target = copy.deepcopy(make_target("qwen3")).bfloat16()
    narrow = weights_fingerprint(target)
    assert weights_fingerprint(target.float()) == narrow
    weight = target.model.layers[0].mlp.up_proj
    weight.weight = torch.nn.Parameter(torch.zeros(7, 3, dtype=torch.int8), requires_grad=False)
    zeros = weights_fingerprint(target)
    weight.weight.data[0, 0] = 1
    assert weights_fingerprint(target) != zeros


def test_fingerprints_of_tokenizers(tokenizer):
    before = tokenizer_fingerprint(tokenizer)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert tokenizer_fingerprint(again) == before
    again.chat_template = "{{ messages }}"
    assert tokenizer_fingerprint(again) != before
    for change in ({"eos_token": "a"}, {"additional_special_tokens": ["<x>"]}):
        again = pickle.loads(pickle.dumps(tokenizer))
        again.add_special_tokens(change)
        assert tokenizer_fingerprint(again) != before
    again = pickle.loads(pickle.dumps(tokenizer))
    again.add_tokens(["zz"])
    assert tokenizer_fingerprint(again) != before


def test_digests_tell_where_a_part_ends():
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("ab") == digest(b"ab")
