"""The search of recipes: its parts on the demo's target with few texts, and that what it measures is what generate()
accepts."""

import json
import sys
from pathlib import Path

import pytest
import torch

from eagle31_hf import Eagle31Trainer as Trainer
from eagle31_hf import Eagle31TrainingArguments, demo, track_acceptance
from eagle31_hf.demo import held_out_file

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import going_on
import search_material
import search_recipe
import search_table
import search_training
import transfer_rate

FEW = {"NUM_TEXTS": 24, "NUM_PROMPTS": 4, "ANSWER": 24, "LENGTH": 48, "PROMPT": 16, "LONG_PROMPT": 64}


@pytest.fixture(scope="module")
def few():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW.items():
            patch.setattr(search_material, name, value)
        # of the whole library the tokenizer alone takes half a minute
        patch.setattr(search_material, "texts_of", lambda name, held_out: [held_out_file("heapq.py")])
        yield


@pytest.fixture(scope="module")
def material(few, tmp_path_factory):
    return search_material.Material("demo", demo.FOLDER / "target", tmp_path_factory.mktemp("work"))


@pytest.mark.parametrize("name", ["as trained", "long"])
def test_measured_lengths_are_those_of_generate(material, name):
    target = material.target
    drafter = demo.load_drafter("eagle31")
    drafter.load_target_embeddings(target)
    found = search_training.measured(material, drafter)
    layer_ids = drafter.config.aux_hidden_state_layer_ids
    texts = material.prompt_sets(layer_ids)[name]
    rounds = tokens = 0
    for ids in texts.ids[:, : texts.prompt].split(1):
        with track_acceptance() as stats:
            out = target.generate(
                ids,
                assistant_model=drafter,
                num_assistant_tokens=search_training.SERVED_DEPTH,
                draft_tree_top_k=1,
                max_new_tokens=FEW["ANSWER"],
                eos_token_id=None,
                do_sample=False,
            )
        assert out.shape[1] == texts.ids.shape[1]
        rounds, tokens = rounds + stats.target_forwards, tokens + stats.generated_tokens - stats.prefills
    assert found[name] == pytest.approx(tokens / rounds, rel=1e-3)


def test_each_optimizer_has_its_parameters_once(material):
    drafter = search_training.begun(material, search_recipe.MUON, seed=0)
    adamw, muon = search_training.new_optimizers(drafter, search_recipe.MUON)
    of = [[p for group in each.param_groups for p in group["params"]] for each in (adamw, muon)]
    assert {p.dim() for p in of[1]} == {2}
    assert sorted(map(id, of[0] + of[1])) == sorted(id(p) for p in drafter.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("idea", "tokens", "rates"),
    [
        ("eagle31 train, Muon 0.01, decay 0.1", 2048, (0.01, 0.004, 0.1)),
        ("eagle31 train, 512 tokens a step", 512, (0.02, 0.004, 0.0)),
        ("eagle31 train, 8,192 tokens a step, Muon 0.04", 8192, (0.04, 0.004, 0.0)),
    ],
)
def test_a_row_of_the_library_is_trained_by_its_own_trainer(material, monkeypatch, idea, tokens, rates):
    """By its defaults but for rates, decay and the size of a step, which are the recipe's; the drafter has learnt
    afterwards."""
    seen = []
    monkeypatch.setattr(
        search_training, "Eagle31Trainer", lambda *args, **kwargs: seen.append(args) or Trainer(*args, **kwargs)
    )
    recipe = search_recipe.IDEAS[idea]
    drafter, figures = search_training.trained(material, recipe, seed=0, steps=4)
    [(begun, args, examples)] = seen
    assert begun is drafter
    assert (args.matrix_learning_rate, args.learning_rate, args.weight_decay) == rates
    texts = search_material.BATCH * search_material.LENGTH * tokens // 2048  # they are shorter in this test
    assert args.max_length * args.gradient_accumulation_steps * args.train_batch_size == texts
    usual = Eagle31TrainingArguments("anywhere", use_cpu=True)
    assert all(getattr(args, name) == getattr(usual, name) for name in ("depth", "depth_decay", "loss", "warmup_steps"))
    assert (args.max_steps, len(examples)) == (4, FEW["NUM_TEXTS"])
    before = search_training.begun(material, recipe, seed=0)
    assert not torch.equal(drafter.fc.weight, before.fc.weight)
    assert figures["loss"] > 0


def test_runs_are_done_once_and_shown(material, tmp_path, capsys, monkeypatch):
    work = material.work  # of which the answers are kept
    line = ["search_recipe.py", "run", "--work", str(work), "--target", "demo", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [*line, "--ideas", "Muon 0.04", "fc by least squares", "--seeds", "2"])
    for _ in range(2):
        search_recipe.main()
        with (work / "runs.jsonl").open("a") as file:
            file.write('{"target": "demo", "idea": "Mu')  # a kill
    rows = search_recipe.rows_of(work)
    assert [(row["idea"], row["seed"]) for row in rows] == [
        (idea, seed) for seed in (0, 1) for idea in ("Muon 0.04", "fc by least squares")
    ]
    kept = tmp_path / "kept.jsonl"
    monkeypatch.setattr(sys, "argv", ["search_recipe.py", "table", "--work", str(work), "--output", str(kept)])
    capsys.readouterr()
    search_recipe.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| Muon 0.04", "| fc by least squares"]
    assert all("±" in line for line in lines[2:])
    assert [json.loads(row)["seed"] for row in kept.read_text().splitlines()] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("example", "options", "said"),
    [
        (going_on, "--shares 0.1 --texts 1 --prompts 1", ["share of the rates", "\n               0.1  "]),
        (transfer_rate, "--widths 64 --target-steps 1", ["| match_rms_adamw | 64 |"]),
    ],
)
def test_examples_of_the_same_texts(few, tmp_path, capsys, monkeypatch, example, options, said):
    line = [example.__file__, *options.split(), "--steps", "1", "--files", "12", "--work", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    example.main()
    found = capsys.readouterr().out
    assert [words for words in said if words not in found] == []


def test_the_recipe_beside_speculators():
    """At each of its rates, by hand: (2 + 3) / 2 accepted drafts over 1 and over 1.25, both without and with errors. A
    target of other weights is not compared with."""

    def row(idea: str, seed: int, length: float, weights: str = "a") -> dict:
        of_sets = dict.fromkeys(search_table.SETS, length)
        about = {"target": "demo", "weights": weights, "idea": idea, "seed": seed, "steps": 60, "seconds": 2.0}
        return about | of_sets

    rows = [row("the recipe", 0, 3.0), row("the recipe", 1, 4.0), row("another", 0, 9.0)]
    others = ("speculators as it comes", "speculators, Muon 0.006", "speculators, Muon 0.006")
    rows += [row(others[0], 0, 2.0), row(others[1], 0, 2.0), row(others[2], 1, 2.5)]
    rows += [row("the recipe", 2, 9.0, weights="b")]
    lines = search_table.beside_speculators(rows).splitlines()[2:]
    # error of the ratio 2: 2 * sqrt((0.5 / 2.5) ** 2 + (0.25 / 1.25) ** 2)
    assert lines == [
        f"| demo | the recipe | {others[0]} | 60 : 60 | 2.0 : 2.0 | 2 : 1 | 2.50 | 2.50 | 2.50 |",
        f"| demo | the recipe | {others[1]} | 60 : 60 | 2.0 : 2.0 | 2 : 2 | 2.00 ± 0.57 | 2.00 ± 0.57 | 2.00 ± 0.57 |",
    ]
    assert len(search_table.beside_speculators(rows[:3]).splitlines()) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["run", "--target", "second"], "comes with no weights; expected --folder"),
        (["run", "--target", "second", "--folder", "nowhere"], "is not in nowhere; expected --folder"),
        (["table"], "holds no runs; expected the --work of"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(tmp_path, monkeypatch, line, words):
    monkeypatch.setattr(sys, "argv", ["search_recipe.py", *line, "--work", str(tmp_path)])
    with pytest.raises(SystemExit, match=words):
        search_recipe.main()
