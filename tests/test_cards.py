"""The model card of a drafter whose target, repository, facts and measurements are called as strangers please."""

import ast
import re
import shlex

import pytest
import yaml
from conftest import build_drafter, build_target
from hostile import NAMES, bare_links, elements, html_of, random_names
from huggingface_hub import ModelCard

from eagle31_hf import Eagle31Config
from eagle31_hf.hub import CardFacts, render_card, with_report

SPELLED_CHARACTERS = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|r)")


@pytest.fixture(scope="module")
def config():
    return build_drafter(build_target("llama")).config


def card_of(config, name: str, repo_id: str | None = None) -> str:
    """A card with a name in every place that takes one."""
    config.target_model = name
    measured = {"data": name, "depth": 2, "mean_accepted_length": 2.0}
    measured |= {"accepted_per_position": [2, 1], "drafted_per_position": [3, 2]}
    return render_card(config, CardFacts(training={name: name}, acceptance=[measured]), repo_id or name)


def blocks(card: str) -> list[tuple[str, str]]:
    """The fenced blocks of a card: their language, and what is in them."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)


def body(card: str) -> str:
    return card.partition("\n---\n")[2]


@pytest.mark.parametrize("name", [*NAMES, *random_names(60, seed=5)])
def test_names_are_words_and_no_more(config, name):
    card, plain = (html_of(body(card_of(config, each))) for each in (name, "plain/plain"))
    assert elements(card) == elements(plain)
    assert not bare_links(card)


@pytest.mark.parametrize("name", [*NAMES, "org/model", "C:\\models\\x", "it's \U0001f600 \u2028"])
def test_the_code_on_a_card_is_ours_with_the_names_in_it(config, name):
    """Python finds the same statements, and the name itself; a shell the same command, in one line."""
    (_, python), (_, shell) = blocks(card_of(config, name))
    (_, plain), (_, command) = blocks(card_of(config, "plain"))
    assert ast.dump(ast.parse(python)) == ast.dump(ast.parse(plain)).replace("'plain'", repr(name))
    assert shell.count("\n") == 1
    words, expected = shlex.split(shell), shlex.split(command)
    assert len(words) == len(expected)
    if not SPELLED_CHARACTERS.search(shell):
        assert words[2] == name.replace("\n", " ").strip()


def test_an_ordinary_card_reads_as_it_did(config):
    card = card_of(config, "org/my_target-8B", "me/my_drafter")
    assert "# EAGLE 3.1 drafter for org/my_target-8B\n" in card
    assert 'from_pretrained("org/my_target-8B", dtype="auto"' in card
    assert '.from_pretrained("me/my_drafter", dtype=target.dtype)' in card
    assert "`eagle31 export me/my_drafter FOLDER --format vllm` (or `sglang`)" in card
    assert "| captured target states | `hidden_states` [" in card
    assert "| norm_output | true |" in card
    assert "\\" not in card


@pytest.mark.parametrize(
    ("fields", "engines"),
    [
        ({}, "vLLM or SGLang"),
        ({"attention_bias": True}, "vLLM"),
        ({"kv_lora_rank": 8, "norm_before_residual": True}, "vLLM"),
        ({"kv_lora_rank": 8, "fc_norm": False, "norm_before_fc": True}, ""),
        ({"hidden_act": "gelu"}, ""),
    ],
    ids=["both", "vLLM", "latent attention in vLLM", "latent attention", "another activation"],
)
def test_a_card_names_the_engines_that_can_run_the_drafter(fields, engines):
    latent = {"q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    card = render_card(Eagle31Config(**fields, **(latent if "kv_lora_rank" in fields else {})))
    assert ("vllm serve" in card) is ("vLLM" in engines)
    assert f"A copy for {engines} alone" in card or (engines == "" and "eagle31 export" not in card)


@pytest.mark.parametrize(
    "word", ["mit\n---\n# x", "---", "a: b", "{x", "[x", "!!python/object:os.system", "'\"", "null", *NAMES]
)
def test_the_metadata_is_yaml_with_the_words_as_they_are(config, word):
    config.target_model = "org/target"
    facts = CardFacts(license=word, datasets=[word], language=[word], tags=[word])
    card = render_card(config, facts)
    plain = render_card(config, CardFacts(license="x", datasets=["x"], language=["x"], tags=["x"]))
    assert body(card) == body(plain)
    values = yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
    assert values.keys() == ModelCard(plain).data.to_dict().keys()
    assert (values["license"], values["datasets"], values["language"]) == (word, [word], [word])
    assert word in ModelCard(card).data.tags


@pytest.mark.parametrize("name", [*NAMES, "a\n<!-- eagle31_hf report -->\nb\n<!-- end of eagle31_hf report -->\nc"])
def test_a_report_takes_the_place_of_an_earlier_one_and_of_no_name(config, name):
    card = card_of(config, name)
    for report in ("## first", "## second"):
        found = with_report(with_report(card, "## earlier"), report)
        assert found == f"{card.rstrip()}\n\n<!-- eagle31_hf report -->\n{report}\n<!-- end of eagle31_hf report -->\n"
