"""Captured rounds as a whole: recorded and replayed without Python, ended in the midst of a round, failing, shared by
threads, and captured anew when a model has changed."""

import copy
import re
import threading
from types import MethodType

import close
import pytest
import torch
from batches import known_prompts, left_padded
from conftest import PROMPT, build_drafter, build_target, import_peft
from observers import Countdown, Puts, num_hooks
from recorded import Recorded
from torch.nn.modules.module import register_module_forward_hook
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from eagle31_hf import Eagle31DrafterModel, track_acceptance
from eagle31_hf.cache import adopt
from eagle31_hf.generation.captured import kept as kept_module
from eagle31_hf.generation.captured.executor import CapturedExecutor
from eagle31_hf.generation.captured.kept import release
from eagle31_hf.generation.captured.seam import Uncaptured, own_workspaces, seams
from eagle31_hf.targets import fused

CHAIN = {"num_assistant_tokens": 4}
TREE = {"num_assistant_tokens": 4, "draft_tree_top_k": 3, "draft_tree_total_tokens": 10}
PLANS = {"chain": CHAIN, "tree": TREE, "auto": {"num_assistant_tokens": "auto"}}
LENGTH = 16
Pair = tuple[PreTrainedModel, Eagle31DrafterModel]


pytestmark = pytest.mark.usefixtures("nothing_is_kept")


@pytest.fixture
def pair() -> Pair:
    """Models of their own for every test, which may change them."""
    target = build_target("llama")
    return target, build_drafter(target)


def asked(**options) -> dict:
    ids = torch.tensor(PROMPT)
    given = {"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": LENGTH, "do_sample": False}
    return given | {"pad_token_id": 6} | options


def decode(pair: Pair, seam, plan: str = "chain", **options):
    """Decodes; returns what `generate` returns, and its statistics."""
    target, drafter = pair
    with seams(lambda device: seam), track_acceptance() as stats:
        return target.generate(**asked(**options), assistant_model=drafter, **PLANS[plan]), stats


def state_of(target: PreTrainedModel) -> tuple:
    """Returns all that a call must leave as it was."""
    forwards = [vars(module).get("forward") for module in target.modules()]
    return target.config.to_dict(), target.config._attn_implementation, num_hooks(target), forwards


# --- recorded and replayed ---


@pytest.mark.parametrize(("kind", "plan"), [("llama", "chain"), ("qwen3", "tree"), ("llama", "auto")])
def test_replays_give_the_text_of_the_target(kind, plan):
    """Every operation runs on the memory it was recorded with: nothing of a round may be baked in."""
    target = build_target(kind)
    pair, seam = (target, build_drafter(target)), Recorded()
    for length in (5, 9, 7):
        ids = torch.tensor(known_prompts(target, length))
        options = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
        text, stats = decode(pair, seam, plan, **options)
        assert text.tolist() == target.generate(**asked(**options)).tolist()
        assert set(stats.executions) == {f"as {Recorded.name}"}
    if plan != "auto":  # which captures plan after plan
        assert seam.captures == 2  # a draft and a verify, once
    assert seam.replays > 3 * seam.captures


def test_replays_of_a_batch_whose_sequences_end_early(pair):
    target, _ = pair
    ids, mask = left_padded(known_prompts(target, 5, 7, 9))
    options = {"inputs": ids, "attention_mask": mask}
    free = target.generate(**asked(**options))
    ends = int(free[0, ids.shape[1] + 3])  # at another place in every sequence
    for plan in PLANS:
        text, _ = decode(pair, Recorded(), plan, **options, eos_token_id=ends)
        assert text.tolist() == target.generate(**asked(**options, eos_token_id=ends)).tolist()


def test_sampled_batch_whose_sequences_go_at_their_own_pace(pair):
    """The noise of a slot is the sequence's own, however far others are ahead, or long since ended."""
    target, drafter = pair
    ids, mask = left_padded([*known_prompts(target, 5, 7), [4], [9, 0, 7, 7, 1, 2, 2]])
    options = {"inputs": ids, "attention_mask": mask, "do_sample": True, "temperature": 0.3, "max_new_tokens": 24}
    options |= {"eos_token_id": 9}
    torch.manual_seed(3)
    expected = target.generate(**asked(**options), assistant_model=drafter, **TREE)
    for plan in PLANS:
        torch.manual_seed(3)
        assert decode(pair, Recorded(), plan, **options)[0].tolist() == expected.tolist()


@pytest.mark.parametrize("plan", ["chain", "tree"])
def test_calls_in_and_out_of_inference_mode(pair, plan):
    """The others write to tensors that the first call makes. (Recording sees fewer operations in that mode.)"""
    options = {"do_sample": True, "temperature": 0.7} if plan == "tree" else {}
    torch.manual_seed(3)
    expected = pair[0].generate(**asked(**options), **({"assistant_model": pair[1], **TREE} if options else {}))
    for is_on in (True, False, True):
        torch.manual_seed(3)
        with torch.inference_mode(is_on):
            text, stats = decode(pair, Uncaptured(), plan, **options)
        assert text.tolist() == expected.tolist()
        assert set(stats.executions) == {f"as {Uncaptured.name}"}


# --- how texts end ---


@pytest.mark.parametrize("plan", PLANS)
def test_text_of_every_length(pair, plan):
    whole = pair[0].generate(**asked(max_new_tokens=8)).tolist()[0]
    for length in range(1, 9):
        text, stats = decode(pair, Uncaptured(), plan, max_new_tokens=length)
        assert text.tolist() == [whole[: len(PROMPT[0]) + length]]
        assert stats.generated_tokens == length


def test_streamer_and_criteria_see_every_token(pair):
    streams, texts = [], []
    for assisted in (False, True):
        streamer, criterion = Puts(), Countdown(11)
        options = {"streamer": streamer, "stopping_criteria": [criterion]}
        if assisted:
            text, stats = decode(pair, Recorded(), "tree", **options)
            assert set(stats.executions) == {f"as {Recorded.name}"}
        else:
            expected = pair[0].generate(**asked(**options))
        streams.append(streamer.calls)
        texts.append(criterion.texts)
    assert text.tolist() == expected.tolist()
    assert streams[0] == streams[1]
    assert texts[0] == texts[1]


def test_returned_cache_is_the_callers_own(pair):
    """It holds what plain decoding leaves in it, and the next call, in the same arena, does not write to it."""
    target, _ = pair
    options = {"return_dict_in_generate": True}
    found, stats = decode(pair, Recorded(), "tree", **options)
    expected = target.generate(**asked(**options))
    assert set(stats.executions) == {f"as {Recorded.name}"}
    other = torch.tensor(known_prompts(target, 11))
    decode(pair, Recorded(), "tree", inputs=other, attention_mask=torch.ones_like(other))
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        close.assert_close("keys", ours.keys, theirs.keys, close.TARGET_FORWARD)
        close.assert_close("values", ours.values, theirs.values, close.TARGET_FORWARD)


def cache_of(kind: str, target: PreTrainedModel) -> Cache:
    """A cache of the caller's own; static ones are longer than any text here."""
    if kind == "static":
        return StaticCache(config=target.config, max_cache_len=120)
    return DynamicCache(config=target.config)


@pytest.mark.parametrize(
    ("window", "kind", "plan"),
    [(None, "dynamic", "auto"), (None, "static", "chain"), (12, "dynamic", "chain"), (12, "static", "tree")],
)
def test_a_conversation_goes_on_in_a_cache_of_the_callers(window, kind, plan):
    """Three turns: texts and caches are those of plain decoding, and every round is captured."""
    target = build_target() if window is None else build_target("mistral_window_8", sliding_window=window)
    pair, seam = (target, build_drafter(target)), Recorded()
    own, plain = cache_of(kind, target), cache_of(kind, target)
    text = said = torch.tensor(PROMPT)
    homes = []
    for turn in range(3):
        options = {"max_new_tokens": 9, "attention_mask": torch.ones_like(text)}
        text, stats = decode(pair, seam, plan, **options, inputs=text, past_key_values=own)
        said = target.generate(**asked(**options, inputs=said, past_key_values=plain))
        assert text.tolist() == said.tolist()
        assert set(stats.executions) == {f"as {Recorded.name}"}
        assert int(own.get_seq_length()) == int(plain.get_seq_length())
        for ours, theirs in zip(own.layers, plain.layers, strict=True):
            close.assert_close(f"keys of turn {turn}", ours.keys, theirs.keys, close.TARGET_FORWARD)
            close.assert_close(f"values of turn {turn}", ours.values, theirs.values, close.TARGET_FORWARD)
        homes.append([layer.keys.data_ptr() for layer in own.layers])
        text = said = torch.cat((text, torch.tensor([[3, 1]])), dim=1)
    if kind == "static":
        assert homes[0] == homes[1] == homes[2]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_has_left_the_arena_before_another_call_may_have_it(pair, monkeypatch, kind):
    """A waiting thread writes to the arena as soon as the lock is free, before the cache is handed back."""
    target, drafter = pair
    own, plain = cache_of(kind, target), cache_of(kind, target)
    handed_back, written = adopt._hand_back, []

    def meanwhile(ours, found):
        stores = [*kept_module._kept.get(drafter, {}).get(target, {}).values()]
        free = [kept for kept in stores if not kept.lock.locked()]  # held in the trials that come first
        buffers = [buffer for kept in free for buffer in kept.arenas[0].stacks]
        for buffer in buffers:
            buffer.fill_(9.0)
        handed_back(ours, found)
        assert all((buffer == 9.0).all() for buffer in buffers)  # nor is anything written there
        written.extend(buffers)

    monkeypatch.setattr(adopt, "_hand_back", meanwhile)
    decode(pair, Recorded(), past_key_values=own)
    monkeypatch.undo()
    assert written
    target.generate(**asked(past_key_values=plain))
    for ours, theirs in zip(own.layers, plain.layers, strict=True):
        close.assert_close("keys", ours.keys, theirs.keys, close.TARGET_FORWARD)


def test_a_static_cache_that_generate_makes(pair):
    target, _ = pair
    for length in (30, 12):
        options = {"cache_implementation": "static", "max_new_tokens": length}
        text, stats = decode(pair, Recorded(), **options)
        assert text.tolist() == target.generate(**asked(max_new_tokens=length)).tolist()
        assert set(stats.executions) == {f"as {Recorded.name}"}


@pytest.mark.parametrize(("plan", "value"), [("chain", float("nan")), ("tree", float("inf"))])
def test_harmful_drafts(pair, plan, value):
    """A token that the drafter proposes and the target never says, whose embedding is not finite."""
    target, drafter = pair
    with torch.no_grad():
        target.lm_head.weight[4] = 0
        drafter.lm_head.weight[4] = 1.1 * drafter.lm_head.weight[8]
    text = target.generate(**asked())
    probed, _ = decode(pair, Uncaptured(), plan)  # the probe tries all tokens of so few
    with torch.no_grad():
        target.get_input_embeddings().weight[4] = value
    release()
    harmed, stats = decode(pair, Recorded(), plan)
    assert probed.tolist() == text.tolist()
    assert harmed.tolist() == text.tolist()
    assert stats.kinds["plain"] > 0


@pytest.mark.parametrize("plan", PLANS)
def test_scores_that_are_no_distribution_are_an_error_where_a_token_is_drawn(pair, plan):
    """From the fourth token on they are NaN. A greedy text goes on, as that of the target alone."""
    target, _ = pair
    found, _ = decode(pair, Uncaptured(), plan)  # whether the target can be captured is tried while it is sound
    text = found[0, len(PROMPT[0]) :].tolist()
    poison = next(token for token in text[3:] if token not in (*PROMPT[0], *text[:3]))
    with torch.no_grad():
        target.get_input_embeddings().weight[poison] = float("nan")
    sampled = {"do_sample": True, "top_k": 1}
    with pytest.raises(RuntimeError, match="probability tensor") as expected:
        target.generate(**asked(**sampled))
    release()
    with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
        decode(pair, Uncaptured(), plan, **sampled)
    harmed, stats = decode(pair, Uncaptured(), plan)
    assert harmed.tolist() == target.generate(**asked()).tolist()
    assert set(stats.executions) == {f"as {Uncaptured.name}"}


# --- failures ---


@pytest.mark.parametrize(("plan", "fails_at"), [("chain", 1), ("tree", 2)])
def test_a_capture_that_fails_leaves_no_trace(pair, plan, fails_at):
    target, _ = pair
    before = state_of(target)
    expected = target.generate(**asked())
    seam = Recorded(fails_at)
    try:
        raise KeyError("the caller's own, which it is handling meanwhile")
    except KeyError:
        text, stats = decode(pair, seam, plan)
    assert text.tolist() == expected.tolist()
    (execution,) = stats.executions
    assert execution.startswith("eagerly: capturing failed (OutOfMemoryError")
    assert state_of(target) == before
    tries = seam.captures
    text, stats = decode(pair, seam, plan)
    assert text.tolist() == expected.tolist()
    assert seam.captures == tries  # not tried again
    assert "capturing failed" in stats.summary()


@pytest.mark.parametrize("fails_at", [3, 4])
def test_a_capture_that_fails_late(pair, fails_at):
    """The plans before it were captured; the rest of the text is decoded eagerly, from where the device has come to."""
    target, drafter = pair
    options = {"max_new_tokens": 30, "do_sample": True, "top_k": 7}
    torch.manual_seed(3)
    expected = target.generate(**asked(**options), assistant_model=drafter, **TREE)
    torch.manual_seed(3)
    text, stats = decode(pair, Recorded(fails_at), "auto", **options)
    assert text.tolist() == expected.tolist()
    assert len(stats.executions) == 2


@pytest.mark.parametrize("fails_at", [3, 4])
def test_a_capture_that_fails_after_a_sequence_of_a_batch_has_ended(pair, fails_at):
    """The sequence, of which more was accepted, is longer than the other; eager rounds leave it out."""
    target, _ = pair
    ids, mask = left_padded([*known_prompts(target, 3), [5, 0, 3, 1, 5, 1, 0, 0, 9, 1]])
    options = {"inputs": ids, "attention_mask": mask, "max_new_tokens": 30, "eos_token_id": 10}
    text, stats = decode(pair, Recorded(fails_at), "auto", **options)
    assert text.tolist() == target.generate(**asked(**options)).tolist()
    assert len(stats.executions) == 2


@pytest.mark.parametrize("plan", PLANS)
def test_eager_rounds_after_a_failure_stay_within_the_longest_text(plan):
    """A captured round may go past it; the target has no position for that."""
    target = build_target("gpt2", n_positions=40)
    ids = torch.tensor(known_prompts(target, 37))
    options = {"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 3}
    text, stats = decode((target, build_drafter(target)), Recorded(fails_at=1), plan, **options)
    assert text.tolist() == target.generate(**asked(**options)).tolist()
    assert "capturing failed" in stats.summary()


def test_layers_are_tried_before_anything_is_captured(pair, monkeypatch):
    """A trial copies and waits, which a capture forbids. Where there was no memory for it the next call tries again."""
    phases = []

    class Watched(Recorded):
        is_capturing = False

        def capture(self, function, part):
            self.is_capturing = True
            try:
                return super().capture(function, part)
            finally:
                self.is_capturing = False

    def without_memory(target, stages):
        phases.append(seam.is_capturing)
        return ["there was no memory for a trial"] * len(stages), False

    seam = Watched()
    monkeypatch.setattr(fused, "_tried", without_memory)
    for _ in range(2):
        text, stats = decode(pair, seam)
        assert text.tolist() == pair[0].generate(**asked()).tolist()
        assert set(stats.executions) == {f"as {Recorded.name}"}
    assert phases == [False, False]


# --- sizes ---

# Levels, children of a node and nodes: the defaults of SGLang and of EAGLE's own code, and the largest that people use.
SIZES = {"SGLang, large": (5, 8, 64), "EAGLE-3": (8, 10, 60), "wide": (3, 40, 128), "deep": (20, 4, 64)}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_other_engines_are_captured(pair, name):
    depth, top_k, nodes = SIZES[name]
    size = {"num_assistant_tokens": depth, "draft_tree_top_k": top_k, "draft_tree_total_tokens": nodes}
    with seams(lambda device: Recorded()), track_acceptance() as stats:
        text = pair[0].generate(**asked(), assistant_model=pair[1], **size)
    assert text.tolist() == pair[0].generate(**asked()).tolist()
    assert set(stats.executions) == {f"as {Recorded.name}"}
    assert stats.mean_accepted_length > 1


# --- when a capture no longer holds ---


def another_forward(target: PreTrainedModel, drafter: Eagle31DrafterModel) -> None:
    mlp = target.model.layers[3].mlp
    mlp.forward = MethodType(lambda self, x: -type(self).forward(self, x), mlp)


def another_weight(target: PreTrainedModel, drafter: Eagle31DrafterModel) -> None:
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.flip(0).clone())


def a_weight_of_the_drafter(target: PreTrainedModel, drafter: Eagle31DrafterModel) -> None:
    drafter.layers[0].mlp.down_proj.weight = torch.nn.Parameter(drafter.layers[0].mlp.down_proj.weight * 0.5)


CHANGES = {  # that a user may make between two calls
    "another forward": another_forward,
    "another weight": another_weight,
    "another dtype": lambda target, drafter: target.double(),
    "a weight of the drafter": a_weight_of_the_drafter,
    "an epsilon": lambda target, drafter: setattr(target.model.norm, "variance_epsilon", 0.5),
    "another attention": lambda target, drafter: target.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_models(pair, name):
    target, drafter = pair
    seam = Recorded()
    decode(pair, seam)
    captures = seam.captures
    CHANGES[name](target, drafter)
    text, stats = decode(pair, seam)
    assert text.tolist() == target.generate(**asked()).tolist()
    assert set(stats.executions) == {f"as {Recorded.name}"}
    assert seam.captures > captures


def test_changed_config():
    target = build_target("mistral_window_8", sliding_window=20)
    pair, seam = (target, build_drafter(target)), Recorded()
    for window in (20, 9):
        target.config.sliding_window = window
        assert decode(pair, seam)[0].tolist() == target.generate(**asked()).tolist()


def test_hooks_that_transformers_leaves(pair):
    """Asking for hidden states once leaves hooks on every layer that do nothing later."""
    target, _ = pair
    target(asked()["inputs"], output_hidden_states=True)
    assert any(layer._forward_hooks for layer in target.model.layers)
    text, stats = decode(pair, Recorded())
    assert text.tolist() == target.generate(**asked()).tolist()
    assert set(stats.executions) == {f"as {Recorded.name}"}


def test_hooks_of_all_modules_run(pair):
    target, _ = pair
    seam = Recorded()
    decode(pair, seam)
    mlp = target.model.layers[2].mlp
    handle = register_module_forward_hook(lambda module, args, output: -output if module is mlp else None)
    try:
        assert decode(pair, seam)[0].tolist() == target.generate(**asked()).tolist()
    finally:
        handle.remove()


def test_another_drafter_meanwhile(pair):
    """Hooks of a call under way are no reason for another one, of another drafter, to run eagerly."""
    target, drafter = pair
    other, found = copy.deepcopy(drafter), []

    class Nested(Puts):
        def put(self, value):
            if not found:
                found.append(decode((target, other), Recorded()))

    decode(pair, Recorded(), streamer=Nested())
    text, stats = found[0]
    assert text.tolist() == target.generate(**asked()).tolist()
    assert set(stats.executions) == {f"as {Recorded.name}"}


def test_an_interrupt_between_capturing_and_running(pair):
    def interrupted(*args):
        raise KeyboardInterrupt

    seam = Recorded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedExecutor, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decode(pair, seam)
    text, stats = decode(pair, seam)
    assert text.tolist() == pair[0].generate(**asked()).tolist()
    assert set(stats.executions) == {f"as {Recorded.name}"}


def test_another_default_dtype(pair):
    options = {"do_sample": True, "top_k": 5}
    torch.manual_seed(3)
    expected = decode(pair, Uncaptured(), "tree", **options)[0]
    found = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        assert decode(pair, Uncaptured(), "tree", **options)[0].tolist() == expected.tolist()
    finally:
        torch.set_default_dtype(found)


def test_training_mode_is_not_captured(pair):
    target, _ = pair
    target.train()
    _, stats = decode(pair, Recorded())
    assert set(stats.executions) == {"eagerly: the target is in training mode"}


def test_adapters_that_are_switched(pair):
    peft = import_peft()
    target, drafter = pair
    for seed, name in enumerate(("one", "other")):
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        target.add_adapter(config, name)
    texts, seam = [], Recorded()
    for name in ("one", "other", None):
        if name is None:
            target.disable_adapters()
        else:
            target.enable_adapters()
            target.set_adapter(name)
        text, stats = decode((target, drafter), seam)
        assert text.tolist() == target.generate(**asked()).tolist()
        assert set(stats.executions) == {f"as {Recorded.name}"}
        texts.append(text.tolist())
    assert texts[0] != texts[1] != texts[2]


def test_two_targets_of_one_drafter(pair):
    _, drafter = pair
    targets = [build_target("llama"), build_target("llama", initializer_range=0.3)]
    seam = Recorded()
    for target in targets * 2:
        text, _ = decode((target, drafter), seam)
        assert text.tolist() == target.generate(**asked()).tolist()


def test_threads_share_a_pair(pair):
    """A call waits for the one in captured rounds, and is then in them itself: eager rounds would take longer."""
    target, drafter = pair
    expected = target.generate(**asked()).tolist()
    seam, found, barrier = Recorded(), [], threading.Barrier(3)

    def run():
        barrier.wait()
        with track_acceptance() as stats:
            text = target.generate(**asked(), assistant_model=drafter, **CHAIN)
        found.append((text.tolist(), set(stats.executions)))

    with seams(lambda device: seam):
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [(expected, {f"as {Recorded.name}"})] * 3
    assert seam.captures == 2


# --- why not ---


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"disable_compile": True}, "disable_compile is set"),
        ({"prompt_lookup_num_tokens": 5}, "prompt_lookup_num_tokens has the host look at the text"),
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor reads the text"),
        ({"return_dict_in_generate": True, "output_logits": True}, "output_logits is asked for"),
        ({"assistant_confidence_threshold": 0.5}, "assistant_confidence_threshold"),
        ({"do_sample": True, "eta_cutoff": 0.01}, "EtaLogitsWarper reads its scores on the host"),
        ({"num_assistant_tokens": 70}, "drafts are deeper or wider than a captured round takes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_why_rounds_run_eagerly(pair, options, reason):
    target, drafter = pair
    with seams(lambda device: Recorded()), track_acceptance() as stats:
        target.generate(**asked(**CHAIN | options), assistant_model=drafter)
    (execution,) = stats.executions
    assert execution.startswith("eagerly: ")
    assert reason in execution
    assert reason in stats.summary()


def test_auto_drafts_whatever_the_confidence_threshold(pair):
    """It would have the host look at every draft."""
    options = {"do_sample": True, "top_k": 5, "max_new_tokens": 30, "assistant_confidence_threshold": 0.5}
    _, stats = decode(pair, Recorded(), "auto", **options)
    assert set(stats.executions) == {f"as {Recorded.name}"}
    assert stats.kinds["chains"] > 0


def test_autocast_runs_eagerly(pair):
    with torch.autocast("cpu", torch.bfloat16):
        _, stats = decode(pair, Recorded())
    assert set(stats.executions) == {"eagerly: autocast is on"}


def test_a_static_cache_that_a_text_may_outgrow_runs_eagerly(pair):
    """It is refused where the text does so, and not where it ends before."""
    target, _ = pair
    ends = 6  # its sixth token
    cache = StaticCache(config=target.config, max_cache_len=15)
    text, stats = decode(pair, Recorded(), past_key_values=cache, eos_token_id=ends)
    assert text.tolist() == target.generate(**asked(eos_token_id=ends)).tolist()
    assert set(stats.executions) == {"eagerly: the static cache is shorter than the longest text"}


def test_a_capture_begins_and_ends_without_workspaces(monkeypatch):
    """Also one that fails: what it has made lies in the memory of its graph."""
    cleared = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(len(cleared)), raising=False)

    def fail() -> None:
        with own_workspaces():
            assert cleared == [0]
            raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        fail()
    assert cleared == [0, 1]
