"""Training on a GPU beside training on a CPU. Where there is none: skipped. `python -m pytest
tests/training/test_gpu.py`."""

import copy

import pytest
import torch
from close import assert_close
from factories import VARIANTS, build, inputs, target
from training_runs import PLAIN, make_examples, make_trainer, run

from eagle31_hf.training.objective import Batch, DraftingObjective, Settings
from eagle31_hf.training.target import TargetReader

DEVICE = "cuda"
DEPTH = 3
LENGTH = 25
CLOSE = 1e-3  # fp32, sums in another order

pytestmark = pytest.mark.gpu


def loss_and_gradients(drafter, device, recomputes, documents):
    drafter, theirs = copy.deepcopy(drafter).to(device), target().to(device)
    tokens, states = (x.to(device) for x in inputs(drafter, LENGTH))
    documents = documents.to(device)
    last = TargetReader(theirs, [1, 2, 4]).read(tokens, documents)[1]
    objective = DraftingObjective(
        drafter, Settings(DEPTH, (1.0, 0.8, 0.6)), TargetReader(theirs, [1, 2, 4]).logits
    ).train()
    objective.recomputes, objective.watches = recomputes, True
    outputs = objective(Batch(tokens, documents > 0, documents, states, last))
    outputs["loss"].backward()
    gradients = {name: p.grad.cpu() for name, p in drafter.named_parameters() if p.grad is not None}
    return outputs["loss"].detach().cpu(), outputs["sums"].cpu(), gradients


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "computed_again"])
@pytest.mark.parametrize("second", [1, 2], ids=["one_text", "packed"])
@pytest.mark.parametrize("kind", ["eagle31", "eagle3", "window_3", "two_layers", "mla"])
def test_losses_and_gradients_are_those_of_a_cpu(kind, second, recomputes):
    documents = torch.tensor([[1] * 11 + [second] * (LENGTH - 11), [1] * LENGTH])
    drafter = build(**VARIANTS[kind])
    (loss, sums, found), (wanted_loss, wanted_sums, wanted) = (
        loss_and_gradients(drafter, device, recomputes, documents) for device in (DEVICE, "cpu")
    )
    assert_close("loss", loss, wanted_loss, CLOSE)
    assert_close("sums", sums, wanted_sums, CLOSE)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert_close(name, gradient, wanted[name], CLOSE)


@pytest.mark.parametrize("options", [{}, {"packing": True}], ids=str)
def test_a_run_comes_to_what_it_comes_to_on_a_cpu(tmp_path, options):
    torch.manual_seed(0)
    expected = run(make_trainer(tmp_path / "cpu", **PLAIN, **options))
    torch.manual_seed(0)
    found = run(make_trainer(tmp_path / "gpu", use_cpu=DEVICE == "cpu", **PLAIN, **options))
    assert_close("losses", found.losses, expected.losses, CLOSE)
    for name, weight in found.weights.items():
        assert_close(name, weight.cpu(), expected.weights[name], CLOSE)


def test_mixed_precision_trains_and_what_is_walked_is_served(tmp_path):
    """In bf16 the losses fall; greedy text of an fp32 target is walked as it is decoded."""
    trainer = make_trainer(
        tmp_path,
        use_cpu=DEVICE == "cpu",
        bf16=True,
        learning_rate=3e-3,
        num_train_epochs=20,
        logging_steps=6,
        lr_scheduler_type="linear",
    )
    losses = run(trainer).losses
    assert losses[-1] < 0.9 * losses[0]
    theirs = target().to(DEVICE)
    prompts = torch.tensor([example["input_ids"][:6] for example in make_examples(4)]).to(DEVICE)
    texts = theirs.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=24, eos_token_id=None
    )
    examples = [{"input_ids": text.tolist(), "answers": [at >= 6 for at in range(len(text))]} for text in texts]
    options = {"eval_prompts": 4, "eval_max_new_tokens": 24, "use_cpu": DEVICE == "cpu"}
    metrics = make_trainer(
        tmp_path / "fp32", examples, trainer.drafter.float(), target=theirs, eval_dataset=examples, **options
    ).evaluate()
    assert metrics["eval_accepted_length"] == metrics["eval_served_accepted_length"]
