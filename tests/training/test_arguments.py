"""Arguments of a training run: those that no run can use are refused before there is a trainer."""

import math

import numpy
import pytest

from eagle31_hf.training.arguments import Eagle31TrainingArguments
from eagle31_hf.training.objective import MAX_DEPTH, Settings


def arguments(**options) -> Eagle31TrainingArguments:
    return Eagle31TrainingArguments(output_dir="unused", use_cpu=True, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rate": math.inf}, "learning_rate is inf; expected a finite number"),
        ({"weight_decay": -math.inf}, "weight_decay is -inf; expected a finite number"),
        ({"max_grad_norm": math.nan}, "max_grad_norm is nan; expected a finite number"),
        ({"max_steps": 1.5}, "max_steps is 1.5; expected an integer"),
        ({"learning_rate": True}, "learning_rate is True; expected a finite number"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0; expected a rate of at least 0"),
        ({"matrix_learning_rate": 0}, "matrix_learning_rate is 0; expected a rate above 0, or None"),
        ({"matrix_learning_rate": -1.0}, "matrix_learning_rate is -1.0; expected a rate above 0, or None"),
        ({"matrix_learning_rate": math.nan}, "matrix_learning_rate is nan; expected a finite number"),
        ({"matrix_learning_rate": "0.1"}, "matrix_learning_rate is '0.1'; expected a finite number"),
        ({"matrix_learning_rate": "none"}, "expected a finite number, or None"),
        ({"train_prompts": "False"}, "train_prompts is 'False'; expected true or false"),
        ({"packing": None}, "packing is None; expected true or false"),
        ({"train_head": 0}, "train_head is 0; expected true or false"),
        ({"depth_weights": ["a"], "depth": 1}, "expected as many numbers of at least 0"),
        ({"depth_weights": [1.0, math.nan], "depth": 2}, "depth_weights are [1.0, nan] and depth is 2"),
        ({"depth": 0}, f"depth is 0; expected 1 to {MAX_DEPTH}"),
        ({"depth": 100_000}, f"depth is 100000; expected 1 to {MAX_DEPTH}"),
        ({"eval_depth": MAX_DEPTH + 1}, f"eval_depth is {MAX_DEPTH + 1}; expected 1 to {MAX_DEPTH}"),
    ],
)
def test_refused(options, words):
    with pytest.raises(ValueError, match="Eagle31TrainingArguments") as caught:
        arguments(**options)
    assert words in str(caught.value)


def test_processes_wait_for_data_that_one_of_them_makes():
    """Of many chats for longer than the half hour that torch waits by default."""
    assert arguments().ddp_timeout == 86_400


def test_allowed():
    assert arguments(max_grad_norm=math.inf, depth=MAX_DEPTH, eval_depth=1).settings().depth == MAX_DEPTH


@pytest.mark.parametrize(("given", "expected"), [({}, 4 * 96), ({"position_reach": 0}, 0), ({"position_reach": 7}, 7)])
def test_positions_reach_four_times_as_far_as_a_sequence_unless_told_otherwise(given, expected):
    assert arguments(max_length=96, **given).position_reach == expected


def test_numbers_of_other_libraries_become_those_of_python():
    """They are written to JSON files."""
    found = arguments(position_reach=numpy.int64(7), depth_decay=numpy.float32(0.5))
    assert [type(found.position_reach), type(found.depth_decay)] == [int, float]
    assert (found.position_reach, found.depth_decay) == (7, 0.5)


def test_a_loss_of_no_depth_that_can_be_unrolled_is_none():
    """Settings made without arguments are checked, too."""
    with pytest.raises(ValueError, match=f"depth is 65; expected 1 to {MAX_DEPTH}"):
        Settings(65, (1.0,) * 65)
