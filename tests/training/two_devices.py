"""A training run with the target on a pretend accelerator, and the drafter on the CPU."""

import copy
import tempfile
from contextlib import nullcontext
from typing import Any

from factories import target
from pretend import WAITS, _Dispatch, _Functions, accelerator, moved
from training_runs import PLAIN, make_trainer

from eagle31_hf.training.evaluation import TrainingFigures
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.trainer import Eagle31Trainer


def files_that_wait() -> set[str]:
    """Returns the files in which a run that reads ahead would wait for the target's device."""
    read = Eagle31Trainer._read_apart

    def in_the_thread(trainer: Any, inputs: Any) -> Any:
        with _Functions(), _Dispatch():  # threads have their own
            return read(trainer, inputs)

    Eagle31Trainer._read_apart = in_the_thread
    TrainingFigures.counting = lambda *args: nullcontext()  # what counts FLOP would stand nearest to every wait
    with accelerator(), tempfile.TemporaryDirectory() as folder:
        drafter = new_drafter(target(), aux_hidden_state_layer_ids=[1, 2, 4])
        trainer = make_trainer(folder, drafter=drafter, target=moved(copy.deepcopy(target())), **PLAIN)
        WAITS.clear()
        trainer.train()
    return {line.partition(":")[0] for _, line in WAITS}
