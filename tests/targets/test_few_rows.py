"""Forwards of few rows on a CPU: the same results in fp32, the same to the last bit in 16 bits, and a model that is
left as it was."""

import copy
import json
import os
import pickle
import threading

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from eagle31_hf import demo, track_acceptance
from eagle31_hf.storage.measured import Measured
from eagle31_hf.targets import few_rows as module
from eagle31_hf.targets import linear_kernels
from eagle31_hf.targets.few_rows import few_rows, in_drafted_call
from eagle31_hf.targets.linear_kernels import TORCH, Choice, fits_fp16, is_available, onednn_linear, packed_by_fbgemm

pytestmark = pytest.mark.skipif(not is_available(), reason="torch has no oneDNN here")
PROMPT = torch.tensor([[3, 5, 2, 9, 4, 1]])
WIDTHS = (40, 96, 1536)  # the last is wider than oneDNN sums up at once for one row


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Nothing is known of kernels when a test begins; packed weights are taken, not for prompts, come what may."""
    monkeypatch.setattr(linear_kernels, "MEASURED", Measured("linear_layers"))
    monkeypatch.setattr(linear_kernels, "_seconds_of", seconds_where_packed_takes(0.5, 1.0))


def seconds_where_packed_takes(of_few_rows: float, of_prompts: float):
    """What is found where packed weights take so long, and torch's own kernels a second."""

    def seconds(runs, x):
        is_packed = getattr(runs[0], "func", None) in (linear_kernels.onednn_linear, linear_kernels.fbgemm_linear)
        return (of_few_rows if len(x) in linear_kernels.TIMED_ROWS else of_prompts) if is_packed else 1.0

    return seconds


def model_of(dtype: torch.dtype, width: int = 96, bias: bool = True) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, 128, bias=bias), nn.SiLU(), nn.Linear(128, width)).to(dtype)


def has_fbgemm() -> bool:
    try:
        packed_by_fbgemm(torch.ones(2, 2), None)
    except RuntimeError:
        return False
    return True


def skip_unless(is_exact: bool) -> None:
    if not is_exact:
        pytest.skip("this processor has no kernels for which a row is the same beside others")


def forwards(model: nn.Module) -> list:
    return [vars(part).get("forward") for part in model.modules()]


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_results_are_the_model_s_own_in_fp32(width, bias):
    model = model_of(torch.float32, width, bias)
    x = torch.randn(2, 70, width)
    expected = model(x)
    with few_rows(model) as rows, in_drafted_call():
        assert rows.num_bytes == sum(p.numel() * 4 for p in model.parameters() if p.dim() == 2)
        for count in (1, 2, 3, 8, 32):
            got = model(x[:, :count])
            assert got.shape == (2, count, width)
            assert (got - expected[:, :count]).abs().max() <= 1e-5 * expected.abs().max()
        assert torch.equal(model(x), expected)  # many rows: a prompt's
    assert all(module._layers[layer].packed is not None for layer in (model[0], model[2]))


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loaded", ["fp32", "16 bits"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_that_fp16_holds_are_read_as_such_and_multiplied_in_fp32(monkeypatch, stored, loaded, bias):
    if not has_fbgemm():
        pytest.skip("torch has no FBGEMM here")
    seconds = seconds_where_packed_takes(0.5, 1.0)
    monkeypatch.setattr(
        linear_kernels,
        "_seconds_of",
        lambda runs, x: 0.1 if getattr(runs[0], "func", None) is linear_kernels.fbgemm_linear else seconds(runs, x),
    )
    model = model_of(stored, 1536, bias)
    x = torch.randn(40, 1536).to(stored)
    exact = copy.deepcopy(model).double()(x.double())
    if loaded == "fp32":
        model, x = model.float(), x.float()
    with few_rows(model) as rows, in_drafted_call():
        assert {module._layers[layer].choice.kernel for layer in (model[0], model[2])} == {"fbgemm"}
        assert rows.num_bytes == sum(p.numel() * 2 for p in model.parameters() if p.dim() == 2)
        assert not rows.is_exact or loaded == "16 bits"
        bound = 1e-5 if loaded == "fp32" else 4 * torch.finfo(stored).eps
        assert (model(x) - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.parametrize("of_row", [1 / 3, 2.0**17, float("nan"), 2.0**-26 / 3])
def test_weights_that_fp16_does_not_hold_are_known(of_row):
    """A third, too large, none, too small: one row of many is enough."""
    weight = torch.randn(1500, 8).bfloat16().float()
    weight[3, 2] = 1e-20  # too small beside the others of its row to matter
    assert fits_fp16(weight)
    weight[1400] = of_row
    assert not fits_fp16(weight)


@torch.no_grad()
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_is_the_same_to_the_last_bit_beside_others(dtype, width):
    model = model_of(dtype, width)
    x = torch.randn(130, width).to(dtype)
    with few_rows(model) as rows, in_drafted_call(num_before=0):  # a round that is to be exact
        skip_unless(rows.is_exact)
        alone = torch.cat([model(row) for row in x.split(1)])
        for size in (2, 3, 5, 8, 32, 33, 64, 130):  # more than most rounds have, too
            assert torch.equal(torch.cat([model(part) for part in x.split(size)]), alone)


@torch.no_grad()
def test_however_many_rows_an_exact_round_has_they_run_few_at_a_time(monkeypatch):
    seen = list[int]()
    monkeypatch.setattr(
        linear_kernels,
        "linear",
        lambda x, weight, bias=None: seen.append(len(x)) or nn.functional.linear(x, weight, bias),
    )
    monkeypatch.setattr(linear_kernels, "_seconds_of", seconds_where_packed_takes(2.0, 2.0))
    with few_rows(model := model_of(torch.bfloat16)):
        seen.clear()
        with in_drafted_call(num_before=0):
            model(torch.randn(130, 96).bfloat16())
    assert sum(seen) == 2 * 130
    assert max(seen) == module.ALIKE_ROWS


def test_a_kernel_for_one_row_that_rounds_otherwise_is_given_two(monkeypatch):
    """As oneDNN's does for wide inputs; and where nothing helps, rows are not said to be exact."""

    def rounds_otherwise(x, weight, bias=None, from_rows=2):
        out = nn.functional.linear(x, weight, bias)
        return out if x.shape[0] >= from_rows else out * (1 + 2**-7)

    monkeypatch.setattr(linear_kernels, "linear", rounds_otherwise)
    monkeypatch.setattr(linear_kernels, "_seconds_of", seconds_where_packed_takes(2.0, 2.0))
    with torch.no_grad(), few_rows(model := model_of(torch.bfloat16)) as rows, in_drafted_call():
        assert rows.is_exact
        assert not rows.num_bytes
        assert {module._layers[layer].choice for layer in (model[0], model[2])} == {Choice(TORCH, 2)}
        x = torch.randn(3, 96).bfloat16()
        assert torch.equal(torch.cat([model(row) for row in x.split(1)]), model(x))
    monkeypatch.setattr(linear_kernels, "MEASURED", Measured("another"))
    monkeypatch.setattr(linear_kernels, "linear", lambda x, weight, bias=None: rounds_otherwise(x, weight, bias, 5))
    with few_rows(model_of(torch.bfloat16)) as rows:
        assert not rows.is_exact


@torch.no_grad()
def test_the_model_is_left_as_it_was_and_other_forwards_meanwhile_are_its_own(monkeypatch):
    model = model_of(torch.float32)
    x = torch.randn(3, 96)
    own, seen = model(x), []

    def noted(x, weight, bias=None):
        seen.append(threading.get_ident())
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    monkeypatch.setattr(linear_kernels, "onednn_linear", noted)
    with few_rows(model):
        seen.clear()  # what was run to be timed
        assert torch.equal(model(x), own)  # no round
        with in_drafted_call():
            thread = threading.Thread(target=lambda: seen.append(torch.equal(model(x), own)))
            thread.start()
            thread.join()
            model[0](x)
            with torch.autocast("cpu", torch.bfloat16), in_drafted_call():
                pass
        with few_rows(model):
            pass
        assert None in forwards(model)
        with in_drafted_call():
            model[0](x)  # the outer context goes on
    assert seen == [True, threading.get_ident(), threading.get_ident()]
    assert forwards(model) == [None] * 4
    assert torch.equal(model(x), own)


@torch.no_grad()
def test_autocast_is_the_caller_s():
    model = model_of(torch.float32)
    x = torch.randn(3, 96)
    with torch.autocast("cpu", torch.bfloat16), few_rows(model):
        expected = model(x)
        with in_drafted_call():
            got = model(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)


@torch.no_grad()
def test_a_weight_that_has_changed_is_packed_again():
    model = model_of(torch.float32)
    x = torch.randn(3, 96)
    for change in (
        lambda: model[0].weight.mul_(2),
        lambda: setattr(model[0], "weight", nn.Parameter(torch.randn(128, 96))),
        lambda: setattr(model[0].weight, "data", torch.randn(128, 96)),
        lambda: model[0].weight.data.add_(0.5),  # as PEFT merges an adapter: torch counts no version
        lambda: model[0].weight.data[5].zero_(),
        lambda: model[0].bias.data.add_(3),
        lambda: setattr(model[0], "bias", nn.Parameter(torch.randn(128))),
        lambda: model[0].weight.data.copy_(model[0].weight.data.roll(8, 1)),  # columns that change places
        lambda: model[0].weight.data.view(-1)[:1].copy_(model[0].weight.data.view(-1)[:1] * (1 + 2**-20)),
        lambda: model[0].weight.data[:, 3:5].zero_(),
        lambda: model[0].weight.data.copy_(model[0].weight.data[torch.arange(128) ^ 1]),  # rows that change places
        lambda: model.bfloat16(),
    ):
        change()
        expected = model(x.to(model[0].weight.dtype)).float()
        with few_rows(model), in_drafted_call():
            got = model(x.to(model[0].weight.dtype)).float()
        assert (got - expected).abs().max() <= (
            1e-5 if x.dtype == model[0].weight.dtype else 0.02
        ) * expected.abs().max()


@torch.no_grad()
def test_a_weight_that_has_changed_counts_in_a_context_that_was_there_before():
    model = model_of(torch.float32)
    x = torch.randn(3, 96)
    with few_rows(model):
        model[0].weight.mul_(3)
        expected = model(x)
        with few_rows(model), in_drafted_call():
            got = model(x)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def test_autocast_within_a_wrapped_forward_is_the_caller_s():
    """As accelerate wraps it for mixed precision."""
    model = model_of(torch.float32)
    x = torch.randn(3, 96)
    with few_rows(model), in_drafted_call(), torch.autocast("cpu", torch.bfloat16):
        got = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(got, model(x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_of_any_width_is_known_by_its_bits(dtype):
    for width in (1, 7, 8):
        layer = nn.Linear(width, 5).to(dtype)
        before = module._key_of_layer(layer)
        assert module._key_of_layer(layer) == before
        layer.weight.data[4, width - 1] += 1
        assert module._key_of_layer(layer) != before


@torch.no_grad()
def test_another_forward_of_all_linear_layers_is_run(monkeypatch):
    own, model, x = nn.Linear.forward, model_of(torch.float32), torch.randn(3, 96)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * own(self, x))
    expected = model(x)
    with few_rows(model), in_drafted_call():
        assert torch.equal(model(x), expected)


@torch.no_grad()
def test_where_there_is_no_memory_any_more_old_weights_are_not_run(monkeypatch):
    """Those that a context which was there before has packed."""
    model, x = model_of(torch.float32), torch.randn(3, 96)
    with few_rows(model):
        model[0].weight.mul_(3)
        monkeypatch.setattr(module, "free_memory", lambda: 0)
        expected = model(x)
        with few_rows(model), in_drafted_call():
            assert (model(x) - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def test_copies_made_meanwhile_are_models_of_their_own():
    model = model_of(torch.float32)
    x = torch.randn(3, 96)
    with few_rows(model), in_drafted_call():
        copied = copy.deepcopy(model)
        copied[0].weight.zero_()
        copied[0].bias.zero_()
        assert torch.equal(copied[0](x), torch.zeros(3, 128))
    with few_rows(copied), in_drafted_call():
        assert torch.equal(copied[0](x), torch.zeros(3, 128))
    assert forwards(copied) == [None] * 4
    assert pickle.loads(pickle.dumps(model))[0](x).equal(model[0](x))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@torch.no_grad()
def test_a_process_forked_meanwhile_begins_anew():
    """The child leaves no stand-in behind, and waits for no lock of a thread that it has not."""
    model = model_of(torch.float32)
    x = torch.randn(3, 96)
    with few_rows(model), module._users.lock:
        child = os.fork()
        if not child:
            code = 1
            try:
                thread = threading.Thread(target=lambda: few_rows(model).__enter__(), daemon=True)
                thread.start()  # another thread than the one that holds the lock
                thread.join(20)
                is_free = not thread.is_alive()
                module._users.begin_anew()
                with few_rows(model), in_drafted_call():
                    model(x)
                code = 0 if is_free and forwards(model) == [None] * 4 else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@torch.no_grad()
def test_models_that_share_a_layer_end_one_after_the_other():
    model = model_of(torch.float32)
    other = nn.Sequential(model[0])
    with few_rows(model):
        with few_rows(other):
            pass
        assert forwards(model)[1] is not None
    assert forwards(model) == [None] * 4


@torch.no_grad()
def test_a_layer_that_leaves_the_model_meanwhile_gets_its_forward_back():
    model = model_of(torch.float32)
    layer = model[0]
    with few_rows(model):
        model[0] = nn.Linear(96, 128)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("matrix", ["fused experts", "Conv1D", "hooked"])
def test_a_model_with_other_matrices_is_not_exact(matrix):
    model = model_of(torch.bfloat16)
    if matrix == "fused experts":
        model.experts = nn.Parameter(torch.zeros(2, 3, 4, dtype=torch.bfloat16))
    elif matrix == "Conv1D":
        model.append(Conv1D(96, 96).bfloat16())
    else:
        model[0].register_forward_hook(lambda *args: None)
    with few_rows(model) as rows:
        assert not rows.is_exact


OF_NOW = {"kernel": "onednn", "least_rows": 1, "takes_prompts": True}
OTHERS = {"kernel": "magic"}, {"least_rows": 7}, {"takes_prompts": None}, {"more": 1}


@pytest.mark.parametrize("kept", [[], {}, {"kernel": "onednn", "least_rows": 1}, *(OF_NOW | other for other in OTHERS)])
def test_choices_of_another_form_are_made_anew(monkeypatch, kept):
    monkeypatch.setattr(Measured, "get", lambda self, key: kept)
    with few_rows(model_of(torch.float32)) as rows:
        assert rows.num_bytes


@torch.no_grad()
@pytest.mark.parametrize(("of_prompts", "takes"), [(0.5, True), (0.9, False)])
def test_prompts_run_the_kernel_of_few_rows_where_it_is_faster_by_far(monkeypatch, of_prompts, takes):
    monkeypatch.setattr(linear_kernels, "_seconds_of", seconds_where_packed_takes(0.5, of_prompts))
    ran, model, x = [], model_of(torch.float32), torch.randn(2, 70, 96)
    monkeypatch.setattr(
        linear_kernels, "onednn_linear", lambda *args, **kwargs: ran.append(args) or onednn_linear(*args, **kwargs)
    )
    expected = model(x)
    with few_rows(model), in_drafted_call():
        ran.clear()  # what was run to be timed
        got = model(x)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert bool(ran) == takes


def test_load_that_ends_while_kernels_are_timed_decides_nothing(monkeypatch):
    seconds, asked = seconds_where_packed_takes(0.9, 2.0), []

    def seconds_at_first_beside_other_work(runs, x):
        asked.append(len(x))
        return seconds(runs, x) * (3.0 if len(asked) <= len(linear_kernels.TIMED_ROWS) * linear_kernels.TIMES else 1.0)

    monkeypatch.setattr(linear_kernels, "_seconds_of", seconds_at_first_beside_other_work)
    with few_rows(model_of(torch.float32)) as rows:
        assert rows.num_bytes


def test_where_packing_fails_layers_run_as_torch_has_them(monkeypatch):
    """Known or not: another processor of the same name, or no memory after all."""
    with few_rows(model_of(torch.bfloat16)):
        pass

    def refused(weight, bias):
        raise RuntimeError("could not create a primitive")

    for kernel in list(linear_kernels.KERNELS):
        monkeypatch.setitem(linear_kernels.KERNELS, kernel, refused)
    for _ in range(2):
        with few_rows(model := model_of(torch.bfloat16)) as rows, in_drafted_call(), torch.no_grad():
            assert rows.num_bytes == 0
            x = torch.randn(3, 96).bfloat16()
            assert model(x).shape == x.shape
        monkeypatch.setattr(linear_kernels, "MEASURED", Measured("another"))


def test_weights_are_packed_once():
    model = model_of(torch.float32)
    with few_rows(model):
        first = module._layers[model[0]].packed
    with few_rows(model):
        assert module._layers[model[0]].packed is first


@pytest.mark.parametrize("wrapped", ["hook", "forward", "class", "meta", "inference"])
def test_layers_that_are_not_plain_stay_as_they_are(wrapped):
    class Other(nn.Linear):
        pass

    model = model_of(torch.float32)
    if wrapped == "hook":
        model[0].register_forward_hook(lambda *args: None)
    elif wrapped == "forward":
        model[0].forward = model[0].forward
    elif wrapped == "class":
        model[0] = Other(96, 128)
    elif wrapped == "meta":
        model[0] = nn.Linear(96, 128, device="meta")
    else:
        with torch.inference_mode():
            model[0] = nn.Linear(96, 128)
    before = forwards(model)
    with few_rows(model):
        assert model[0] not in module._layers or module._layers[model[0]].key[0] != id(model[0].weight)
        assert forwards(model)[1] is before[1]
        assert forwards(model)[3] is not None
    assert forwards(model) == before


def test_memory_that_is_short_is_left_alone_and_said(monkeypatch):
    class Short:
        available = 1000

    monkeypatch.setattr(module.psutil, "virtual_memory", Short)
    lines = []
    monkeypatch.setattr(module.logger, "warning_once", lambda text, *values: lines.append(text % values))
    model = model_of(torch.float32)
    with few_rows(model) as rows:
        assert (rows.num_bytes, rows.is_exact) == (0, False)
        assert forwards(model) == [None] * 4
    assert len(lines) == 1
    assert "are free; expected" in lines[0]


@pytest.mark.parametrize("switch", ["packed_linear", "torch"])
def test_it_can_be_declined(monkeypatch, switch):
    monkeypatch.setenv("EAGLE31_KERNELS", switch)
    with few_rows(model := model_of(torch.float32)) as rows:
        assert rows.num_bytes == 0
        assert forwards(model) == [None] * 4


def test_a_choice_that_does_not_hold_any_more_is_made_anew(monkeypatch):
    """As that of a processor of the same name, with other instructions."""
    with few_rows(model_of(torch.bfloat16)):
        pass

    def refused(weight, bias):
        raise RuntimeError("could not create a primitive")

    monkeypatch.setitem(linear_kernels.KERNELS, "onednn", refused)
    with few_rows(model := model_of(torch.bfloat16)):
        kernels = {module._layers[layer].choice.kernel for layer in (model[0], model[2])}
    assert kernels == {"fbgemm"} or not has_fbgemm()
    before = linear_kernels.machine()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert linear_kernels.machine() != before


def test_choices_are_kept_between_processes(monkeypatch):
    with few_rows(model_of(torch.float32)):
        pass
    kept = json.loads(linear_kernels.MEASURED.path.read_text())
    assert len(kept) == 2
    assert list(kept.values()) == [{"kernel": "onednn", "least_rows": 1, "takes_prompts": False}] * 2
    monkeypatch.setattr(linear_kernels, "MEASURED", Measured("linear_layers"))  # another process
    monkeypatch.setattr(linear_kernels, "_measured", lambda *args: pytest.fail("it was known"))
    with few_rows(model_of(torch.float32)) as rows:
        assert rows.num_bytes


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"a": 1}'])
def test_a_file_that_is_none_counts_as_empty(content, tmp_path):
    store = Measured("linear_layers")
    store.path.parent.mkdir(parents=True)
    store.path.write_text(content)
    assert store.get("b") is None
    store.put("b", 2)
    assert Measured("linear_layers").get("b") == 2


def test_figures_of_two_processes_are_kept_beside_each_other_and_no_folder_is_no_error(monkeypatch):
    one, other = Measured("name"), Measured("name")
    assert one.get("a") is other.get("a") is None
    one.put("a", 1)
    other.put("b", 2)
    assert [Measured("name").get(key) for key in "ab"] == [1, 2]
    monkeypatch.setattr("eagle31_hf.storage.measured.FOLDER", "/proc/none")
    one.put("c", 3)
    assert one.get("c") == 3


# -- texts

CHAINS = [{"num_assistant_tokens": depth} for depth in (1, 8)]
AUTO: list[dict] = [{}] * 2  # what it drafts depends on the time that things take


def in_bf16(model):
    """A copy in bf16 whose weights have few values, so that many tokens are as likely as others to the last bit."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((parameter * 4).round() / 4)
    return made.bfloat16()


@pytest.mark.parametrize(
    ("kind", "do_sample", "settings"),
    [("llama", False, CHAINS + AUTO), ("qwen3", True, AUTO)],
    ids=["llama-greedy", "qwen3-sampled"],
)
def test_in_bf16_the_text_does_not_depend_on_what_was_drafted(make_target, make_drafter, kind, do_sample, settings):
    plain = make_target(kind)
    target, drafter = in_bf16(plain), in_bf16(make_drafter(plain))
    drafter.load_target_embeddings(target)
    with few_rows(target) as rows:
        skip_unless(rows.is_exact)
    texts = set()
    for options in settings:
        torch.manual_seed(5)
        with track_acceptance() as stats:
            options = {"do_sample": do_sample, "max_new_tokens": 30} | options
            texts.add(tuple(target.generate(PROMPT, assistant_model=drafter, **options)[0].tolist()))
        assert stats.kinds["trees"] == 0
        assert "rounds in bfloat16" in stats.summary()
    assert len(texts) == 1


def test_in_bf16_the_demo_s_text_does_not_depend_on_what_was_drafted():
    target, tokenizer = demo.load_target()
    target, drafter = target.bfloat16(), demo.load_drafter("eagle31").bfloat16()
    with few_rows(target) as rows:
        skip_unless(rows.is_exact)
    for prompt in demo.prompts(tokenizer, 1, num_tokens=48):
        texts = set()
        for options in (*CHAINS, {}):
            texts.add(tuple(target.generate(prompt, assistant_model=drafter, max_new_tokens=32, **options)[0].tolist()))
        assert len(texts) == 1
