"""Targets with recurrent states: what a drafted call leaves in their caches and modules. That their texts are plain
decoding's is shown with all other families."""

import copy
import tempfile
from functools import wraps

import pytest
import torch
from accelerate import dispatch_model
from close import TARGET_FORWARD, assert_close
from conftest import PROMPT
from families import ASKED, DRAFTINGS, build_drafter, build_target
from observers import num_hooks
from states import KINDS, assert_same_states, held, is_same
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from eagle31_hf.cache import adopt
from eagle31_hf.cache.masks import SlotMask, ancestors_of
from eagle31_hf.cache.states import HAS_METHODS, METHODS
from eagle31_hf.cache.transfer import Mirrored
from eagle31_hf.cache_names import CACHE, IS_RENAMED, cache_argument
from eagle31_hf.errors import DraftingRefusedError
from eagle31_hf.targets import recurrent
from eagle31_hf.targets.layers import decoder_layers
from eagle31_hf.targets.masks import slot_masks
from eagle31_hf.targets.recurrent import Mixers

pytestmark = pytest.mark.skipif(not HAS_METHODS, reason="transformers before 5.21 reads states in another way")

CHAIN = DRAFTINGS["chain"]
MIXERS = ("Qwen3NextGatedDeltaNet", "Mamba2Mixer", "Lfm2ShortConv")


def target_of(name: str):
    return build_target(name, "eager")


def cache_of(target) -> DynamicCache:
    return DynamicCache(config=target.config)


@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("name", KINDS)
def test_the_callers_cache_is_left_as_plain_decoding_leaves_it(name, drafting):
    target, prompt = target_of(name), torch.tensor(PROMPT)
    ours, alone = cache_of(target), cache_of(target)
    asked = ASKED | cache_argument(target.forward, ours)
    text = target.generate(prompt, assistant_model=build_drafter(name), **asked, **DRAFTINGS[drafting]).sequences
    expected = target.generate(prompt, **ASKED, **cache_argument(target.forward, alone)).sequences
    assert torch.equal(text, expected)
    assert_same_states(ours, alone)
    assert not vars(ours).keys() & set(METHODS)
    assert not any(getattr(layer, "record_past", False) for layer in ours.layers)


class Fuse:
    """Raises KeyError at the `call`-th call of it as a criterion, or as a hook with `num_tokens` (B, T, D) inputs."""

    def __init__(self, call: int, num_tokens: tuple[int, ...] = ()):
        self.left, self.num_tokens = call, num_tokens

    def __call__(self, *args, **kwargs):
        states = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        self.left -= not self.num_tokens or states[0].shape[1] in self.num_tokens
        if self.left == 0:
            raise KeyError("of a user's own")
        return torch.zeros(len(states[0]), dtype=torch.bool)

    def hook(self, module, args, kwargs):
        self(*args, **kwargs)


def failing(name: str, place: str, cache: DynamicCache) -> None:
    """Generates with the cache until an error: in a stopping criterion, in the last layer while drafts are verified, or
    in a mixer that runs again over accepted tokens."""
    target, drafter, prompt = target_of(name), build_drafter(name), torch.tensor(PROMPT)
    # making a drafter, and the first call of all, which tries the mixers, run the target, too
    target.generate(prompt, assistant_model=drafter, **ASKED, **CHAIN)
    num_verified = CHAIN["num_assistant_tokens"] + 1
    asked, handle = ASKED | CHAIN | cache_argument(target.forward, cache), None
    if place == "criterion":
        asked["stopping_criteria"] = [Fuse(6)]
    else:
        module, fuse = decoder_layers(target)[-1], Fuse(3, (num_verified,))
        if place == "rerun":
            module = [module for module in target.modules() if type(module).__name__ in MIXERS][-1]
            fuse = Fuse(2, tuple(range(1, num_verified)))
        handle = module.register_forward_pre_hook(fuse.hook, with_kwargs=True)
    try:
        with pytest.raises(KeyError, match="own"):
            target.generate(prompt, assistant_model=drafter, **asked)
    finally:
        if handle is not None:
            handle.remove()


FAILED = [
    *((name, "criterion") for name in KINDS),
    *((name, "last layer") for name in ("Qwen3-Next", "Falcon-H1", "Mamba2")),
    *((name, "rerun") for name in ("Qwen3-Next", "LFM2")),
]


@pytest.mark.parametrize(("name", "place"), FAILED)
def test_after_an_error_the_cache_holds_the_accepted_tokens(name, place):
    target, cache = target_of(name), cache_of(target_of(name))
    failing(name, place, cache)
    assert num_hooks(target) == 0
    assert not vars(cache).keys() & set(METHODS)
    length = adopt.length(cache)
    # where states do not tell, they are those after one of the texts that may have been accepted
    for count in [length] if length else range(len(PROMPT[0]) + 1, len(PROMPT[0]) + 20):
        plain = cache_of(target)
        given = {"max_new_tokens": count - len(PROMPT[0]) + 1, "do_sample": False}
        target.generate(torch.tensor(PROMPT), **given, **cache_argument(target.forward, plain))
        if length or is_same(cache, plain):
            break
    assert_same_states(cache, plain)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Falcon-H1", "Mamba2", "LFM2"])
def test_after_an_error_in_a_later_prompt_the_cache_is_as_it_was(name):
    target, drafter, cache = target_of(name), build_drafter(name), cache_of(target_of(name))
    given = cache_argument(target.forward, cache)
    text = target.generate(torch.tensor(PROMPT), **ASKED, **given).sequences
    before = {key: value.clone() for key, value in held(cache).items()}
    handle = decoder_layers(target)[-1].register_forward_pre_hook(Fuse(1).hook, with_kwargs=True)
    ids = torch.cat((text, torch.tensor([[4, 5, 6]])), dim=1)
    with pytest.raises(KeyError, match="own"):
        target.generate(ids, assistant_model=drafter, **ASKED, **CHAIN, **given)
    handle.remove()
    assert num_hooks(target) == 0
    after = held(cache)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize(
    ("name", "differs"), [("Mamba", True), ("Jamba", True), ("Nemotron-H", True), ("Zamba2", True), ("Mamba2", False),
                          ("Qwen3-Next", False), ("Kimi-Linear", False), ("ZAYA", False)],
)  # fmt: skip
def test_mixers_are_asked_whether_several_tokens_are_as_one_by_one(name, differs):
    assert verdicts(target_of(name), name) == {differs}


@pytest.mark.parametrize(("tried", "differs"), [(len(recurrent.TRIED), True), (1, False)], ids=["loud", "as_it_is"])
def test_a_bound_that_the_tokens_of_a_text_do_not_meet_is_found(monkeypatch, tried, differs):
    """Nemotron-H bounds small time steps over several tokens only. With this bias those of a text are large."""
    monkeypatch.setattr(recurrent, "TRIED", recurrent.TRIED[:tried])
    target = copy.deepcopy(target_of("Nemotron-H"))
    for module in target.modules():
        if hasattr(module, "dt_bias"):
            module.dt_bias.data.fill_(20.0)
    assert verdicts(target, "Nemotron-H") == {differs}


def verdicts(target, name: str) -> set[bool]:
    """What was found of the target's mixers in a drafted call."""
    target.generate(torch.tensor(PROMPT), assistant_model=build_drafter(name), **ASKED, **CHAIN)
    known = recurrent._differs_by_steps
    return {found for module in target.modules() for found in known.get(module, {}).values()}


@torch.no_grad()
def states_after(target, prefix: torch.Tensor, path: list[int]) -> dict[str, torch.Tensor]:
    """The states after a text (1, L) and then the tokens of a path, read one by one."""
    cache = cache_of(target)
    given = cache_argument(target.forward, cache) | {"use_cache": True}
    target(prefix, **given)
    for i, token in enumerate(path):
        target(torch.tensor([[token]]), position_ids=torch.tensor([[prefix.shape[1] + i]]), **given)
    return {name: value for name, value in held(cache).items() if "states" in name}


@pytest.mark.parametrize("name", KINDS)
def test_after_trees_states_are_those_after_the_paths_that_were_accepted(name):
    """Two sequences, each with a tree of its own; not their first paths are accepted."""
    target = target_of(name)
    prefix, nodes = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]]), torch.tensor([[5, 3, 8, 7, 9], [7, 9, 3, 2, 4]])
    parents, paths = [[0, 0, 1, 2], [0, 1, 1, 3]], [[0, 2, 4], [0, 1, 3, 4]]
    cache, ancestors = cache_of(target), ancestors_of(torch.tensor(parents), depth=4)
    given, depths = cache_argument(target.forward, cache) | {"use_cache": True}, ancestors.sum(2) - 1
    with Mixers(target, cache) as mixers, torch.no_grad():
        with mixers.finding():
            target(prefix, **given)
        adopt.crop(cache, 0)
        mask = slot_masks(target, cache, SlotMask(Mirrored([4, 4]), ancestors, depths, depths))
        with mixers.verifying(2, 5, parents):
            target(nodes, position_ids=4 + depths, attention_mask=mask, **given)
        mixers.commit(paths)
        mixers.settle()
    found = held(cache)
    for b, path in enumerate(paths):
        for state, expected in states_after(target, prefix[b : b + 1], nodes[b, path].tolist()).items():
            assert_close(state, found[state][b : b + 1], expected, TARGET_FORWARD)


def test_states_that_nobody_reads_by_the_cache_are_refused():
    cache = cache_of(target_of("Qwen3-Next"))
    mixers = Mixers(build_target("Llama", "eager"), cache)
    with mixers.finding():
        pass
    with pytest.raises(DraftingRefusedError, match="no module of LlamaForCausalLM reads the recurrent states"):
        mixers.check()


def test_an_offloaded_cache_is_refused():
    cache = cache_of(target_of("Qwen3-Next"))
    cache.offloading = True
    with pytest.raises(DraftingRefusedError, match=r"DynamicCache with recurrent states, .* or are offloaded"):
        target_of("Qwen3-Next").generate(
            torch.tensor(PROMPT), assistant_model=build_drafter("Qwen3-Next"), **{CACHE: cache}, **ASKED, **CHAIN
        )


@pytest.mark.parametrize("name", ["Falcon-H1", "ZAYA", "LFM2"])
def test_a_copy_that_a_streamer_makes_cannot_be_cropped(name):
    """It would go on from states after drafts that were not accepted."""
    target, copies = target_of(name), []

    class Copies(BaseStreamer):
        def put(self, value):
            copies.append(copy.deepcopy(cache))

        def end(self):
            pass

    cache = cache_of(target)
    asked = {CACHE: cache, "streamer": Copies(), "max_new_tokens": 6, "do_sample": False}
    target.generate(torch.tensor(PROMPT), assistant_model=build_drafter(name), **asked, **CHAIN)
    with pytest.raises((RuntimeError, ValueError)):
        copies[-1].crop(-1)


def test_a_cache_that_writes_states_in_its_own_way_is_refused():
    class Rounded(DynamicCache):
        def update_recurrent_state(self, states, *args, **kwargs):
            return super().update_recurrent_state((states * 4).round() / 4, *args, **kwargs)

    target = target_of("Qwen3-Next")
    with pytest.raises(DraftingRefusedError, match="Rounded with recurrent states"):
        target.generate(
            torch.tensor(PROMPT),
            assistant_model=build_drafter("Qwen3-Next"),
            **{CACHE: Rounded(config=target.config)},
            **ASKED,
            **CHAIN,
        )


@pytest.mark.skipif(IS_RENAMED, reason="from transformers 5.24 on generate() keeps a cache while training, too")
def test_while_training_the_reason_is_the_missing_cache():
    target = copy.deepcopy(target_of("Qwen3-Next")).train()
    target.gradient_checkpointing_enable()
    with pytest.raises(DraftingRefusedError, match="Gradient checkpointing"):
        target.generate(torch.tensor(PROMPT), assistant_model=build_drafter("Qwen3-Next"), **ASKED, **CHAIN)


# --- what users do to a target's modules ---


def mixers_of(target) -> list[torch.nn.Module]:
    return [module for module in target.modules() if type(module).__name__ in MIXERS]


def steer(target) -> None:
    """A hook that adds to what mixers are given."""

    def added(module, args, kwargs):
        if args:
            return (args[0] + 0.3, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": kwargs["hidden_states"] + 0.3}

    for module in mixers_of(target):
        module.register_forward_pre_hook(added, with_kwargs=True)


def write_to_inputs(target) -> None:
    """Mixers whose inputs change while they run."""

    def halved(module, args, kwargs, output):
        (args[0] if args else kwargs["hidden_states"]).mul_(0.5)

    for module in mixers_of(target):
        module.register_forward_hook(halved, with_kwargs=True)


def swap_weights(target) -> None:
    """A forward of the user's own around the target's, with other weights."""
    forward = target.forward

    @wraps(forward)
    def with_others(*args, **kwargs):
        weights = [weight for module in mixers_of(target) for weight in module.parameters()]
        before = [weight.data for weight in weights]
        try:
            for weight in weights:
                weight.data = weight.data * 1.5
            return forward(*args, **kwargs)
        finally:
            for weight, data in zip(weights, before, strict=True):
                weight.data = data

    target.forward = with_others


def offload_by_layers(target) -> None:
    """Weights that a layer brings as a whole before it runs, from files."""
    layers = decoder_layers(target)
    places = {f"model.{name}": "cpu" for name, _ in target.model.named_children() if name != "layers"}
    places |= {f"model.layers.{i}": "disk" if i else "cpu" for i in range(len(layers))} | {"lm_head": "cpu"}
    dispatch_model(
        target,
        places,
        main_device="cpu",
        offload_dir=tempfile.mkdtemp(dir=target.folder),
        preload_module_classes=[type(layers[0]).__name__],
    )


CHANGED = [
    *(("Qwen3-Next", change) for change in (steer, swap_weights, offload_by_layers)),
    *(("LFM2", change) for change in (steer, write_to_inputs)),
]


@pytest.mark.parametrize(("name", "change"), CHANGED, ids=lambda part: getattr(part, "__name__", part))
def test_changed_targets_say_their_own_text(name, change, tmp_path):
    target = copy.deepcopy(target_of(name))
    target.folder = tmp_path
    change(target)
    prompt = torch.tensor(PROMPT)
    expected = target.generate(prompt, **ASKED).sequences
    drafted = target.generate(prompt, assistant_model=build_drafter(name), **ASKED, **CHAIN).sequences
    assert torch.equal(drafted, expected)
    assert num_hooks(target) == num_hooks(target_of(name)) or change in (steer, write_to_inputs)


@pytest.mark.parametrize("name", ["Jamba", "Mamba2"])
def test_hooks_that_look_at_rows_are_shown_those_of_the_batch(name):
    """Also where trees were drafted before there was a hook."""
    target, drafter, asked = copy.deepcopy(target_of(name)), build_drafter(name), {"max_new_tokens": 24}
    prompts = torch.tensor([[1, 2, 3, 5, 8], [7, 6, 3, 9, 1]])
    for ids in (prompts[:1], prompts):
        target.generate(ids, assistant_model=drafter, **asked, **DRAFTINGS["tree"])

    def steer(module, args, output):
        assert len(output) in (1, 2)
        output = output.clone()
        output[0] += 0.4
        return output

    handles = [m.register_forward_hook(steer) for m in target.modules() if type(m).__name__.endswith("Mixer")]
    assert handles
    for ids in (prompts[:1], prompts):
        expected = target.generate(ids, **asked)
        for drafting in DRAFTINGS.values():
            assert torch.equal(target.generate(ids, assistant_model=drafter, **asked, **drafting), expected)


def test_a_verdict_is_of_states_that_can_tell():
    """Mamba's scan begins at zero: with weights of zero nobody sees it."""
    target = copy.deepcopy(target_of("Mamba"))
    weights = copy.deepcopy(target.state_dict())
    for weight in target.parameters():
        weight.data.zero_()
    assert verdicts(target, "Mamba") == set()
    target.load_state_dict(weights)
    assert verdicts(target, "Mamba") == {True}


def test_states_in_fp32_of_activations_in_16_bits():
    """They are as exact as the activations; and what was found in one dtype is not taken for another."""
    target, drafter = copy.deepcopy(target_of("Mamba2")), build_drafter("Mamba2")
    for dtype in (torch.bfloat16, torch.float32):
        target.to(dtype).generate(torch.tensor(PROMPT), assistant_model=drafter, **ASKED, **CHAIN)
    found = [known for module in target.modules() for known in recurrent._differs_by_steps.get(module, {}).items()]
    assert {dtype for (_, dtype), _ in found} == {torch.bfloat16, torch.float32}
    assert not any(differs for _, differs in found)
