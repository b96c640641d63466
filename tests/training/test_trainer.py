"""The promises of `Eagle31Trainer`, on tiny real runs: exact accumulation, bit-exact resumption, figures that serving
would measure."""

import itertools
import json
import shutil
import threading
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from close import EXACT, assert_close
from conftest import PROMPT, build_drafter, build_target
from factories import VOCAB, build, target
from hub.conftest import hub  # noqa: F401 -- a fixture
from safetensors.torch import load_file
from training_runs import (
    CHECKPOINTING,
    MUCH_TO_RESUME,
    PLAIN,
    InterruptAfter,
    LostMachineError,
    make_examples,
    make_trainer,
    run,
)
from transformers import TrainerCallback

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.acceptance import track_acceptance
from eagle31_hf.storage.fingerprints import weights_fingerprint
from eagle31_hf.training import evaluation
from eagle31_hf.training.ends import find_scoring
from eagle31_hf.training.evaluation import TrainingFigures
from eagle31_hf.training.flop import FlopCounter
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.objective import OF_ALL, OF_WATCHED
from eagle31_hf.training.packing import PackedExamples
from eagle31_hf.training.store import HiddenStateStore, Manifest, open_store, save_target_parts, write_shard
from eagle31_hf.training.target import TargetReader
from eagle31_hf.training.trainer import logger as trainer_logger

SUMMED = 1e-5  # fp32: sums over the examples of a step in another order, over a few plain gradient steps
FIGURE = 2e-5  # figures are logged to five digits
BF16_LOSS = 0.02  # of the loss: logits of eight bits
RATES = ("learning_rate", "matrix_learning_rate")
SAVING = {"save_strategy": "steps", "save_steps": 1}


def assert_same(found, expected, tolerance=EXACT):
    """Asserts that two runs came to the same."""
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert_close(name, found.weights[name], weight, tolerance)
    assert_close("losses", found.losses, expected.losses, tolerance)


@pytest.mark.parametrize(("normalisation", "batch"), [("token", 1), ("sequence", 2)])
def test_accumulated_batches_are_one_batch(tmp_path, normalisation, batch):
    """Examples differ in length and number of answer tokens; the last step of an epoch has fewer of them."""
    options = PLAIN | {"normalisation": normalisation, "num_train_epochs": 2}
    examples = make_examples(10)
    whole = run(make_trainer(tmp_path, examples, per_device_train_batch_size=4, **options))
    parts = run(
        make_trainer(
            tmp_path, examples, per_device_train_batch_size=batch, gradient_accumulation_steps=4 // batch, **options
        )
    )
    assert len(whole.losses) == 6
    assert_same(parts, whole, SUMMED)
    for found, expected in zip(parts.logs, whole.logs, strict=True):
        assert found | {"epoch": 0} == pytest.approx(expected | {"epoch": 0}, rel=1e-4, abs=FIGURE)  # it counts batches


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_packed_examples_are_examples(tmp_path, normalisation):
    options = PLAIN | {"normalisation": normalisation, "num_train_epochs": 3, "per_device_train_batch_size": 12}
    packed = make_trainer(tmp_path, packing=True, **options)
    assert len(packed.train_dataset) < 6
    assert_same(run(packed), run(make_trainer(tmp_path, **options)), SUMMED)


RESUMED = MUCH_TO_RESUME | {"eval_dataset": make_examples(3, seed=7), "position_reach": 90}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that is never stopped."""
    return run(make_trainer(tmp_path_factory.mktemp("whole"), **RESUMED))


@pytest.mark.parametrize("step", [2, 3])  # three steps are an epoch
def test_a_resumed_run_is_the_run_bit_for_bit(tmp_path, whole, step):
    """Evaluations lie in between, and the learning rate follows a schedule."""
    assert len(whole.losses) == 6
    with pytest.raises(LostMachineError):
        make_trainer(tmp_path, callbacks=[InterruptAfter(step)], **RESUMED).train()
    resumed = run(make_trainer(tmp_path, **RESUMED), resume=True)
    assert_same(resumed, whole)
    assert_close("optimizer", resumed.optimizer, whole.optimizer)
    assert resumed.logs == whole.logs


TWO_DEVICES = {
    "evaluated": RESUMED | {"eval_prompts": 2, "eval_max_new_tokens": 6},
    "packed": PLAIN | {"packing": True, "max_length": 40, "gradient_accumulation_steps": 5, "bf16": True},
}


@pytest.mark.parametrize("name", TWO_DEVICES)
def test_what_is_read_ahead_trains_as_what_is_read_when_it_is_learnt_from(tmp_path, monkeypatch, name):
    """The target's device has another name than the drafter's, though both are the CPU."""

    def made(folder, **others):
        drafter = new_drafter(target(), aux_hidden_state_layer_ids=[1, 2, 4])
        return make_trainer(tmp_path / folder, drafter=drafter, **TWO_DEVICES[name] | others)

    expected = run(made("one"))
    monkeypatch.setattr("eagle31_hf.training.target.execution_device", lambda model: torch.device("cpu", 0))
    trainer, readers = made("two"), set()
    read = trainer.reader.read
    monkeypatch.setattr(trainer.reader, "read", lambda *batch: readers.add(threading.current_thread()) or read(*batch))
    found = run(trainer)
    assert_same(found, expected)
    assert found.logs == expected.logs
    assert len(readers - {threading.main_thread()}) == len(found.losses), "a thread for each step"
    assert trainer.drafter.tie.get()[0] is trainer.reader.ends.embedding, "an evaluation leaves it tied to the target"
    if name == "evaluated":
        with pytest.raises(LostMachineError):
            made("stopped", callbacks=[InterruptAfter(3)]).train()
        assert_same(run(made("stopped"), resume=True), expected)


def test_nothing_to_resume_from_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_another_draft_vocabulary_is_refused(tmp_path):
    make_trainer(tmp_path, max_steps=1, **SAVING).train()
    with pytest.raises(ValueError, match="draft vocabulary"):
        make_trainer(tmp_path, drafter=build(seed=1)).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=f"draft_vocab_size 37, and {VOCAB} is asked for now"):
        make_trainer(tmp_path, drafter=build(draft_vocab_size=VOCAB)).train(resume_from_checkpoint=True)


def test_bf16_autocast_trains(tmp_path):
    expected = run(make_trainer(tmp_path, **PLAIN))
    found = run(make_trainer(tmp_path, bf16=True, **PLAIN))
    assert {weight.dtype for weight in found.weights.values() if weight.is_floating_point()} == {torch.float32}
    assert found.losses.tolist() == pytest.approx(expected.losses.tolist(), rel=BF16_LOSS)
    assert not torch.equal(found.losses, expected.losses)


def test_the_loss_is_computed_in_fp32_under_autocast(tmp_path):
    """A head of zeros gives logits without rounding: what is left is the rounding of the loss and of the target's
    distribution."""
    drafter = build()
    drafter.lm_head.weight.data.zero_()
    losses = [
        run(make_trainer(tmp_path, drafter=drafter, max_steps=1, learning_rate=0.0, bf16=bf16)).losses
        for bf16 in (True, False)
    ]
    assert_close("loss", *losses, SUMMED)


def test_recomputed_depths_give_the_same_weights(tmp_path):
    options, forwards = PLAIN | {"max_steps": 3}, []
    trainers = [make_trainer(tmp_path, **options, **{CHECKPOINTING: recomputes}) for recomputes in (True, False)]
    for trainer in trainers:
        trainer.drafter.register_forward_pre_hook(lambda *_, trainer=trainer: forwards.append(trainer))
    assert_same(*map(run, trainers), SUMMED)
    assert forwards.count(trainers[0]) == 2 * forwards.count(trainers[1])


def test_a_compiled_objective_gives_the_same_weights(tmp_path):
    options = PLAIN | {"max_steps": 1, "depth": 2}
    torch._dynamo.utils.counters.clear()
    compiled = run(make_trainer(tmp_path, torch_compile=True, torch_compile_backend="aot_eager", **options))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "it ran eagerly"
    assert_same(compiled, run(make_trainer(tmp_path, **options)), SUMMED)


class Listener(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(("log", set(logs)))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.seen.append(("evaluate", set(metrics)))


def test_callbacks_see_every_figure(tmp_path):
    listener = Listener()
    make_trainer(
        tmp_path, callbacks=[listener], eval_dataset=make_examples(2), eval_strategy="epoch", eval_prompts=1
    ).train()
    names = ("distance", "accuracy", "acceptance", "greedy_acceptance", "coverage", "state_norm")
    names += tuple(f"{place}_mass" for place in ("sink", "prompt", "own", "self"))
    by_depth = {f"{name}_{k}" for name in names for k in (1, 2, 3)}
    assert listener.seen[0] == (
        "log",
        by_depth | {"loss", "grad_norm", *RATES, "epoch", "tokens_per_second", "tflops", "waiting_for_data"},
    )
    lengths = {"accepted_length", "accepted_length_no_bonus", "served_accepted_length"}
    by_position = {f"{way}_acceptance_{k}" for way in ("served", "walked") for k in (1, 2, 3)}
    expected = {f"eval_{name}" for name in by_depth | lengths | by_position | {"loss"}}
    (evaluated,) = [found for kind, found in listener.seen if kind == "evaluate"]
    assert expected <= evaluated


def test_prompts_are_learnt_as_answers_are_and_evaluations_count_answers_alone(tmp_path):
    examples, held_out = make_examples(), make_examples(4, seed=1)
    as_answers = [example | {"answers": [True] * len(example["answers"])} for example in examples]
    options = PLAIN | {"eval_strategy": "epoch", "eval_dataset": held_out}
    trainer = make_trainer(tmp_path / "asked", examples, train_prompts=True, **options)
    asked = run(trainer)
    spelt = run(make_trainer(tmp_path / "spelt", as_answers, **options))
    plain = run(make_trainer(tmp_path / "plain", examples, **options))
    assert asked.logs == spelt.logs
    assert not torch.equal(asked.losses, plain.losses)
    trainer.save_model()
    assert json.loads((tmp_path / "asked" / "training.json").read_text())["settings"]["train_prompts"]
    assert "of all tokens, prompts too" in (tmp_path / "asked" / "README.md").read_text()


def test_a_run_is_resumed_with_what_its_facts_tell_of(tmp_path):
    def trainer(data):
        made = make_trainer(tmp_path, **PLAIN | SAVING, max_steps=1)
        made.facts = {"data": data}
        return made

    told = {"source": "texts", "rows": 8, "records_digest": "0" * 64, "held_out_digest": "1" * 64}
    trainer(told).train()
    for name, what in (("records_digest", "other data"), ("held_out_digest", "other rows held out")):
        with pytest.raises(ValueError, match=rf"began with {what} \(8 rows of texts, {name} .* expected the same"):
            trainer(told | {name: "2" * 64}).train(resume_from_checkpoint=True)
    for data in (told, told | {"source": "moved"}, {"source": "texts"}, "texts"):
        trainer(data).train(resume_from_checkpoint=True)


def test_a_run_is_resumed_by_steps_of_its_own_size_alone(tmp_path, caplog):
    def trainer(rows, accumulated, **options):
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated, "packing": True}
        return make_trainer(tmp_path, **PLAIN | SAVING | sizes | options)

    trainer(1, 4, max_steps=1).train()
    record = tmp_path / "checkpoint-1" / "training.json"
    told = json.loads(record.read_text())
    others = {
        "1 x 64 tokens": (1, 1, {}),
        "8 x 64 tokens": (2, 4, {"auto_find_batch_size": True}),
        "4 x 40 tokens": (2, 2, {"max_length": 40}),
        "4 x a text": (2, 2, {"packing": False}),
    }
    for asked, (rows, accumulated, options) in others.items():
        with pytest.raises(ValueError, match=f"learns from 4 x 64 tokens, and {asked} is asked for now; expected the"):
            trainer(rows, accumulated, **options).train(resume_from_checkpoint=True)
    assert trainer(2, 2, max_steps=2).train(resume_from_checkpoint=True).global_step == 2
    assert "does not say" not in caplog.text
    for number, damaged in enumerate(({}, {"step": None}, {"step": {"rows": 4}}, {"step": [4, 64]})):
        record.write_text(json.dumps({name: told[name] for name in told if name != "step"} | damaged))
        earlier = tmp_path / f"checkpoint-{10 + number}"
        shutil.copytree(record.parent, earlier)
        assert trainer(1, 4, max_steps=1).train(resume_from_checkpoint=str(earlier)).global_step == 1
        assert f"{earlier}: its run does not say how much a step learns from" in caplog.text


def test_a_run_resumed_with_another_loss_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trainer_logger, "propagate", True)
    options = PLAIN | {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(LostMachineError):
        make_trainer(tmp_path, callbacks=[InterruptAfter(2)], **options).train()
    run(make_trainer(tmp_path, **options), resume=True)
    assert "another loss" not in caplog.text
    changed = options | {"train_prompts": True, "position_reach": 50, "depth_weights": [1.0, 1.0, 1.0]}
    earlier = str(tmp_path / "checkpoint-2")
    gone_on = run(make_trainer(tmp_path, **changed), resume=earlier)
    assert not torch.equal(gone_on.weights["fc.weight"], load_file(f"{earlier}/model.safetensors")["fc.weight"])
    was = "depth_weights [1.0, 1.0, 1.0] (was [1.0, 0.8, 0.64"
    for words in ("begun with another loss", was, "train_prompts True (was False)", "position_reach 50 (was 0)"):
        assert words in caplog.text


def test_a_run_is_not_resumed_by_another_network(tmp_path):
    """Its weights would fit, and compute something else."""
    options = PLAIN | {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(LostMachineError):
        make_trainer(tmp_path, callbacks=[InterruptAfter(2)], **options).train()
    other = build()
    other.config.norm_output = not other.config.norm_output
    with pytest.raises(ValueError, match=r"checkpoint-2: its drafter has norm_output .* expected the same"):
        make_trainer(tmp_path, drafter=other, **options).train(resume_from_checkpoint=True)


def test_a_drafter_whose_table_is_padded_further_than_the_targets(tmp_path):
    sizes = {"vocab_size": VOCAB + 3, "draft_vocab_size": VOCAB + 3}
    losses = run(make_trainer(tmp_path, drafter=build(**sizes), max_steps=1, **PLAIN)).losses
    assert losses.isfinite().all()


class Scheduleless(torch.optim.SGD):
    """Keeps other weights while it trains than those that are to be used, twice these, as optimizers have without a
    schedule."""

    mode = "eval"

    def train(self):
        self._change("train", 2.0)

    def eval(self):
        self._change("eval", 0.5)

    @torch.no_grad()
    def _change(self, mode, factor):
        for group in self.param_groups if mode != self.mode else ():
            for weight in group["params"]:
                weight.mul_(factor)
        self.mode = mode


def test_an_optimizer_without_a_schedule_is_evaluated_and_saved_with_its_average(tmp_path):
    drafter, modes = build(), []
    optimizer = Scheduleless(drafter.parameters(), lr=0.1)

    class Noting(TrainerCallback):
        def on_evaluate(self, *args, **kwargs):
            modes.append(optimizer.mode)

        on_save = on_evaluate

    options = PLAIN | {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"eval_dataset": make_examples(2), "optimizers": (optimizer, None)}
    make_trainer(tmp_path, drafter=drafter, callbacks=[Noting()], **options).train()
    assert len(modes) > 3
    assert set(modes) == {"eval"}


def test_the_best_weights_stay_as_they_are_loaded(tmp_path):
    drafter = build()
    options = PLAIN | {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2, "max_steps": 3}
    options |= {"eval_dataset": make_examples(2), "load_best_model_at_end": True}
    optimizer = Scheduleless(drafter.parameters(), lr=0.1)
    trainer = make_trainer(tmp_path, drafter=drafter, optimizers=(optimizer, None), **options)
    trainer.train()
    optimizer.train()  # as after a last step that is not evaluated
    trainer._load_best_model()
    trainer.save_model()
    best = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    assert_close("fc", drafter.fc.weight.detach(), best["fc.weight"])


def test_predict_measures_as_evaluate_does(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=make_examples(3), **PLAIN)
    found = {name.partition("_")[2]: value for name, value in trainer.predict(make_examples(3)).metrics.items()}
    expected = trainer.evaluate()
    assert found["accepted_length"] == expected["eval_accepted_length"]


def test_held_out_answers_in_which_nothing_can_be_drafted_end_no_run(tmp_path):
    """As of one token each: the best checkpoint is chosen by an accepted length of 0."""
    held_out = [{"input_ids": [1, 2, 3, 4, 5], "answers": [False] * 4 + [True]}] * 2
    options = PLAIN | {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    options |= {"save_steps": 1, "load_best_model_at_end": True}
    trainer = make_trainer(tmp_path, eval_dataset=held_out, **options)
    trainer.train()
    assert trainer.state.best_metric == 0.0


@pytest.mark.parametrize("held_out", [[], PackedExamples(make_examples(3), 64)], ids=["none", "packed"])
def test_what_cannot_be_evaluated_on_is_refused(tmp_path, held_out):
    with pytest.raises(ValueError, match=r"expected examples with a length, one at least, and not packed"):
        make_trainer(tmp_path, eval_dataset=held_out, **PLAIN).evaluate()


def test_a_process_without_a_prompt_does_not_wait_for_those_that_are_refused(tmp_path, monkeypatch):
    """All of them add up what generate() accepts, also where it refuses the target."""
    trainer = make_trainer(tmp_path, eval_dataset=make_examples(3), **PLAIN | {"eval_prompts": 1})
    with_prompt = record_reductions(trainer, monkeypatch)
    monkeypatch.setattr(type(trainer.target), "_is_stateful", True)
    assert "eval_served_accepted_length" not in trainer.evaluate()
    refused = len(with_prompt)
    monkeypatch.undo()
    drafted = record_reductions(trainer, monkeypatch)
    assert "eval_served_accepted_length" in trainer.evaluate()
    assert refused == len(drafted)


def record_reductions(trainer, monkeypatch):
    """Returns a list of what processes have added up from now on."""
    reduced, reduce = [], trainer.accelerator.reduce
    monkeypatch.setattr(trainer.accelerator, "reduce", lambda *args: reduced.append(args) or reduce(*args))
    return reduced


def test_batches_without_documents_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, **PLAIN)
    collate = trainer.data_collator
    trainer.data_collator = lambda items: {k: v for k, v in collate(items).items() if k != "documents"}
    with pytest.raises(ValueError, match="a batch has answers, input_ids, and no documents; expected a data_collator"):
        trainer.train()


def test_a_second_run_begins_its_figures_anew(tmp_path):
    """Six steps are logged by fours, so two are left over."""
    trainer = make_trainer(tmp_path, logging_steps=4, **PLAIN | {"learning_rate": 0.0})
    assert run(trainer).logs == run(trainer).logs


def test_tokens_a_second_are_those_of_texts_from_the_first_batch_on(tmp_path, monkeypatch):
    """By a clock whose n-th reading is n squared: a log of two steps reads it when it has its batches, at the first
    one, and then, 3 s later, at its end."""
    ticks = itertools.count()
    monkeypatch.setattr("eagle31_hf.training.evaluation.monotonic", lambda: float(next(ticks) ** 2))
    examples = make_examples(4)
    trainer = make_trainer(tmp_path, examples, logging_steps=2)
    trainer.train()
    [log] = [log for log in trainer.state.log_history if "tokens_per_second" in log]
    assert log["tokens_per_second"] == round(sum(len(example["input_ids"]) for example in examples) / 3, 1)


def test_the_arithmetic_of_a_second_is_that_of_its_tokens(tmp_path, monkeypatch):
    """Counted in the first batch alone, the target's forward and going back through the drafter included."""
    ticks = itertools.count()
    monkeypatch.setattr("eagle31_hf.training.evaluation.monotonic", lambda: 1e-9 * next(ticks))
    trainer = make_trainer(tmp_path, make_examples(4), logging_steps=2)
    whole, own = [], trainer.training_step

    def counted(*args, **kwargs):
        with FlopCounter() as counter:
            loss = own(*args, **kwargs)
        whole.append(counter.total)
        return loss

    trainer.training_step = counted
    counters = []
    monkeypatch.setattr(evaluation, "FlopCounter", lambda: counters.append(FlopCounter()) or counters[-1])
    trainer.train()
    assert len(counters) == 1
    [log] = [log for log in trainer.state.log_history if "tflops" in log]
    of_token = trainer._figures.flop_of_token
    assert log["tflops"] == pytest.approx(log["tokens_per_second"] * of_token / 1e12, rel=1e-3)
    tokens = sum(len(example["input_ids"]) for example in make_examples(4))
    assert 0.9 * of_token * tokens < sum(whole) < 1.1 * of_token * tokens  # texts differ in length


def test_the_arithmetic_is_that_of_each_device():
    both = SimpleNamespace(num_processes=2, device=torch.device("cpu"), reduce=lambda x, how: 2 * x)
    figures = TrainingFigures(torch.device("cpu"))
    figures.flop_of_token = 1e12
    figures.begin(torch.ones(1, 40, dtype=torch.long))
    figures.add(torch.ones(2 + len(OF_ALL) + len(OF_WATCHED), 2))
    logs = figures.take(both)
    assert logs["tflops"] == pytest.approx(logs["tokens_per_second"] / 2)


def test_batches_are_read_by_a_thread_and_stay_on_the_host_until_they_are_trained_on(tmp_path):
    readers = []

    class Noted(torch.utils.data.Dataset):
        lengths = [10] * 8

        def __len__(self):
            return len(self.lengths)

        def __getitem__(self, index):
            readers.append(threading.current_thread())
            return {"input_ids": torch.arange(10), "answers": torch.ones(10) > 0}

    trainer = make_trainer(tmp_path, Noted(), per_device_train_batch_size=1)
    assert trainer.get_train_dataloader().device is None
    readers.clear()
    trainer.train()
    assert len(readers) == 8
    assert threading.main_thread() in readers, "the order is drawn by whoever trains"
    assert len({*readers}) == 2


def test_the_share_of_time_that_waits_for_data(monkeypatch):
    clock = iter([10.0, 20.0, 22.0])
    monkeypatch.setattr("eagle31_hf.training.evaluation.monotonic", lambda: next(clock))
    accelerator, figures = Accelerator(cpu=True), TrainingFigures(torch.device("cpu"))
    for waited, share in (([7.0, 2.0, 0.5], 0.25), ([1.0], 0.5)):  # what comes before the first batches does not count
        for seconds in waited:
            figures.add_waiting(seconds)
        figures.add(torch.ones(2 + len(OF_ALL) + len(OF_WATCHED), 2))
        assert figures.take(accelerator)["waiting_for_data"] == share


def test_tensorboard_gets_the_figures(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_trainer(tmp_path, report_to=["tensorboard"]).train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {"train/loss", "train/acceptance_1", "train/sink_mass_3"} <= set(events.Tags()["scalars"])


def test_a_run_that_pushes_to_the_hub(tmp_path, hub):  # noqa: F811
    trainer = make_trainer(tmp_path / "run", push_to_hub=True, hub_model_id="tester/trained", **SAVING)
    trainer.train()
    trainer.push_to_hub()
    files = hub.files("tester/trained")
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md", "training.json"} <= files.keys()
    assert not any(name.startswith("checkpoint") or "optimizer" in name for name in files)
    card = files["README.md"].decode()
    assert 'from_pretrained("tester/trained"' in card
    assert "6 of 2 sequences" in card
    loaded = Eagle31DrafterModel.from_pretrained("tester/trained")
    for name, weight in trainer.drafter.state_dict().items():
        assert_close(name, loaded.state_dict()[name], weight)


# Evaluation.


def greedy(teller, prompt: list[int], num_tokens: int, **options) -> list[int]:
    ids = torch.tensor([prompt])
    return teller.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, **options
    )[0].tolist()


def greedy_examples(teller, prompts: list[list[int]], num_tokens: int) -> list[dict]:
    """The target's own texts."""
    texts = [greedy(teller, prompt, num_tokens) for prompt in prompts]
    return [
        {"input_ids": ids, "answers": [at >= len(prompt) for at in range(len(ids))]}
        for prompt, ids in zip(prompts, texts, strict=True)
    ]


PROMPTS = [[1, 2, 3, 5, 8], [1, 2, 3, 5], [9, 9, 4], [7, 1, 0, 2, 6, 5], [3, 3], [0, 4, 10, 1]]
STOP = 4


@pytest.mark.parametrize(("depth", "stop"), [(1, STOP), (3, None), (6, STOP)])
def test_the_accepted_length_is_that_of_generate(tmp_path, depth, stop):
    """Walking the target's own greedy texts counts what decoding them again counts."""
    teller, num_tokens = build_target("qwen3", eos_token_id=stop), 24
    drafter = build_drafter(teller)
    examples = greedy_examples(teller, PROMPTS, num_tokens)
    ends = {example["input_ids"][-1] == stop for example in examples}
    assert ends == ({True, False} if stop else {False}), "some texts end by themselves, others by their length"
    trainer = make_trainer(
        tmp_path,
        examples,
        drafter,
        target=teller,
        eval_dataset=examples,
        eval_depth=depth,
        eval_prompts=len(examples),
        eval_max_new_tokens=num_tokens,
        per_device_eval_batch_size=4,
    )
    metrics = trainer.evaluate()
    with track_acceptance() as stats:
        for prompt in PROMPTS:
            greedy(teller, prompt, num_tokens, assistant_model=drafter, num_assistant_tokens=depth)
    assert metrics["eval_accepted_length"] == stats.mean_accepted_length > 1
    assert metrics["eval_served_accepted_length"] == stats.mean_accepted_length
    rounds = stats.target_forwards
    assert metrics["eval_accepted_length_no_bonus"] == sum(stats.accepted_per_round) / rounds
    accepted = [*stats.accepted_per_position, *[0] * depth][:depth]
    for way in ("served", "walked"):
        assert [metrics[f"eval_{way}_acceptance_{k + 1}"] for k in range(depth)] == [n / rounds for n in accepted]
    store = write_store(tmp_path / "store", teller, drafter, examples)
    offline = make_trainer(tmp_path, store, drafter, target=None, eval_dataset=store, eval_depth=depth)
    assert offline.evaluate()["eval_accepted_length"] == stats.mean_accepted_length, "a store knows what ends a text"


class Weights(TrainerCallback):
    """Sets the head after each step: the weights an optimizer might have come to."""

    def __init__(self, heads):
        self.heads = heads

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.drafter.lm_head.weight.data.copy_(self.heads[state.global_step - 1])


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_the_best_checkpoint_is_the_one_that_drafts_best(tmp_path, strategy):
    """A head that is sure of itself, also where it errs, drafts well and has a high loss; one that says nothing has a
    lower one."""
    teller = build_target("qwen3")
    drafter, examples = build_drafter(teller), greedy_examples(teller, [list(PROMPT[0])] * 3, 24)
    sure = 10 * drafter.lm_head.weight.detach().clone()
    options = {
        "learning_rate": 0.0,
        "per_device_train_batch_size": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
    }
    trainer = make_trainer(
        tmp_path,
        examples,
        drafter,
        target=teller,
        eval_dataset=examples[:1],
        callbacks=[Weights([sure * 0, sure, sure * -1])],
        load_best_model_at_end=True,
        save_strategy=strategy,
        **PLAIN | options,
    )
    trainer.train()
    losses, lengths = (
        [e[name] for e in trainer.state.log_history if name in e] for name in ("eval_loss", "eval_accepted_length")
    )
    assert losses[0] < losses[1]
    assert lengths[1] > max(lengths[0], lengths[2])
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert_close("head", trainer.drafter.lm_head.weight.detach(), sure)
    trainer.save_model()
    card = (tmp_path / "README.md").read_text()
    assert "2 of 1 sequences" in card
    assert f"{lengths[1]:.2f} a target forward" in card


# Data and targets.


def write_store(folder, teller, drafter, examples: list[dict]) -> HiddenStateStore:
    """The examples with the target's states, in fp32."""
    ids = drafter.config.aux_hidden_state_layer_ids
    reader, made = TargetReader(teller, ids), []
    for example in examples:
        tokens = torch.tensor([example["input_ids"]])
        states, last = reader.read(tokens, torch.ones_like(tokens))
        made.append(
            {
                "input_ids": tokens[0],
                "answers": torch.tensor(example["answers"]),
                "states": states[0],
                "last_states": last[0],
            }
        )
    manifest = Manifest(
        "me/target",
        weights_fingerprint(teller),
        "tokenizer",
        {},
        teller.config.hidden_size,
        num_records=len(examples),
        records_per_shard=5,
        layer_ids=ids,
        dtype="float32",
    )
    open_store(folder, manifest)
    for index in range(manifest.num_shards):
        write_shard(folder, index, made[5 * index : 5 * index + 5], {})
    save_target_parts(folder, teller, asdict(find_scoring(teller)))
    return HiddenStateStore(folder)


@pytest.mark.parametrize(
    ("fields", "packing"),
    [({}, True), ({"share_target_embeddings": True, "draft_vocab_size": VOCAB, "share_target_head": True}, False)],
    ids=["own", "shared"],
)
def test_stored_states_train_as_the_target_does(tmp_path, fields, packing):
    examples, options = make_examples(), PLAIN | {"packing": packing, "max_length": 32}
    store = write_store(tmp_path / "store", target(), build(**fields), examples)
    online = make_trainer(tmp_path / "online", examples, build(**fields), eval_dataset=examples[:3], **options)
    offline = make_trainer(
        tmp_path / "offline", store, build(**fields), target=None, eval_dataset=[store[i] for i in range(3)], **options
    )
    assert_same(run(offline), run(online), SUMMED)
    found, expected = (
        {k: v for k, v in t.evaluate().items() if "_per_second" not in k and "runtime" not in k}
        for t in (offline, online)
    )
    assert found == pytest.approx(expected, abs=FIGURE)


def test_a_store_that_does_not_belong_to_the_run_is_refused(tmp_path):
    drafter = build()
    store = write_store(tmp_path / "store", target(), drafter, make_examples(2))
    with pytest.raises(ValueError, match=r"the layers \[1, 2, 4\], the drafter reads \[0, 2, 4\]"):
        make_trainer(tmp_path, store, build(aux_hidden_state_layer_ids=[0, 2, 4]), target=None)
    with pytest.raises(ValueError, match="neither a target nor a store"):
        make_trainer(tmp_path, make_examples(2), drafter, target=None)


def test_a_drafter_is_served_with_the_layers_it_was_trained_on(tmp_path):
    """A drafter that names none takes defaults, which need not be those of the store."""
    store = write_store(tmp_path / "store", target(), build(aux_hidden_state_layer_ids=[0, 2, 4]), make_examples(2))
    trainer = make_trainer(tmp_path, store, build(aux_hidden_state_layer_ids=None), target=None)
    assert trainer.drafter.config.aux_hidden_state_layer_ids == [0, 2, 4]
    fewer = write_store(tmp_path / "fewer", target(), build(aux_hidden_state_layer_ids=[0, 4]), make_examples(2))
    with pytest.raises(ValueError, match=r"layers \[0, 4\], the drafter reads 3 of any"):
        make_trainer(tmp_path, fewer, build(aux_hidden_state_layer_ids=None), target=None)


@pytest.mark.parametrize(("normalisation", "packing"), [("token", True), ("sequence", False)])
def test_examples_without_answers_are_nothing(tmp_path, normalisation, packing):
    """Alone they are a loss of zero; beside others they change nothing."""
    examples, options = make_examples(6, empty=(1, 2, 5)), PLAIN | {"normalisation": normalisation, "packing": packing}
    drafter = build()
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    none = make_trainer(
        tmp_path, [examples[1], examples[2]], drafter, eval_dataset=[examples[5]], eval_prompts=1, **options
    )
    assert set(run(none).losses.tolist()) == {0.0}
    for name, value in before.items():
        assert_close(name, drafter.state_dict()[name], value)
    assert none.evaluate()["eval_loss"] == 0.0
    options |= {"per_device_train_batch_size": 6, "num_train_epochs": 3}
    assert_same(
        run(make_trainer(tmp_path, examples, **options)),
        run(make_trainer(tmp_path, [examples[0], examples[3], examples[4]], **options)),
        SUMMED,
    )


@pytest.mark.parametrize(
    ("fields", "options", "frozen"),
    [
        ({}, {}, {"embed_tokens.weight"}),
        ({}, {"train_embeddings": True}, set()),
        ({}, {"train_head": False}, {"embed_tokens.weight", "lm_head.weight"}),
        (
            {"share_target_embeddings": True, "share_target_head": True, "draft_vocab_size": VOCAB},
            {"train_embeddings": True},
            set(),
        ),
    ],
    ids=["head", "head_and_embeddings", "neither", "both_are_the_targets"],
)
def test_what_is_trained_and_what_is_not(tmp_path, fields, options, frozen):
    drafter, teller = build(**fields), target()
    before, told = ({name: value.clone() for name, value in model.state_dict().items()} for model in (drafter, teller))
    trainer = make_trainer(tmp_path, drafter=drafter, target=teller, max_steps=1, weight_decay=0.1, **options, **SAVING)
    trainer.train()
    parameters, saved = dict(drafter.named_parameters()), load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, before[name]) == (name in frozen or name not in parameters), name
    assert saved.keys() == drafter.state_dict().keys()
    assert {"d2t", "t2d"} <= saved.keys() or drafter.d2t is None
    optimizer = torch.load(tmp_path / "checkpoint-1" / "optimizer.pt")
    assert len(optimizer["state"]) == len(parameters) - len(frozen)
    assert all(torch.equal(value, told[name]) for name, value in teller.state_dict().items())
    assert not any(weight.requires_grad or weight.grad is not None for weight in teller.parameters())
    assert not teller.training


@pytest.mark.parametrize("where", ["examples", "eval_dataset"])
def test_examples_of_another_tokenizer_are_refused(tmp_path, where):
    foreign = [{"input_ids": [1, 2, VOCAB + 3], "answers": [True] * 3}]
    with pytest.raises(ValueError, match=rf"token ids go from 1 to {VOCAB + 3}; expected 0 to {VOCAB - 1}"):
        make_trainer(tmp_path, **{where: foreign})


def test_texts_a_target_breaks_on_are_left_out_and_counted(tmp_path):
    """One token's embedding is NaN, so every text with it has NaN states from there on."""
    theirs, token = target(), 50
    theirs.get_input_embeddings().weight.data[token] = float("nan")
    examples = make_examples()
    num_broken = sum(token in example["input_ids"] for example in examples)
    assert 0 < num_broken < len(examples)
    drafter = build()  # its own embedding is whole
    found = run(make_trainer(tmp_path, examples, drafter, target=theirs))
    assert found.logs[-2]["texts_with_broken_states"] == num_broken
    assert all(weight.isfinite().all() for weight in found.weights.values())
    assert found.losses.isfinite().all()
