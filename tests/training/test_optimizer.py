"""Muon trains matrices, another optimizer the rest; together they resume, skip steps and follow schedules as one."""

import pytest
import torch
from close import EXACT, assert_close
from conftest import build_drafter
from factories import build
from training_runs import InterruptAfter, LostMachineError, make_examples, make_trainer, run

from eagle31_hf.cli import parser, training
from eagle31_hf.training.arguments import Eagle31TrainingArguments
from eagle31_hf.training.checkpointing import logger as optimizer_logger
from eagle31_hf.training.optimizer import JoinedOptimizer, matrices_of, new_muon, slow_down_tables

SAVING = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "cosine"}
RATES = {"matrix_learning_rate": 0.03, "learning_rate": 0.002}


def rates() -> tuple[float, float]:
    """Returns the rate and the weight decay of Muon, by default."""
    return arguments().matrix_learning_rate, arguments().weight_decay


def arguments(**options) -> Eagle31TrainingArguments:
    return Eagle31TrainingArguments(output_dir="unused", use_cpu=True, **options)


def gradients(drafter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_joined_optimizers_take_the_steps_of_each():
    joined_drafter, drafter = build(seed=3), build(seed=3)
    parts = []
    for each in (joined_drafter, drafter):
        matrices = matrices_of(each)
        rest = [p for p in each.parameters() if id(p) not in set(map(id, matrices))]
        parts.append([torch.optim.AdamW(rest, lr=0.01), new_muon(matrices, *rates())])
    joined = JoinedOptimizer(parts[0])
    schedule = torch.optim.lr_scheduler.LambdaLR(joined, lambda step: 0.5**step)
    for step in range(3):
        gradients(joined_drafter, step)
        gradients(drafter, step)
        joined.step()
        schedule.step()
        for part, rate in zip(parts[1], (0.01, 0.02), strict=True):
            part.param_groups[0]["lr"] = rate * 0.5**step
            part.step()
    for found, expected in zip(joined_drafter.parameters(), drafter.parameters(), strict=True):
        assert_close("weights", found.detach(), expected.detach(), EXACT)
    assert joined.step(lambda: torch.tensor(2.0)) == 2


@pytest.mark.parametrize("fields", [{}, {"num_hidden_layers": 3}, {"draft_vocab_size": 20}], ids=str)
def test_matrices_are_those_of_fc_and_layers(fields):
    drafter = build(**fields)
    matrices = set(map(id, matrices_of(drafter)))
    for name, parameter in drafter.named_parameters():
        is_matrix = parameter.dim() == 2 and name.startswith(("fc.", "layers."))
        assert (id(parameter) in matrices) == is_matrix, name
    drafter.fc.requires_grad_(False)
    assert id(drafter.fc.weight) not in set(map(id, matrices_of(drafter)))


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor", "adamw_bnb_8bit"])
def test_whatever_trains_the_rest_a_resumed_run_is_the_run(tmp_path, optim):
    if "bnb" in optim:
        pytest.importorskip("bitsandbytes")
    options = SAVING | RATES | {"optim": optim, "max_steps": 4}
    whole = run(make_trainer(tmp_path / "whole", **options))
    with pytest.raises(LostMachineError):
        make_trainer(tmp_path / "parts", callbacks=[InterruptAfter(3)], **options).train()
    resumed = run(make_trainer(tmp_path / "parts", **options), resume=True)
    for name, weight in whole.weights.items():
        assert_close(name, resumed.weights[name], weight, EXACT)
    assert resumed.logs == whole.logs


def test_each_rate_follows_the_schedule_from_its_own_peak(tmp_path):
    logs = run(make_trainer(tmp_path, lr_scheduler_type="linear", **RATES)).logs
    found = [(entry["learning_rate"], entry["matrix_learning_rate"]) for entry in logs if "loss" in entry]
    expected = [(0.002 * (1 - step / 6), 0.03 * (1 - step / 6)) for step in range(6)]
    assert torch.tensor(found).allclose(torch.tensor(expected))


@pytest.mark.parametrize("trains", [True, False])
def test_the_rate_of_a_head_falls_with_the_width(tmp_path, trains):
    trainer = make_trainer(tmp_path, learning_rate=0.004, train_head=trains, max_steps=1)
    trainer.train()
    rates = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    trained = [p for p in trainer.drafter.parameters() if p.requires_grad]
    assert sorted(rates) == sorted(map(id, trained))
    assert rates[id(trainer.drafter.norm.weight)] == 0.004
    width = trainer.drafter.config.hidden_size
    assert rates.get(id(trainer.drafter.lm_head.weight)) == (
        (0.004 * 128 / width if width > 128 else 0.004) if trains else None
    )


def test_tables_of_wide_drafters_are_slow(target):
    drafter = build_drafter(target, "own_embedding", hidden_size=256, head_dim=128)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.004, weight_decay=0.1)
    slow_down_tables(optimizer, drafter)
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    tables = {id(drafter.lm_head.weight), id(drafter.embed_tokens.weight)}
    assert {rates[table] for table in tables} == {(0.002, 0.1)}
    assert {rate for parameter, rate in rates.items() if parameter not in tables} == {(0.004, 0.1)}
    assert sorted(rates) == sorted(map(id, drafter.parameters()))


def test_without_its_rate_there_is_no_muon(tmp_path):
    trainer = make_trainer(tmp_path, matrix_learning_rate=None)
    logs = run(trainer).logs
    assert not any("matrix_learning_rate" in entry for entry in logs)
    assert not isinstance(trainer.optimizer.optimizer, JoinedOptimizer)


def test_an_optimizer_of_the_callers_trains_everything(tmp_path):
    drafter = build()
    mine = torch.optim.SGD([p for p in drafter.parameters() if p.requires_grad], lr=0.01)
    trainer = make_trainer(tmp_path, drafter=drafter, optimizers=(mine, None))
    trainer.train()
    assert trainer.optimizer.optimizer is mine
    assert trainer.optimizer_names == {"matrices": "SGD", "rest": "SGD"}
    assert trainer.args.matrix_learning_rate == 0.02, "arguments may be used again"


@pytest.mark.parametrize(("before", "after"), [(0.02, None), (None, 0.02)], ids=str)
def test_a_run_goes_on_with_the_optimizers_it_began_with(tmp_path, before, after):
    make_trainer(tmp_path, matrix_learning_rate=before, max_steps=1, **SAVING).train()
    with pytest.raises(
        ValueError, match=r"checkpoint-1: .* trained its matrices .* expected the same\. Resume"
    ) as caught:
        make_trainer(tmp_path, matrix_learning_rate=after, **SAVING).train(resume_from_checkpoint=True)
    assert ("set to None" if after else "set to a rate") in str(caught.value)


def test_nor_does_it_take_the_states_of_another_optim(tmp_path):
    make_trainer(tmp_path, optim="sgd", max_steps=1, **SAVING).train()
    with pytest.raises(ValueError, match=r"muon trained its matrices and sgd the rest, .* muon and adafactor would"):
        make_trainer(tmp_path, optim="adafactor", **SAVING).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("matrix", "rate"), [(0.02, 0.004), (None, 1e-4)])
def test_adamw_alone_has_a_rate_of_its_own(matrix, rate):
    assert arguments(matrix_learning_rate=matrix).learning_rate == rate
    assert arguments(matrix_learning_rate=matrix, learning_rate=0.5).learning_rate == 0.5


def test_a_card_says_what_trained_the_drafter(tmp_path):
    make_trainer(tmp_path / "muon", max_steps=1, **SAVING | RATES).train()
    make_trainer(tmp_path / "alone", matrix_learning_rate=None, max_steps=1, **SAVING).train()
    cards = [(tmp_path / name / "checkpoint-1" / "README.md").read_text() for name in ("muon", "alone")]
    assert "muon for matrices, learning rate 0.03; adamw_torch_fused, learning rate 0.002, cosine" in cards[0]
    assert "| adamw_torch_fused, learning rate 0.02, cosine" in cards[1]


def test_a_resumed_run_keeps_its_rates_and_says_so(tmp_path, caplog):
    options = SAVING | {"callbacks": [InterruptAfter(3)]}
    with pytest.raises(LostMachineError):
        make_trainer(tmp_path, **options | RATES).train()
    trainer = make_trainer(tmp_path, learning_rate=0.2, matrix_learning_rate=0.3, **SAVING)
    optimizer_logger.propagate, logs = True, caplog
    trainer.train(resume_from_checkpoint=True)
    assert "a resumed run keeps its rates: muon for matrices, learning rate 0.03; adamw" in logs.text
    assert "learning rate 0.002, cosine" in (tmp_path / "checkpoint-6" / "README.md").read_text()


@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_scheduler_type": "polynomial"},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=str,
)
def test_schedules_that_look_at_the_first_rate(tmp_path, schedule):
    trainer = make_trainer(tmp_path, eval_dataset=make_examples(2, seed=1), **RATES | schedule)
    trainer.train()
    first, last = trainer.optimizer.param_groups[0], trainer.optimizer.param_groups[-1]
    assert last["lr"] / first["lr"] == pytest.approx(15)


def test_the_states_of_joined_optimizers_are_to_be_read():
    joined = JoinedOptimizer([new_muon(matrices_of(build()), *rates())])
    with pytest.raises(TypeError):
        joined.state["x"] = 1
    with pytest.raises(AttributeError, match="expected load_state_dict"):
        joined.state = {"x": 1}


def test_a_checkpoint_without_optimizer_states_suits_every_run(tmp_path):
    make_trainer(tmp_path, matrix_learning_rate=None, max_steps=1, save_only_model=True, **SAVING).train()
    trainer = make_trainer(tmp_path, max_steps=2, **SAVING)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2


def test_states_of_other_groups_are_refused():
    drafter = build()
    muon = new_muon(matrices_of(drafter), *rates())
    joined = JoinedOptimizer([torch.optim.AdamW(drafter.norm.parameters()), muon])
    with pytest.raises(ValueError, match="loaded state dict"):
        joined.load_state_dict(muon.state_dict())
    with pytest.raises(ValueError, match="1 parameter groups more"):
        JoinedOptimizer(joined.parts[:1]).load_state_dict(joined.state_dict())


def test_nothing_for_muon_to_train_is_said(tmp_path):
    trainer = make_trainer(tmp_path)
    for matrix in matrices_of(trainer.drafter):
        matrix.requires_grad_(False)
    with pytest.raises(ValueError, match=r"Muon has no whole matrix .* or matrix_learning_rate=None"):
        trainer.train()


def test_the_command_has_the_defaults_of_the_arguments():
    options = parser().parse_args(["train", "--target", "t", "--data", "d", "--output", "o", "--device", "cpu"])
    defaults, of_the_command = arguments(), training.arguments(options)
    for name in ("matrix_learning_rate", "learning_rate", "depth", "loss"):
        assert getattr(of_the_command, name) == getattr(defaults, name), name
    assert options.learning_rate is None
    words = ["train", "--target", "t", "--data", "d", "--output", "o", "--matrix-learning-rate", "none"]
    assert parser().parse_args(words).matrix_learning_rate is None
