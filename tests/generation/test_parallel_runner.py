"""P-EAGLE: all levels are drafted by one forward, as the method is described, and the text stays the target's."""

from copy import deepcopy

import pytest
import torch
from accelerate import cpu_offload
from close import assert_close
from conftest import VOCAB
from draftings import CHAIN_OR_TREE, steady_clock
from observers import noting, speculate
from recorded import Recorded
from torch import Tensor

from eagle31_hf import (
    Eagle31DrafterModel,
    Eagle31Trainer,
    Eagle31TrainingArguments,
    track_acceptance,
    upgrade_to_eagle31,
)
from eagle31_hf.checkpoints.knobs import KNOBS
from eagle31_hf.diagnostics.chains import recorded_chains
from eagle31_hf.generation.captured.seam import seams
from eagle31_hf.targets.layers import target_states

MASK, DEPTH = 7, 4
CHAIN = {"num_assistant_tokens": DEPTH, "max_new_tokens": 24, "do_sample": False}
DRAFTERS = {
    "full": {},
    "pruned": {"name": "pruned"},
    "eagle3_norms_two_layers": {"name": "eagle3", "num_hidden_layers": 2},
    "window": {"name": "window_4"},
}


@pytest.fixture
def parallel(make_drafter, target):
    return lambda name="eagle31", **fields: make_drafter(target, name, mask_token_id=MASK, **fields)


@torch.no_grad()
def drafted_after(target, drafter: Eagle31DrafterModel, text: Tensor, depth: int) -> Tensor:
    """The likeliest drafts (depth,) after a text (1, L), by one forward over all of it and the masks after it."""
    states, _ = target_states(target, text, drafter.config.resolve_layer_ids(target.config.num_hidden_layers))
    masks = drafter.mask_hidden.expand(1, depth - 1, -1)  # as if they were the target's
    tokens = torch.cat((text[:, 1:], torch.full((1, depth - 1), MASK)), dim=1)
    logits = drafter(tokens, target_hidden_states=torch.cat((states[:, : text.shape[1] - 1], masks), dim=1)).logits
    ids = logits[0, -depth:].argmax(-1)
    return ids if drafter.d2t is None else drafter.draft_to_target_ids()[ids]


@pytest.mark.parametrize("case", DRAFTERS)
def test_drafts_are_those_of_one_forward_over_text_and_masks(target, parallel, prompt, case):
    drafter = parallel(**DRAFTERS[case])
    forwards = []
    handle = drafter.register_forward_hook(lambda *_: forwards.append(1))
    with noting(lambda sequences, drafts, logits: (sequences.prefix(0).clone(), drafts.ids.clone())) as rounds:
        speculate(target, drafter, prompt, **CHAIN)
    handle.remove()
    drafted = [(text, ids) for text, ids in rounds if ids.shape[1]]
    assert len(drafted) > 4
    for text, ids in drafted:
        assert ids[0].tolist() == drafted_after(target, drafter, text, DEPTH)[: ids.shape[1]].tolist()
    assert len(forwards) == len(drafted) + 1  # that of the prompt


def test_in_a_batch_each_sequence_has_its_own_masks(target, parallel, prompt):
    """Their lengths differ, and so do the tokens that are read before the masks."""
    drafter = parallel()
    prompts = torch.cat((prompt, torch.tensor([[0, 0, 4, 9, 1]])))
    mask = (torch.arange(5) >= torch.tensor([[0], [2]])).long()

    def texts(sequences, drafts, logits):
        return [sequences.prefix(b).clone() for b in range(2)], drafts.ids.clone(), list(sequences.finished)

    with noting(texts) as rounds:
        speculate(target, drafter, prompts, attention_mask=mask, pad_token_id=0, **CHAIN)
    lengths = set()
    for (first, second), ids, finished in rounds:
        for b, text in enumerate((first, second[:, 2:])):
            if ids.shape[1] and not finished[b]:
                assert ids[b].tolist() == drafted_after(target, drafter, text, DEPTH)[: ids.shape[1]].tolist()
        lengths.add(first.shape[1] - second.shape[1])
    assert len(lengths) > 1


WAYS = {
    **CHAIN_OR_TREE,
    "auto": {"num_assistant_tokens": "auto", "prompt_lookup_num_tokens": 0},
    "sampled": {"num_assistant_tokens": "auto", "do_sample": True, "temperature": 0.8},
    "a_batch": {"num_assistant_tokens": 3},
    "static": {"num_assistant_tokens": 3, "cache_implementation": "static"},
}


@pytest.mark.parametrize("way", WAYS)
def test_text_stays_the_targets(target, parallel, make_drafter, prompt, way):
    """A seed's text is that of any other drafter, where numbers belong to places in the text."""
    drafter, another = parallel(), make_drafter(target, "pruned")
    options = {"max_new_tokens": 30, "do_sample": False} | WAYS[way]
    prompt = torch.cat((prompt, prompt.flip(1), prompt % 3)) if way == "a_batch" else prompt
    torch.manual_seed(5)
    if options["do_sample"]:
        expected = target.generate(prompt, assistant_model=another, **options)
    else:
        expected = target.generate(prompt, **{name: value for name, value in options.items() if name not in KNOBS})
    torch.manual_seed(5)
    with steady_clock(target, drafter):
        found, stats = speculate(target, drafter, prompt, **options)
    assert_close("text", found, expected)
    assert sum(stats.accepted_per_position) > 0


def test_an_offloaded_drafter(target, parallel, prompt):
    drafter = parallel("two_layers")
    expected, stats = speculate(target, drafter, prompt, **CHAIN)
    offloaded = cpu_offload(deepcopy(drafter), execution_device=torch.device("cpu"))
    offloaded.load_target_embeddings(target)
    found, again = speculate(target, offloaded, prompt, **CHAIN)
    assert_close("text", found, expected)
    assert again.accepted_per_round == stats.accepted_per_round


def test_a_mask_that_the_target_has_no_row_for_is_refused(target, make_drafter):
    with pytest.raises(ValueError, match=f"has {VOCAB} rows, none for its mask_token_id {VOCAB}"):
        make_drafter(target, "padded_vocabulary", mask_token_id=VOCAB)


def test_rounds_are_not_captured(target, parallel, prompt):
    with seams(lambda device: Recorded()), track_acceptance() as stats:
        target.generate(
            prompt, attention_mask=torch.ones_like(prompt), assistant_model=parallel(), pad_token_id=0, **CHAIN
        )
    assert "the drafter drafts all levels at once (P-EAGLE)" in stats.summary()


def test_what_goes_level_after_level_is_refused(target, parallel, tmp_path):
    drafter = parallel("eagle3")
    with pytest.raises(ValueError, match=r"P-EAGLE drafter .*cannot be upgraded"):
        upgrade_to_eagle31(drafter, target, [torch.arange(VOCAB)[None]])
    with pytest.raises(ValueError, match=r"P-EAGLE drafter .*cannot be trained"):
        Eagle31Trainer(drafter, Eagle31TrainingArguments(output_dir=str(tmp_path)), target=target)
    with pytest.raises(ValueError, match=r"P-EAGLE drafter .*cannot be measured"), recorded_chains(target, drafter):
        pass
