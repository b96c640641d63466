"""What a drafter returns beside its logits, as transformers' models do: a loss, hidden states, attention weights,
tuples.

B batch, T tokens, V target vocabulary, Vd draft vocabulary.
"""

import pytest
import torch
from close import FORWARD, assert_close
from factories import EAGLE3, MLA, VOCAB, build, inputs
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

MODELS = {
    "eagle31": {},
    "eagle3": EAGLE3,
    "full_vocabulary": {"draft_vocab_size": VOCAB},
    "two_layers": {"num_hidden_layers": 2},
    "mla": MLA,
}


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def drafter(request):
    return build("eager", **request.param)


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_of_the_tokens_after_the_inputs(drafter):
    tokens, states = inputs(drafter)
    labels = tokens.clone()
    labels[0, :4] = -100
    out = drafter(tokens, target_hidden_states=states, labels=labels)
    ids = torch.arange(VOCAB) if drafter.d2t is None else drafter.draft_to_target_ids()
    draft_ids = {target_id: draft_id for draft_id, target_id in enumerate(ids.tolist())}
    losses = [
        cross_entropy(out.logits[b, t], torch.tensor(draft_ids[labels[b, t + 1].item()]))
        for b in range(len(tokens))
        for t in range(tokens.shape[1] - 1)
        if labels[b, t + 1].item() in draft_ids
    ]
    assert len(losses) < (tokens.shape[1] - 1) * 2, "every label counts"
    assert_close("mean", out.loss, torch.stack(losses).mean(), FORWARD)
    summed = drafter(tokens, target_hidden_states=states, labels=labels, num_items_in_batch=torch.tensor(7)).loss
    assert_close("over several batches", summed, torch.stack(losses).sum() / 7, 10 * FORWARD)
    assert drafter(tokens, target_hidden_states=states).loss is None


def test_labels_that_cannot_be_scored():
    drafter = build()
    tokens, states = inputs(drafter)
    for kept, logits in ((3, r"of shape \(2, 3, 37\)"), (None, "none")):
        with pytest.raises(
            ValueError,
            match=rf"labels are of shape \(2, 13\), logits {logits}; expected a label and logits for every token",
        ):
            drafter(tokens, target_hidden_states=states, labels=tokens, logits_to_keep=kept)
    absent = (~drafter.t2d).nonzero().flatten()[:1].expand(2, 13)
    # as in transformers where nothing counts
    assert drafter(tokens, target_hidden_states=states, labels=absent).loss.isnan()
    with pytest.raises(IndexError):
        drafter(tokens, target_hidden_states=states, labels=torch.full_like(tokens, VOCAB))


@torch.no_grad()
def test_hidden_states_begin_with_the_fused_one_and_end_with_the_one_fed_on(drafter):
    tokens, states = inputs(drafter)
    out = drafter(tokens, target_hidden_states=states, output_hidden_states=True)
    assert len(out.hidden_states) == drafter.config.num_hidden_layers + 1
    assert_close("first", out.hidden_states[0], drafter.fuse_target_states(states))
    assert_close("last", out.hidden_states[-1], out.last_hidden_state)
    assert drafter(tokens, target_hidden_states=states).hidden_states is None


@torch.no_grad()
def test_attention_weights_are_those_of_the_tokens_seen(drafter):
    tokens, states = inputs(drafter)
    whole = drafter(tokens, target_hidden_states=states, output_attentions=True, use_cache=True)
    heads, layers = drafter.config.num_attention_heads, drafter.config.num_hidden_layers
    assert [weights.shape for weights in whole.attentions] == [(2, heads, 13, 13)] * layers
    for weights in whole.attentions:
        assert_close("sums", weights.sum(-1), torch.ones(2, heads, 13), FORWARD)
        assert not weights.triu(1).any()
    past = drafter(tokens[:, :12], target_hidden_states=states[:, :12], use_cache=True).past_key_values
    last = drafter(tokens[:, 12:], target_hidden_states=states[:, 12:], past_key_values=past, output_attentions=True)
    for one, other in zip(last.attentions, whole.attentions, strict=True):  # MLA: absorbed here, expanded there
        assert_close("of one query", one, other[:, :, 12:], FORWARD)


@torch.no_grad()
def test_a_tuple_holds_what_the_output_does(drafter):
    tokens, states = inputs(drafter)
    options = {"target_hidden_states": states, "labels": tokens, "output_hidden_states": True}
    out = drafter(tokens, **options)
    assert_close("tuple", drafter(tokens, **options, return_dict=False), out.to_tuple())
    assert list(out) == ["loss", "logits", "last_hidden_state", "hidden_states"]
    drafter.config.return_dict = False
    assert_close("tuple by config", drafter(tokens, **options), out.to_tuple())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
def test_a_plain_trainer_trains_a_drafter(checkpointing, tmp_path):
    drafter = build("sdpa")
    tokens, states = inputs(drafter, batch=4)
    rows = [
        {"input_ids": ids, "target_hidden_states": state, "labels": ids}
        for ids, state in zip(tokens, states, strict=True)
    ]
    args = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=8,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        gradient_checkpointing=checkpointing,
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = Trainer(drafter, args, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0], losses
