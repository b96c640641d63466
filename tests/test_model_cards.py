"""The demo's model card states the figures that its training wrote down."""

import json
from pathlib import Path

import pytest

from eagle31_hf import demo

CARD = Path(__file__).parent.parent / "model_cards" / "demo-pair.md"


@pytest.mark.parametrize(
    ("folder", "keys"),
    [
        ("target", ("files", "tokens_in_corpus", "steps", "tokens_trained", "minutes", "train_loss", "held_out_loss")),
        (
            "eagle31",
            (
                "rows",
                "steps",
                "tokens_trained",
                "depth",
                "minutes",
                "accepted_length",
                "loss_by_depth",
                "accuracy_by_depth",
            ),
        ),
        ("eagle3", ("minutes", "accepted_length", "loss_by_depth", "accuracy_by_depth")),
    ],
)
def test_the_demo_pairs_card_holds_the_recorded_figures(folder, keys):
    record, card = json.loads((demo.FOLDER / folder / "training.json").read_text()), CARD.read_text()
    for key in keys:
        values = record[key] if isinstance(record[key], list) else [record[key]]
        for value in values:
            text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if key != "minutes" else str(value)
            assert text in card, f"{folder}: {key} is {text}"
