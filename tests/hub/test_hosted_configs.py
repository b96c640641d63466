"""The folders of model_cards/: each loads, from weights of its own or once the repository it names serves them, and
claims nothing else."""

import json
from functools import cache
from pathlib import Path

import pytest
from factories import EAGLE3, build
from huggingface_hub import ModelCard

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.hub import publish

from .repositories import original_release

FOLDERS = sorted(path.parent for path in (Path(__file__).parents[2] / "model_cards").glob("*/config.json"))
OWN = [folder for folder in FOLDERS if (folder / "model.safetensors").exists()]
CARDS = [folder for folder in FOLDERS if folder not in OWN]
ALWAYS = {"model_type", "architectures", "target_model", "weights_from"}
GEOMETRY = {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "draft_vocab_size",
    "num_hidden_layers",
}


@cache
def release_of(ids):
    return original_release(build(num_attention_heads=2, aux_hidden_state_layer_ids=list(ids), **EAGLE3))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_hosted_config_loads_from_what_it_names(card, hub, caplog):
    stated = json.loads((card / "config.json").read_text())
    assert stated.keys() >= ALWAYS
    assert not GEOMETRY & stated.keys(), "the base checkpoint's own config knows these"
    ids = stated.get("aux_hidden_state_layer_ids", [1, 2, 4])
    hub.add(stated["weights_from"]["repo_id"], release_of(tuple(ids)))
    drafter = Eagle31DrafterModel.from_pretrained(card)
    for name in stated.keys() - ALWAYS:
        assert getattr(drafter.config, name) == stated[name], name
    assert drafter.config.target_model == stated["target_model"]


@pytest.mark.parametrize("card", CARDS[:2], ids=lambda card: card.name)
def test_a_hosted_config_is_published_with_the_commit_of_its_weights(card, hub):
    stated = json.loads((card / "config.json").read_text())
    link = stated["weights_from"]
    ids = stated.get("aux_hidden_state_layer_ids", [1, 2, 4])
    commit = hub.add(link["repo_id"], release_of(tuple(ids)))
    publish(card, f"tester/{card.name}")
    published = json.loads(hub.files(f"tester/{card.name}")["config.json"])
    assert published == stated | {"weights_from": {"repo_id": link["repo_id"], "revision": commit}}
    assert hub.files(f"tester/{card.name}")["README.md"] == (card / "README.md").read_bytes()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_hosted_cards_text_agrees_with_its_config(card):
    stated, page = json.loads((card / "config.json").read_text()), ModelCard.load(card / "README.md")
    assert page.data.base_model == [stated["target_model"]]
    assert page.data.library_name == "transformers"
    assert {"speculative-decoding", "eagle31_hf"} <= set(page.data.tags)
    for name, value in stated.items():
        if name == "weights_from":
            assert f"huggingface.co/{value['repo_id']}" in page.text
        elif name not in ("model_type", "architectures"):
            assert str(value).lower() in page.text.lower(), f"{name} and its source are in the card"


def test_there_are_cards():
    assert len(CARDS) > 40


@pytest.mark.parametrize("folder", OWN, ids=lambda folder: folder.name)
def test_a_drafter_with_weights_of_its_own_loads_and_names_its_target(folder):
    drafter = Eagle31DrafterModel.from_pretrained(folder)
    assert drafter.config.weights_from is None
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())
    page = ModelCard.load(folder / "README.md")
    assert page.data.base_model in (drafter.config.target_model, [drafter.config.target_model])
