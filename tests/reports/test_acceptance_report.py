"""The acceptance report: what is counted and compared, on tiny models, against generate() itself."""

import json
import math
import re
from dataclasses import replace
from html import unescape
from itertools import takewhile
from pathlib import Path

import pytest
import torch
import vision
from conftest import build_drafter, build_target
from reports.studies import tiny_prompts

from eagle31_hf import Eagle31CandidateGenerator, demo, track_acceptance
from eagle31_hf.bench import AUTO_SHAPE, Shape, forward_times, synchronize
from eagle31_hf.diagnostics.drift import measure_drift
from eagle31_hf.reports.acceptance_report import acceptance_report, against, findings_of, read_earlier
from eagle31_hf.reports.acceptance_study import (
    ALONE,
    PERTURBED,
    RIVALS,
    SERVED,
    TARGET_ALONE,
    TURN,
    AcceptanceStudy,
    Condition,
    Settings,
    row_of,
)
from eagle31_hf.reports.document import GOOD, NOTE, WARNING, Generation
from eagle31_hf.reports.journal import Journal
from eagle31_hf.reports.prompts import FOREIGN, PERTURBATIONS, Prompts, Renderer
from eagle31_hf.reports.writing import write_report
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.images import images_of

TOKENS = 9
WAYS = (Shape(2), Shape(3, 2, 6), AUTO_SHAPE)
SETTINGS = Settings(WAYS, Shape(3), TOKENS, lengths=(24,), temperatures=(0.8,), concurrency=(3,))
LABELS = ("one", "two")
FACTS = {"prompts": "4 of these", "target": "tiny"}


def study_of(folder, journal, settings=SETTINGS):
    target = build_target("qwen3")
    drafters = {label: build_drafter(target, kind) for label, kind in zip(LABELS, ("eagle31", "eagle3"), strict=True)}
    return AcceptanceStudy(target, tiny_prompts(folder), journal, settings, drafters)


def folder_of(study):
    return Path(study.prompts.name).parent


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return study_of(tmp_path_factory.mktemp("study"), Journal(None, {}))


@pytest.fixture(scope="module")
def found(study):
    return study.measure()


@pytest.fixture(scope="module")
def report(study, found):
    return acceptance_report(found, study.generations(), SETTINGS, LABELS, FACTS)


def test_counts_are_those_of_generate(study, found):
    for way in WAYS[:2]:
        with track_acceptance() as stats:
            for ids in study.prompts.ids:
                mask = torch.ones_like(ids[None])
                options = {
                    "assistant_model": study.drafters["one"],
                    "max_new_tokens": TOKENS,
                    "do_sample": False,
                    **way.knobs,
                }
                study.target.generate(ids[None], attention_mask=mask, **options)
        rows = found[SERVED].rows["one", way.name]
        assert sum(row["tokens"] for row in rows) == stats.generated_tokens - stats.prefills
        assert sum(row["rounds"] for row in rows) == stats.target_forwards
        assert sum(row["accepted"][0] for row in rows) == stats.accepted_per_position[0]


def test_every_text_is_the_targets_own_in_fp32(found):
    for name in (SERVED, "24 tokens", "3 at once"):
        alone = found[name].alone
        for who, rows in found[name].rows.items():
            assert [row["text"] for row in rows] == [row["text"] for row in alone], (name, who)
            assert [row["new_tokens"] for row in rows] == [row["new_tokens"] for row in alone]


def test_conditions_are_drafted_by_the_reference_alone(found):
    ways = {name: {way for who, way in condition.rows if who != ALONE} for name, condition in found.items()}
    assert ways.pop(SERVED) == {"2", "3, tree 6", "auto", "3"}
    assert set(ways) == {
        "24 tokens",
        "temperature 0.8",
        "3 at once",
        "foreign system prompt",
        "10% of the tokens replaced",
    }
    assert set(map(tuple, ways.values())) == {("3",)}
    timed = {name for name, condition in found.items() if condition.alone}
    assert timed == {SERVED, "24 tokens", "3 at once"}


def test_a_batch_counts_the_rounds_of_every_sequence(found):
    [row] = found["3 at once"].rows["one", "3"]
    assert row["new_tokens"] == row["tokens"] + 3  # the prompts' forward gave each its first
    assert row["rounds"] >= row["tokens"] / 4


def test_the_report_has_a_line_for_every_way_and_condition(report):
    tables = {section.title: section.tables[0] for section in report.sections if section.tables}
    assert list(tables) == [
        "Speed",
        "Acceptance by position",
        "Perturbed prompts",
        "Context",
        "Temperature",
        "Concurrency",
    ]
    assert [row[:2] for row in tables["Speed"].rows[:3]] == [[ALONE, ""], ["one", "2"], ["one", "3, tree 6"]]
    assert all(row[-1] == "4 of 4" for row in tables["Speed"].rows[1:])
    assert [row[:3] for row in tables["Concurrency"].rows] == [["3 at once", "one", 3], ["3 at once", "two", 3]]


def test_generations_are_shown_token_by_token(study, report):
    generations = report.sections[-1].generations
    assert [one.title for one in generations] == [
        f"{label}, drafting {way}" for label in LABELS for way in ("a chain of 3", "a tree of 6 nodes, 3 deep")
    ]
    ids = study.prompts.ids[0]
    alone = study.target.generate(
        ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=TOKENS, do_sample=False
    )
    expected = study.prompts.renderer.tokenizer.decode(alone[0, len(ids) :])
    for one in generations:
        assert "".join(text for found in one.rounds for text in [*found["accepted"], found["bonus"] or ""]) == expected
        for found in one.rounds:
            path = [draft["text"] for draft in found["drafts"] if draft["is_accepted"]]
            assert path == found["accepted"]
    assert {len(found["drafts"]) for found in generations[1].rounds} <= {0, *range(1, 6)}


def test_figures_for_programs_say_the_same(report, found):
    figures = report.figures["two"][SERVED]["2"]
    rows = found[SERVED].rows["two", "2"]
    assert figures["by_prompt"] == [[sum(row["accepted"]), row["rounds"]] for row in rows]
    assert figures["accepted_drafts"].value == pytest.approx(
        sum(sum(row["accepted"]) for row in rows) / sum(row["rounds"] for row in rows)
    )
    alone = found[SERVED].rows[TARGET_ALONE]
    expected = sum(row["seconds"] for row in alone) / sum(row["seconds"] for row in rows)
    assert figures["speedup"].value == pytest.approx(expected)  # of the same tokens
    assert (figures["same_text"], figures["prompts"]) == (4, 4)


def test_times_wait_for_the_models_own_device(monkeypatch):
    """And for no other, where there are several; a pretended one, the meta device, tells who is waited for."""
    waited, model, ids = [], build_target("qwen3").to("meta"), torch.zeros(1, 3, dtype=torch.long, device="meta")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    with forward_times(model):
        model(ids)
    synchronize(torch.device("cpu"))
    assert waited == [model.device] * 2


def test_chains_are_the_drafters_whatever_it_was_saved_with(tmp_path):
    """On the demo pair and a text that goes round: saved so, it would draft longer chains from the text, or shorter."""
    target, tokenizer = demo.load_target()
    (tmp_path / "round.jsonl").write_text(json.dumps({"text": "x = 1\n" * 20}))
    prompts = Prompts(str(tmp_path / "round.jsonl"), Renderer(tokenizer, 60, len(tokenizer), {}), 1, 500, 16)
    settings = Settings((Shape(2),), Shape(2), 16, has_perturbations=False)
    found = []
    for saved in ({}, {"prompt_lookup_num_tokens": 6}, {"assistant_confidence_threshold": 0.9}):
        drafter = demo.load_drafter("eagle31")
        drafter.generation_config.update(**saved)
        study = AcceptanceStudy(target, prompts, Journal(None, {}), settings, {"ours": drafter})
        found += [study.measure()[SERVED].rows["ours", "2"][0]["drafted"]]
        found += [measure_drift(target, drafter, prompts.ids[0][None], 2, 16)["drafted"]]
    assert found == [found[0]] * 6


@pytest.mark.parametrize("max_new_tokens", [1, 9])
def test_no_text_is_longer_than_asked_for(study, monkeypatch, max_new_tokens):
    """Not that of a warm-up either: a prompt may fill the context but for its answer."""
    lengths, generate = [], study.target.generate

    def counted(ids, **options):
        lengths.append(generate(ids, **options).shape[1] - ids.shape[1])
        return generate(ids, **options)

    monkeypatch.setattr(study.target, "generate", counted)
    settings = replace(SETTINGS, max_new_tokens=max_new_tokens, lengths=(), temperatures=(), concurrency=())
    replace(study, settings=settings, journal=Journal(None, {})).measure()
    assert 0 < max(lengths) <= max_new_tokens


def test_figures_that_are_not_finite_are_null_in_its_file(report, tmp_path):
    write_report(tmp_path, replace(report, figures={"one": [math.inf, math.nan, 1.5]}), "one")
    found = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert found["figures"] == {"one": [None, None, 1.5]}


def test_a_page_is_made_of_it(report, tmp_path):
    write_report(tmp_path, report, "one, two")
    assert json.loads((tmp_path / "report.json").read_text())["kind"] == "acceptance"
    assert (
        len(re.findall("<svg", (tmp_path / "report.html").read_text()))
        == sum(len(section.charts) for section in report.sections)
        > 0
    )


def test_drafts_are_shown_as_the_words_they_are(report, tmp_path):
    drafts = [{"text": text, "depth": 1, "is_accepted": False} for text in ("'s", "<|end|>", "é")]
    generation = Generation("one", "why", [{"accepted": [], "bonus": "so", "drafts": drafts}])
    section = replace(report.sections[-1], generations=[generation])
    write_report(tmp_path, replace(report, sections=[section]), "one")
    shown = unescape((tmp_path / "report.html").read_text())
    assert all(f'- "{text}"' in shown for text in ("'s", "<|end|>", "é"))


def test_a_resumed_report_is_the_same(study, found):
    """A part of a run is in the journal, up to the middle of the sampled texts; the rest is measured now."""
    kept = dict(takewhile(lambda one: one[0] != "one: 3: temperature 0.8: prompt 2", study.journal.items()))
    journal = Journal(None, kept)
    resumed = study_of(folder_of(study), journal).measure()
    assert {name: journal[name] for name in kept} == kept
    for name, condition in found.items():
        assert [*resumed[name].batches] == [*condition.batches]
        for who, rows in condition.rows.items():
            for row, again in zip(rows, resumed[name].rows[who], strict=True):
                same = {"text", "new_tokens"} if who[1] == "auto" else row.keys() - {"seconds"}
                assert {key: row[key] for key in same} == {key: again[key] for key in same}, (name, who)


def timed(seconds, accepted, texts="abcd"):
    counts = {"tokens": 10, "rounds": 5, "drafted": [5], "new_tokens": 11}
    return [
        counts | {"seconds": seconds + i / 100, "accepted": [accepted], "text": text} for i, text in enumerate(texts)
    ]


def condition(kind, numbers, rows):
    return Condition(kind, "", {number: [torch.tensor([0])] for number in numbers}, [Shape(2)], rows=rows)


def findings(rows, kept=5):
    settings = Settings((Shape(2),), Shape(2), 12)
    found = {
        SERVED: condition(SERVED, range(4), {TARGET_ALONE: timed(1.0, 0), ("one", "2"): rows}),
        "no BOS": condition(PERTURBED, [1, 3], {("one", "2"): [{**row, "accepted": [kept]} for row in rows[:2]]}),
    }
    return findings_of(found, settings, "one")


def test_findings_say_what_is_gained():
    [finding] = findings(timed(0.5, 5))
    assert finding.level == GOOD
    assert "fastest is a chain of 2, 1.9" in finding.text
    unsure = [{**row, "seconds": row["seconds"] * (0.3 if i else 5)} for i, row in enumerate(timed(1.0, 5))]
    [finding] = findings(unsure)
    assert (finding.level, "whether that is chance" in finding.remedy) == (NOTE, True)
    [finding] = findings(timed(1.5, 5))
    assert (finding.level, "gains nothing" in finding.remedy) == (WARNING, True)


def test_findings_say_where_texts_differ():
    finding = findings(timed(0.5, 5, "abXY"))[1]
    assert finding.level == NOTE
    assert "2 of 4 texts are not the target's own" in finding.text


def test_findings_say_which_perturbation_is_not_borne():
    rows = [{**row, "accepted": [5 + i]} for i, row in enumerate(timed(0.5, 5))]
    finding = findings(rows, kept=2)[1]
    assert (finding.level, "no BOS" in finding.text) == (WARNING, True)
    assert "--template-augmentation" in finding.remedy


def beside(earlier, now, facts=FACTS):
    section = against(earlier.as_dict(), now.as_dict()["figures"], facts, "earlier.json")
    return {tuple(row[:3]): row[3:] for row in section.tables[0].rows}, section.text


def better(report, factor):
    changed = json.loads(json.dumps(report.as_dict()["figures"]))
    for ways in changed["one"].values():
        for figures in ways.values():
            figures["by_prompt"] = [[accepted * factor + 1, rounds] for accepted, rounds in figures["by_prompt"]]
    return type(report)(**{**vars(report), "figures": changed})


def test_a_report_beside_itself_is_the_same(report):
    lines, text = beside(report, report)
    assert "compared one by one" in text
    ways = [way for conditions in report.figures.values() for ways in conditions.values() for way in ways]
    assert len(lines) == len(ways) - ways.count("auto")  # which drafts by measured time
    assert {line[-1] for line in lines.values()} <= {"same", "nothing to compare", "too few prompts"}


def test_reports_with_nothing_in_common_say_so(report):
    other = type(report)(**{**vars(report), "figures": {"another": {}, "more": {}}})
    section = against(other.as_dict(), report.as_dict()["figures"], FACTS, "earlier.json")
    assert section.tables[0].rows == []
    assert "in both reports" in section.tables[0].note


def test_a_better_report_is_told_from_noise(report):
    low, high = better(report, 2), better(report, 6)
    lines, _ = beside(low, high)
    assert lines["one", SERVED, "2"][-1] == "better"
    lines, _ = beside(high, low)
    assert lines["one", SERVED, "2"][-1] == "worse"
    lines, text = beside(low, low, {"prompts": "others"})
    assert "Prompts differ" in text
    assert lines["one", SERVED, "2"][-1] in ("noise", "same")


def test_a_report_of_texts_with_control_characters_is_compared_with(report, tmp_path):
    """Prompts of old sources hold form feeds, as Python's own library does."""
    earlier = report.as_dict()
    earlier["sections"][0]["text"] = "\f\x1b[0m"
    (tmp_path / "report.json").write_text(json.dumps(earlier))
    assert read_earlier(tmp_path / "report.json")["figures"].keys() == report.figures.keys()


def test_only_an_acceptance_report_is_compared_with(tmp_path):
    (tmp_path / "other.json").write_text('{"schema": "eagle31-report/1", "kind": "drift"}')
    with pytest.raises(ValueError, match=r"kind 'drift'; expected .* the report\.json of `eagle31 bench acceptance`"):
        read_earlier(tmp_path / "other.json")


@pytest.mark.parametrize("damage", ["figures", "facts", "accepted_drafts", "by_prompt"])
def test_a_damaged_report_is_refused_before_anything_is_measured(report, tmp_path, damage):
    earlier = json.loads(json.dumps(report.as_dict()))
    figures = earlier["figures"]["one"][SERVED]["2"]
    if damage in earlier:
        earlier[damage] = [1]
    else:
        figures[damage] = {"value": "x"} if damage == "accepted_drafts" else [[1], [2]]
    (tmp_path / "damaged.json").write_text(json.dumps(earlier))
    with pytest.raises(ValueError, match=r"damaged\.json: is damaged \("):
        read_earlier(tmp_path / "damaged.json")


TEMPLATE = (
    "<b>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def test_perturbations_of_a_chat(tmp_path, monkeypatch):
    tokenizer = demo.load_target()[1]
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE.replace("<b>", "<|begin|>"))
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "why?"}]}))
    prompts = Prompts(str(path), Renderer(tokenizer, 20, len(tokenizer), {}), 1, 500, 10)
    changed = {
        name: perturb(prompts.renderer, prompts.sources[0], prompts.ids[0], 0)
        for name, perturb in PERTURBATIONS.items()
    }
    texts = {name: tokenizer.decode(ids) for name, ids in changed.items()}
    assert texts["no BOS"] == "[system]S[user]why?[a]"
    assert texts["no template"] == "<|begin|>S\nwhy?"
    assert texts["no template, no BOS"] == "S\nwhy?"
    assert texts["foreign system prompt"] == f"<|begin|>[system]{FOREIGN}[user]why?[a]"
    noisy = changed["10% of the tokens replaced"]
    assert len(noisy) == len(prompts.ids[0])
    assert noisy[0] == prompts.ids[0][0]


CHAT = TEMPLATE.replace("<b>", "").replace("[", "<").replace("]", ">")


def test_a_second_turn_follows_the_targets_own_answer(tmp_path, monkeypatch):
    """Of a chat in which the user asks again; a chat without another question, and one without room, are left out."""
    target, tokenizer = demo.load_target()
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    path = tmp_path / "questions.jsonl"
    rows = [{"turns": ["def one():", "again"]}, {"turns": ["import os"]}, {"turns": ["def two():", "x = 1\n" * 60]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = Prompts(str(path), Renderer(tokenizer, 20, len(tokenizer), {}), 3, 120, 8)
    settings = Settings((Shape(2),), Shape(2), 8, has_perturbations=False)
    study = AcceptanceStudy(target, prompts, Journal(None, {}), settings, {})
    [[number, [ids]]] = next(one for one in study.conditions() if one.kind == TURN).batches.items()
    first = target.generate(prompts.ids[0][None], max_new_tokens=8, do_sample=False)[0, len(prompts.ids[0]) :]
    answer = tokenizer.decode(first, skip_special_tokens=True).strip()
    assert number == 0
    assert tokenizer.decode(ids) == f"<user>def one():<assistant>{answer}<user>again<a>"


def test_prompts_with_images_are_decoded_with_their_pixels(tmp_path):
    """As they are served, and sampled; other conditions are of the prompts without images. A question's image stands in
    a column beside it, as sets of questions about images have it."""
    target, processor = vision.build_target("LLaVA"), vision.build_processor("LLaVA")
    chats = [[vision.asked("abc", path=vision.write_image(tmp_path / f"{i}.png", i))] for i in range(2)]
    texts = [[{"role": "user", "content": words}] for words in ("abcd", "dcba")]
    path = tmp_path / "chats.jsonl"
    records = [{"messages": each} for each in (chats[0], *texts)]
    records.insert(1, {"question": "abc", "image": str(tmp_path / "1.png"), "messages": None})
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    renderer = Renderer(processor.tokenizer, 20, vision.VOCAB, {}, images_of(target, processor, {}))
    prompts = Prompts(str(path), renderer, 9, 60, 6)
    settings = Settings((Shape(2),), Shape(2), 6, temperatures=(0.8,), concurrency=(2,))
    study = AcceptanceStudy(target, prompts, Journal(None, {}), settings, {"one": new_drafter(target)})
    found = study.measure()
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    expected = []
    for chat in chats:
        inputs = processor.apply_chat_template(chat, **options)
        text = target.generate(**inputs, max_new_tokens=6, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        expected.append(row_of(text.tolist(), 0.0)["text"])
    assert expected[0] != expected[1]
    for rows in found[SERVED].rows.values():
        assert [row["text"] for row in rows[:2]] == expected
    numbers = {name: [*condition.batches] for name, condition in found.items()}
    assert numbers[SERVED] == numbers["temperature 0.8"] == [0, 1, 2, 3]
    assert numbers["2 at once"] == [0]
    assert all(number > 1 for name in PERTURBATIONS for number in numbers.get(name, []))


def test_rivals_give_the_targets_text_and_a_line_each(monkeypatch):
    """On the demo pair, whose drafts are accepted; afterwards the target drafts by whatever generate() is asked for."""
    target, tokenizer = demo.load_target()
    drafter = demo.load_drafter("eagle31")
    prompts = Prompts("python", Renderer(tokenizer, 40, len(tokenizer), {}), 2, 500, 12)
    settings = Settings((Shape(3),), Shape(3), 12, has_perturbations=False, rivals=RIVALS)
    study = AcceptanceStudy(target, prompts, Journal(None, {}), settings, {"ours": drafter})
    calls, get_candidates = [], Eagle31CandidateGenerator.get_candidates

    def counted(self, *args, **kwargs):
        calls.append(self)
        return get_candidates(self, *args, **kwargs)

    monkeypatch.setattr(Eagle31CandidateGenerator, "get_candidates", counted)
    found = study.measure()
    served = found[SERVED]
    names = ["prompt lookup, 3 tokens", "prompt lookup, 10 tokens", "ours in transformers' assisted loop, 3 deep"]
    assert [who for who, _ in served.rows] == [ALONE, *names, "ours"]
    for rows in served.rows.values():
        assert [row["text"] for row in rows] == [row["text"] for row in served.alone]
    assert 2 * 12 / 4 <= len(calls) <= 2 * 12 - 6, "the loop drafted by ours, and accepted some"
    assert "_get_candidate_generator" not in vars(target)
    report = acceptance_report(found, [], settings, ["ours"], FACTS)
    assert [row[0] for row in report.sections[0].tables[0].rows] == [ALONE, *names, "ours"]


def test_perturbations_of_a_text_without_bos_or_template_are_left_out(study):
    renderer, source, ids = study.prompts.renderer, study.prompts.sources[0], study.prompts.ids[0]
    names = {name for name, perturb in PERTURBATIONS.items() if perturb(renderer, source, ids, 0) is not None}
    assert names == {"foreign system prompt", "10% of the tokens replaced"}
