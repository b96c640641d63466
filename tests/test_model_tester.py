"""What transformers expects of every model class, by its own tests: `ModelTesterMixin` run on the drafter.

`pytest tests/test_model_tester.py -rs` also lists what the mixin leaves out by itself, for want of a GPU or because it
is about images.
"""

import unittest
from pathlib import Path

import pytest
import torch
import transformers_suite
from factories import FIELDS

from eagle31_hf import Eagle31Config, Eagle31DrafterModel

try:
    common = transformers_suite.load()
except transformers_suite.NotFetchedError as reason:
    pytest.skip(str(reason), allow_module_level=True)

# What is asked of other models and not of a drafter, and where what stands behind it is tested.
LEFT_OUT = {
    "test_save_load": (
        "expects generation_config.json of models with a generate() only; a drafter's holds its drafting knobs. "
        "Saving and loading: test_modeling.py::test_round_trip_is_exact"
    ),
    "test_model_weights_reload_no_missing_tied_weights": (
        "loads a file without any of the weights and expects random ones; a drafter's is refused. "
        "test_modeling.py::test_a_faulty_checkpoint_is_refused"
    ),
}


class DrafterTester:
    """The tiny drafter and inputs that the mixin asks for."""

    batch_size, seq_length, is_training = 3, 7, True
    num_hidden_layers, hidden_size, num_attention_heads = 2, FIELDS["hidden_size"], FIELDS["num_attention_heads"]

    def get_config(self) -> Eagle31Config:
        return Eagle31Config(**FIELDS | {"num_hidden_layers": self.num_hidden_layers})

    def prepare_config_and_inputs_for_common(self) -> tuple[Eagle31Config, dict]:
        config, generator = self.get_config(), torch.Generator().manual_seed(0)
        shape = (self.batch_size, self.seq_length)
        return config, {
            "input_ids": torch.randint(config.vocab_size, shape, generator=generator),
            "target_hidden_states": torch.randn(
                *shape, config.num_aux_states * config.target_hidden_size, generator=generator
            ),
            "attention_mask": torch.ones(shape, dtype=torch.long),
        }


class TestDrafter(common.ModelTesterMixin, unittest.TestCase):
    all_model_classes = (Eagle31DrafterModel,)
    additional_model_inputs = ("target_hidden_states",)

    def setUp(self):
        self.model_tester = DrafterTester()
        if self._testMethodName in LEFT_OUT:
            self.skipTest(LEFT_OUT[self._testMethodName])

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        return inputs | ({"labels": inputs["input_ids"]} if return_labels else {})


def test_what_is_left_out_is_there():
    for name, reason in LEFT_OUT.items():
        assert hasattr(common.ModelTesterMixin, name)
        file, _, test = reason.rpartition(" ")[2].partition("::")
        assert f"def {test}(" in Path(__file__).with_name(file).read_text()
