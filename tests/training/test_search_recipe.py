"""The search of recipes: its parts on the demo's target with few texts, and that what it measures is what generate()
accepts."""

import json
import sys
from pathlib import Path

import pytest
import torch

from eagle31_hf import Eagle31Trainer as Trainer
from eagle31_hf import Eagle31TrainingArguments, demo, track_acceptance
from eagle31_hf.demo.corpus import held_out_file
from eagle31_hf.training.objective import Batch
from eagle31_hf.training.unroll import unroll

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import going_on
import search_fit
import search_material
import search_recipe
import search_table
import search_training
import transfer_rate
from search_training import Recipe

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


def test_a_row_of_the_library_is_trained_by_its_own_trainer(material, monkeypatch):
    """By its defaults but for rates and decay, which are the recipe's; the drafter has learnt afterwards."""
    seen = []
    monkeypatch.setattr(
        search_training, "Eagle31Trainer", lambda *args, **kwargs: seen.append(args) or Trainer(*args, **kwargs)
    )
    recipe = search_recipe.IDEAS["eagle31 train, Muon 0.01, decay 0.1"]
    drafter, figures = search_training.trained(material, recipe, seed=0, steps=4)
    [(begun, args, examples)] = seen
    assert begun is drafter
    assert (args.matrix_learning_rate, args.learning_rate, args.weight_decay) == (0.01, 0.004, 0.1)
    usual = Eagle31TrainingArguments("anywhere", use_cpu=True)
    assert all(getattr(args, name) == getattr(usual, name) for name in ("depth", "depth_decay", "loss", "warmup_steps"))
    assert (args.max_steps, len(examples)) == (4, FEW["NUM_TEXTS"])
    before = search_training.begun(material, recipe, seed=0)
    assert not torch.equal(drafter.fc.weight, before.fc.weight)
    assert figures["loss"] > 0


def test_least_squares_find_the_matrix():
    draw = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(5, 8, generator=draw), torch.randn(400, 8, generator=draw)
    found = search_fit.solved(inputs, inputs @ weight.T)
    assert (found - weight).norm() < 0.01 * weight.norm()


def test_a_fitted_start_says_what_its_least_squares_say(material):
    texts = material.training_texts("files", material.default_layers())
    drafter = search_training.begun(material, Recipe(start="fitted", texts="files"), seed=0)
    states, last = texts.states[:, :-1].float(), texts.last_states[:, 1:].float()
    with torch.no_grad():
        out = drafter(texts.ids[:, 1:], target_hidden_states=states, logits_to_keep=None).last_hidden_state
    assert torch.nn.functional.cosine_similarity(out, last, dim=-1).mean() > 0.5
    noise = search_training.begun(material, Recipe(), seed=0)
    with torch.no_grad():
        out = noise(texts.ids[:, 1:], target_hidden_states=states, logits_to_keep=None).last_hidden_state
    assert torch.nn.functional.cosine_similarity(out, last, dim=-1).mean() < 0.2


def test_a_hint_falls_linearly_and_ends_halfway(material):
    layer_ids = material.default_layers()
    drafter = search_training.begun(material, Recipe(), seed=0)
    objective = search_training.SearchObjective(drafter, Recipe(hint=1.0), material.reader(layer_ids).logits)
    batch: Batch = material.training_texts("files", layer_ids).batch(torch.arange(4))
    losses = []
    for progress in (0.0, 0.25, 0.5):
        objective.begin(progress)
        losses.append(objective(batch)["loss"].item())
    assert losses[0] - losses[1] == pytest.approx(losses[1] - losses[2], rel=1e-3)
    plain = search_training.SearchObjective(drafter, Recipe(), material.reader(layer_ids).logits)
    plain.begin(0.0)
    assert losses[2] == pytest.approx(plain(batch)["loss"].item())


def test_parallel_drafts_of_all_depths_follow_from_the_first_token_alone(material):
    layer_ids = material.default_layers()
    batch: Batch = material.training_texts("files", layer_ids).batch(torch.arange(2))
    other = Batch(batch.input_ids.clone(), *list(vars(batch).values())[1:])
    other.input_ids[:, 20:] = 5
    found = {}
    for parallel in (True, False):
        recipe = Recipe(depth=3, parallel=parallel)
        drafter = search_training.begun(material, recipe, seed=0)
        states = [
            [state[:, :18] for _, state in unroll(drafter, each.input_ids, batch.states, 3)] for each in (batch, other)
        ]
        found[parallel] = [torch.equal(one, another) for one, another in zip(*states, strict=True)]
    # position 18's draft at depth 1 embeds token 20
    assert found == {True: [True, True, True], False: [True, True, False]}


def test_joined_texts_see_each_other_and_no_chain_leaves_its_text(material):
    """Of two texts laid end to end the first one's states are those of it alone, the second one's differ."""
    layer_ids = search_training.layer_ids_of(Recipe(), material)
    texts = material.training_texts("greedy", layer_ids)
    drafter = search_training.begun(material, Recipe(), seed=0)
    objective = search_training.SearchObjective(drafter, Recipe(), material.reader(layer_ids).logits)
    single = texts.batch(torch.tensor([0, 1]), is_all=True)
    single.answers = single.answers.clone()
    single.answers[:, 0] = False
    one, row = objective(single), objective(search_training.joined(single, 2))
    length = single.input_ids.shape[1]
    for k in range(objective.settings.depth):
        ones, rows = one["record"].states[k], row["record"].states[k]
        assert len(ones) == len(rows)
        half = len(ones) // 2
        torch.testing.assert_close(ones[:half], rows[:half])
        assert (ones[half:] - rows[half:]).norm(dim=-1).min() > 1e-3
        assert set(row["record"].position[k].tolist()) == {p + t for p in range(length - 2 - k) for t in (0, length)}


def test_the_average_is_between_the_weights(material):
    drafter = search_training.begun(material, Recipe(), seed=0)
    average = search_training.Average(drafter, 0.5)
    before = drafter.fc.weight.detach().clone()
    with torch.no_grad():
        drafter.fc.weight.add_(1.0)
    for _ in range(20):
        average.add()
    average.serve()
    moved = drafter.fc.weight - before
    assert moved.min() > 0.99
    assert moved.max() <= 1.0 + 1e-6


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
