"""The drafter model: what each flag does, its states, its vocabulary and tables, saving and loading.

B batch, T tokens, n captured states, ht target width, h drafter width, V target vocabulary, Vd draft vocabulary.
"""

import copy
import json
import stat
from pathlib import Path

import pytest
import torch
from close import FORWARD, assert_close
from factories import (
    ATTENTIONS,
    DRAFT_VOCAB,
    EAGLE3,
    NORMS,
    VARIANTS,
    VOCAB,
    WIDTH,
    build,
    chain,
    inputs,
    rms_norm,
    target,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModel, DynamicCache

from eagle31_hf import Eagle31Config, Eagle31DrafterModel

SHARED = {"share_target_embeddings": True}
SCALED = 1e-3  # RMSNorm of 100 x and of x differ by its eps, 1e-5 beside a mean square of 0.25 and more
CHANGED = 0.01  # far above rounding, far below what a weight that matters does


def two_models(**flags) -> tuple[Eagle31DrafterModel, Eagle31DrafterModel]:
    """The same weights without and with the flags, which hold none of their own."""
    without, with_flags = build(**EAGLE3), build(**EAGLE3 | flags)
    with_flags.load_state_dict(without.state_dict())
    return without, with_flags


@pytest.mark.parametrize("length", [1, 13])
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_shapes(fields, length):
    drafter = build(**fields)
    tokens, states = inputs(drafter, length)
    out = drafter(tokens, target_hidden_states=states, use_cache=True)
    assert out.logits.shape == (2, length, drafter.config.draft_vocab_size)
    assert out.last_hidden_state.shape == (2, length, WIDTH)
    assert out.past_key_values.get_seq_length() == length
    assert drafter.fuse_target_states(states).shape == (2, length, WIDTH)
    assert drafter(tokens, hidden_states=out.last_hidden_state).past_key_values is None


@pytest.mark.parametrize("given", ["neither", "both"])
def test_exactly_one_state_is_read(given):
    drafter = build()
    tokens, states = inputs(drafter)
    both = {"target_hidden_states": states, "hidden_states": states[..., :WIDTH]} if given == "both" else {}
    with pytest.raises(
        ValueError, match=f"got {given} of target_hidden_states and hidden_states; expected exactly one"
    ):
        drafter(tokens, **both)


@torch.no_grad()
def test_which_state_is_read_does_not_depend_on_widths():
    drafter = build(aux_hidden_state_layer_ids=[2])  # n * ht == h
    tokens, states = inputs(drafter)
    fused = drafter.fuse_target_states(states)
    by_target = drafter(tokens, target_hidden_states=states).logits
    assert_close("fused by hand", drafter(tokens, hidden_states=fused).logits, by_target)
    assert (drafter(tokens, hidden_states=states).logits - by_target).abs().max() > CHANGED


@torch.no_grad()
def test_norm_output_changes_what_is_fed_on_and_nothing_before():
    without, with_norm = two_models(norm_output=True)
    tokens, states = inputs(without)
    one, other = without(tokens, target_hidden_states=states), with_norm(tokens, target_hidden_states=states)
    assert_close("logits of depth 0", other.logits, one.logits)
    assert_close("state", other.last_hidden_state, rms_norm(one.last_hidden_state, without.norm.weight), FORWARD)
    deeper = [m(tokens, hidden_states=o.last_hidden_state).logits for m, o in ((without, one), (with_norm, other))]
    assert (deeper[0] - deeper[1]).abs().max() > CHANGED


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("flags", [{}, EAGLE3], ids=["post_norm", "pre_norm"])
@torch.no_grad()
def test_the_head_reads_the_state_normed_once(flags, depth):
    drafter = build(**flags)
    tokens, states = inputs(drafter)
    logits, state = chain(drafter, tokens, states, 5, depth + 1)[depth]
    normed = state if drafter.config.norm_output else rms_norm(state, drafter.norm.weight)
    assert_close("logits", logits, drafter.lm_head(normed), FORWARD)


@pytest.mark.parametrize("flags", NORMS.values(), ids=NORMS)
@torch.no_grad()
def test_fused_states_are_their_definition(flags):
    drafter = build(**flags)
    _, states = inputs(drafter)
    if drafter.config.fc_norm:
        parts = zip(states.split(WIDTH, dim=-1), drafter.fc_norm, strict=True)
        states = torch.cat([rms_norm(part, norm.weight) for part, norm in parts], dim=-1)
    if drafter.config.norm_before_fc:
        states = rms_norm(states, drafter.input_norm.weight)
    expected = states @ drafter.fc.weight.T
    assert_close("fused", drafter.fuse_target_states(inputs(drafter)[1]), expected, FORWARD)


@pytest.mark.parametrize("scaled", [0, 1, 2, "all"])
@pytest.mark.parametrize("flags", NORMS.values(), ids=NORMS)
@torch.no_grad()
def test_a_captured_state_100_times_as_large(flags, scaled):
    drafter = build(**flags)
    tokens, states = inputs(drafter)
    larger = states.clone()
    part = slice(None) if scaled == "all" else slice(scaled * WIDTH, (scaled + 1) * WIDTH)
    larger[..., part] *= 100
    one, other = (drafter(tokens, target_hidden_states=s).logits for s in (states, larger))
    # the layer's own norm does too
    hides_common_factor = drafter.config.norm_before_fc or drafter.config.norm_before_residual
    if drafter.config.fc_norm or (hides_common_factor and scaled == "all"):
        assert_close("logits", other, one, SCALED)
    else:
        assert (one - other).abs().max() > CHANGED


@pytest.mark.parametrize("is_normed", [False, True], ids=["plain_residual", "norm_before_residual"])
@torch.no_grad()
def test_where_the_residual_starts(is_normed):
    drafter = build(**EAGLE3, norm_before_residual=is_normed)
    layer = drafter.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    tokens, states = inputs(drafter)
    fused = drafter.fuse_target_states(states)
    expected = rms_norm(fused, layer.hidden_norm.weight) if is_normed else fused
    assert_close("residual", drafter(tokens, target_hidden_states=states).last_hidden_state, expected, FORWARD)


@pytest.mark.parametrize("half", ["embedding", "state"])
@torch.no_grad()
def test_attention_reads_the_embedding_half_first(half):
    drafter = build(**EAGLE3)
    columns = slice(0, WIDTH) if half == "embedding" else slice(WIDTH, None)
    attention = drafter.layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[:, columns] = 0
    tokens, states = inputs(drafter)
    attended = []
    attention.register_forward_hook(lambda module, args, output: attended.append(output[0]))
    drafter(tokens, target_hidden_states=states)
    drafter(tokens.flip(1), target_hidden_states=states)
    drafter(tokens, target_hidden_states=states.flip(1))
    other_tokens, other_states = ((one - attended[0]).abs().max() > CHANGED for one in attended[1:])
    assert (bool(other_tokens), bool(other_states)) == (half == "state", half == "embedding")


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_rows_fed_in_pieces_equal_one_forward(fields):
    drafter, cache = build(**fields), DynamicCache()
    tokens, states = inputs(drafter)
    whole = drafter(tokens, target_hidden_states=states)
    pieces = [
        drafter(rows, target_hidden_states=given, past_key_values=cache)
        for rows, given in zip(tokens.split((5, 1, 7), dim=1), states.split((5, 1, 7), dim=1), strict=True)
    ]
    assert_close("logits", torch.cat([p.logits for p in pieces], dim=1), whole.logits, FORWARD)
    assert_close("states", torch.cat([p.last_hidden_state for p in pieces], dim=1), whole.last_hidden_state, FORWARD)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_a_cached_chain_equals_one_without_cache(fields, attention):
    drafter, slot, depth = build(attention, **fields), 6, 5
    tokens, states = inputs(drafter)
    rows = drafter.fuse_target_states(states[:, : slot + 1])
    for k, (logits, state) in enumerate(chain(drafter, tokens, states, slot, depth)):
        out = drafter(tokens[:, 1 : slot + 2 + k], hidden_states=rows)
        assert_close(f"logits at depth {k}", out.logits[:, -1], logits, FORWARD)
        assert_close(f"state at depth {k}", out.last_hidden_state[:, -1], state, FORWARD)
        rows = torch.cat((rows, out.last_hidden_state[:, -1:]), dim=1)


@torch.no_grad()
def test_positions_are_relative_and_continue_the_cache():
    drafter = build()
    tokens, states = inputs(drafter)
    default = drafter(tokens, target_hidden_states=states).logits
    shifted = drafter(tokens, target_hidden_states=states, position_ids=9 + torch.arange(13)[None]).logits
    stretched = drafter(tokens, target_hidden_states=states, position_ids=2 * torch.arange(13)[None]).logits
    assert_close("all shifted by 9", shifted, default, FORWARD)
    assert (stretched - default).abs().max() > CHANGED


@pytest.mark.parametrize("kept", [1, 4, 13])
@torch.no_grad()
def test_logits_to_keep(kept):
    drafter = build()
    tokens, states = inputs(drafter)
    whole, last = (
        drafter(tokens, target_hidden_states=states),
        drafter(tokens, target_hidden_states=states, logits_to_keep=kept),
    )
    assert_close("logits", last.logits, whole.logits[:, -kept:], FORWARD)
    assert_close("state", last.last_hidden_state, whole.last_hidden_state)


@torch.no_grad()
def test_logit_scale():
    plain, halved = build(), build(logit_scale=0.5)
    tokens, states = inputs(plain)
    one, other = plain(tokens, target_hidden_states=states), halved(tokens, target_hidden_states=states)
    assert_close("logits", other.logits, 0.5 * one.logits)
    assert_close("state", other.last_hidden_state, one.last_hidden_state)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_bfloat16(fields, attention):
    drafter = build(attention, **fields)
    tokens, states = inputs(drafter)
    expected = drafter(tokens, target_hidden_states=states).logits.softmax(-1)
    drafter.bfloat16()
    out = drafter(tokens, target_hidden_states=states.bfloat16())
    assert (out.logits.dtype, out.last_hidden_state.dtype) == (torch.bfloat16, torch.bfloat16)
    assert_close("probabilities", out.logits.float().softmax(-1), expected, 0.1)  # bf16 keeps 8 bits of logits up to 5
    assert drafter.d2t is None or drafter.d2t.dtype == torch.int64
    assert all(logits.isfinite().all() for logits, _ in chain(drafter, tokens, states.bfloat16(), 6, 4))


# its new name is not in transformers 5.17
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["tensor_hooks", "reentrant"])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    def gradients(is_checkpointed: bool) -> dict:
        drafter = build(**VARIANTS["two_layers"]).train()
        if is_checkpointed:
            drafter.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        tokens, states = inputs(drafter)
        drafter(tokens, target_hidden_states=states).logits.square().sum().backward()
        return {name: weight.grad for name, weight in drafter.named_parameters()}

    expected = gradients(False)
    for name, gradient in gradients(True).items():
        assert_close(name, gradient, expected[name])
        assert gradient.any(), name


@pytest.mark.parametrize("shared", [False, True], ids=["own_embedding", "targets_embedding"])
@torch.no_grad()
def test_a_deep_copy_computes_the_same_with_weights_of_its_own(shared):
    drafter, theirs = build(share_target_embeddings=shared), target()
    drafter.load_target_embeddings(theirs)
    tokens, states = inputs(drafter)
    expected = drafter(tokens, target_hidden_states=states).logits
    other = copy.deepcopy(drafter)
    drafter.fc.weight.zero_()
    assert_close("logits", other(tokens, target_hidden_states=states).logits, expected)


# The target's tables.


@pytest.mark.parametrize("shares_head", [False, True], ids=["own_head", "targets_head"])
@torch.no_grad()
def test_the_targets_tables_are_used_without_a_copy(shares_head):
    ours, theirs = build(**SHARED, share_target_head=shares_head, draft_vocab_size=VOCAB), target()
    names = set(ours.state_dict())
    ours.load_target_embeddings(theirs)
    table, head = theirs.get_input_embeddings(), theirs.get_output_embeddings()
    assert ours.get_input_embeddings().weight.data_ptr() == table.weight.data_ptr()
    assert (ours.get_output_embeddings() is head) == shares_head
    assert set(ours.state_dict()) == names == {name for name, _ in ours.named_parameters()}
    assert not names & {"embed_tokens.weight"}
    assert ("lm_head.weight" in names) != shares_head
    assert not any(module in (table, head) for module in ours.modules())
    tokens, states = inputs(ours)
    out = ours(tokens, target_hidden_states=states)
    assert_close("logits", out.logits, (head if shares_head else ours.lm_head)(out.last_hidden_state), FORWARD)
    ours.to(torch.bfloat16)
    assert (table.weight.dtype, head.weight.dtype) == (torch.float32, torch.float32)
    assert ours(tokens, target_hidden_states=states.bfloat16()).logits.dtype == torch.bfloat16


@torch.no_grad()
def test_the_last_target_is_the_one_used():
    ours, one, other = build(**SHARED), target(), target()
    ours.load_target_embeddings(one)
    ours.load_target_embeddings(other)
    assert ours.get_input_embeddings() is other.get_input_embeddings()


@pytest.mark.parametrize("width", [WIDTH, 28], ids=["same_width", "wider_target"])
@torch.no_grad()
def test_a_table_of_its_own_needs_no_target(width):
    drafter = build(target_hidden_size=width)
    tokens, states = inputs(drafter)
    before = drafter(tokens, target_hidden_states=states).logits
    drafter.load_target_embeddings(target(hidden_size=width))
    assert drafter.get_input_embeddings() is drafter.embed_tokens
    assert_close("logits", drafter(tokens, target_hidden_states=states).logits, before)


@torch.no_grad()
def test_set_input_embeddings_makes_the_table_its_own():
    drafter = build(**SHARED)
    drafter.set_input_embeddings(copy.deepcopy(target().get_input_embeddings()))
    assert not drafter.config.share_target_embeddings
    assert "embed_tokens.weight" in drafter.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_a_scaled_table_gives_its_unscaled_rows(dtype):
    ours, theirs = build(**SHARED).to(dtype), target("gemma3").to(dtype)
    ours.load_target_embeddings(theirs)
    tokens, table = inputs(ours)[0], theirs.get_input_embeddings()
    assert (table(tokens) - table.weight[tokens]).abs().max() > CHANGED
    assert_close("rows", ours.embed(tokens), table.weight[tokens])


@pytest.mark.parametrize(
    ("fields", "missing"), [(SHARED, "embedding"), ({"share_target_head": True, "draft_vocab_size": VOCAB}, "head")]
)
def test_what_no_target_has_given_is_named(fields, missing):
    drafter = build(**fields)
    tokens, states = inputs(drafter)
    with pytest.raises(RuntimeError, match=rf"no {missing} yet.*Call drafter.load_target_embeddings\(target\)"):
        drafter(tokens, target_hidden_states=states)


@pytest.mark.parametrize(
    ("fields", "found", "expected"),
    [
        pytest.param({"hidden_size": 28}, "width is 28", "expects 20", id="wider"),
        pytest.param({"vocab_size": 200}, "200 ids", "drafter's 61", id="more_ids"),
    ],
)
@pytest.mark.parametrize("shared", [False, True], ids=["own_embedding", "targets_embedding"])
def test_another_target_is_refused(fields, found, expected, shared):
    drafter = build(share_target_embeddings=shared, target_model="a/target")
    with pytest.raises(ValueError, match="made for a/target; pass that target") as error:
        drafter.load_target_embeddings(target(**fields))
    assert found in str(error.value)
    assert expected in str(error.value)
    assert drafter.get_input_embeddings() is drafter.embed_tokens


# The draft vocabulary.


@pytest.mark.parametrize("order", ["ascending", "none"])
def test_set_draft_vocabulary(order):
    drafter = build()
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB]
    ids = ids.sort().values if order == "ascending" else ids
    drafter.set_draft_vocabulary(ids)
    assert_close("ids", drafter.draft_to_target_ids(), ids)
    assert (drafter.d2t.dtype, drafter.t2d.dtype) == (torch.int64, torch.bool)
    assert drafter.t2d.nonzero().flatten().tolist() == sorted(ids.tolist())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        pytest.param(range(DRAFT_VOCAB - 1), r"got 36 ids for a draft vocabulary of 37 of 61", id="too_few"),
        pytest.param([0, *range(DRAFT_VOCAB - 1)], r"several draft ids to target id 0", id="repeated"),
        pytest.param([VOCAB, *range(DRAFT_VOCAB - 1)], r"target id 61; expected 0 to 60", id="out_of_range"),
    ],
)
def test_a_faulty_draft_vocabulary_is_refused_and_changes_nothing(ids, message):
    drafter = build()
    before = drafter.d2t.clone(), drafter.t2d.clone()
    with pytest.raises(ValueError, match=message):
        drafter.set_draft_vocabulary(torch.tensor(list(ids)))
    assert_close("d2t, t2d", (drafter.d2t, drafter.t2d), before)


def test_a_full_vocabulary_has_no_map():
    drafter = build(draft_vocab_size=VOCAB)
    assert drafter.draft_to_target_ids() is None
    assert not {"d2t", "t2d"} & set(drafter.state_dict())
    with pytest.raises(ValueError, match="got 61 ids for a draft vocabulary of 61 of 61"):
        drafter.set_draft_vocabulary(torch.arange(VOCAB))


def test_a_new_drafter_proposes_the_first_ids():
    drafter = Eagle31DrafterModel(Eagle31Config(vocab_size=9, draft_vocab_size=4, hidden_size=8, num_attention_heads=2))
    assert drafter.draft_to_target_ids().tolist() == [0, 1, 2, 3]
    assert drafter.t2d.tolist() == [True] * 4 + [False] * 5
    assert all(weight.isfinite().all() for weight in drafter.parameters())


# Saving and loading.


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    drafter = build(target_model="a/target")
    drafter.generation_config.num_assistant_tokens = 7
    drafter.generation_config.assistant_confidence_threshold = 0.25
    drafter.save_pretrained(folder)
    return folder


def edited(saved: Path, folder: Path, tensors: dict) -> Path:
    """A copy of the checkpoint with some tensors replaced, added, or, where None, left out."""
    weights = load_file(saved / "model.safetensors") | tensors
    save_file(
        {name: w for name, w in weights.items() if w is not None},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text((saved / "config.json").read_text())
    return folder


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("reader", "shards"), [(Eagle31DrafterModel, "shards"), (AutoModel, "one_file")])
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_round_trip_is_exact(fields, reader, shards, tmp_path):
    drafter = build(**fields)
    drafter.generation_config.num_assistant_tokens = 7
    drafter.generation_config.assistant_confidence_threshold = 0.25
    drafter.save_pretrained(tmp_path, **({"max_shard_size": "4KB"} if shards == "shards" else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shards == "shards")
    loaded = reader.from_pretrained(tmp_path)
    assert type(loaded) is Eagle31DrafterModel
    assert not loaded.training
    assert set(loaded.state_dict()) == set(drafter.state_dict())
    for name, tensor in drafter.state_dict().items():
        assert_close(name, loaded.state_dict()[name], tensor)
    tokens, states = inputs(drafter)
    logits = [m(tokens, target_hidden_states=states).logits for m in (loaded, drafter)]
    assert_close("logits", *logits)
    assert loaded.generation_config.num_assistant_tokens == 7
    assert loaded.generation_config.assistant_confidence_threshold == 0.25


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("reader", [Eagle31DrafterModel, AutoModel])
def test_loading_as_bfloat16_leaves_the_map_alone(reader, saved):
    loaded, weights = reader.from_pretrained(saved, dtype=torch.bfloat16), load_file(saved / "model.safetensors")
    assert (loaded.d2t.dtype, loaded.t2d.dtype) == (torch.int64, torch.bool)
    assert loaded.rotary_emb.inv_freq.dtype == torch.float32
    for name, tensor in loaded.state_dict().items():
        assert_close(name, tensor, weights[name].bfloat16() if weights[name].is_floating_point() else weights[name])


def test_the_files_say_what_the_contract_says(saved):
    weights = load_file(saved / "model.safetensors")
    assert (weights["d2t"].dtype, weights["d2t"].shape) == (torch.int64, (DRAFT_VOCAB,))
    assert (weights["t2d"].dtype, weights["t2d"].shape) == (torch.bool, (VOCAB,))
    config = json.loads((saved / "config.json").read_text())
    assert (config["model_type"], config["target_model"]) == ("eagle31", "a/target")
    knobs = json.loads((saved / "generation_config.json").read_text())
    assert (knobs["num_assistant_tokens"], knobs["assistant_confidence_threshold"]) == (7, 0.25)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "4KB"}], ids=["one file", "shards"])
def test_all_files_may_be_read_by_the_same_users(options, tmp_path):
    build().save_pretrained(tmp_path, **options)
    (tmp_path / "new").touch()
    assert len({stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_assistant_tokens", 4.0), ("prompt_lookup_num_tokens", -3), ("assistant_confidence_threshold", 1.0)],
)
def test_knobs_that_would_not_load_are_not_saved(name, value, tmp_path):
    drafter = build()
    setattr(drafter.generation_config, name, value)
    for save in (lambda: drafter.save_pretrained(tmp_path / "saved"), lambda: drafter.push_to_hub("a/b")):
        with pytest.raises(ValueError, match=rf"{name} is {value}, in the drafter's generation_config; expected"):
            save()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_knobs_gets_the_defaults(saved, tmp_path):
    loaded = Eagle31DrafterModel.from_pretrained(edited(saved, tmp_path, {}))
    new = build().generation_config
    assert loaded.generation_config.num_assistant_tokens == new.num_assistant_tokens == "auto"
    assert loaded.generation_config.assistant_confidence_threshold == new.assistant_confidence_threshold == 0.0


@pytest.mark.parametrize(
    "t2d", [torch.ones(VOCAB, dtype=torch.bool), torch.arange(VOCAB) < DRAFT_VOCAB], ids=["all_ones", "first_ids"]
)
def test_t2d_follows_d2t(t2d, saved, tmp_path):
    loaded = Eagle31DrafterModel.from_pretrained(edited(saved, tmp_path, {"t2d": t2d}))
    assert loaded.t2d.nonzero().flatten().tolist() == sorted(loaded.draft_to_target_ids().tolist())


FAULTS = {  # of others, tests/checkpoints/test_hostile.py
    "missing_weight": ({"fc.weight": None}, r"missing \['fc.weight'\], unexpected none"),
    "missing_embedding": ({"embed_tokens.weight": None}, r"missing \['embed_tokens.weight'\]"),
    "extra_tensor": ({"fc.bias": torch.zeros(WIDTH)}, r"missing none, unexpected \['fc.bias'\]"),
    "weight_of_another_shape": ({"fc.weight": torch.zeros(WIDTH, 2 * WIDTH)}, r"fc\.weight.*\(20, 40\).*\(20, 60\)"),
    "infinity": ({"norm.weight": torch.full((WIDTH,), torch.inf)}, r"norm\.weight holds NaN or infinite"),
}


@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}], ids=["strict", "ignore_mismatched_sizes"])
@pytest.mark.parametrize(("tensors", "message"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_checkpoint_is_refused(tensors, message, options, saved, tmp_path):
    path = edited(saved, tmp_path, tensors)
    with pytest.raises(ValueError, match=message) as error:
        Eagle31DrafterModel.from_pretrained(path, **options)
    assert str(error.value).startswith(str(path))


def test_loading_info_can_be_asked_for(saved):
    model, info = Eagle31DrafterModel.from_pretrained(saved, output_loading_info=True)
    assert isinstance(model, Eagle31DrafterModel)
    assert not info["missing_keys"]
