"""States of a target by servers of vLLM: stored, streamed in training, refused where they are another's."""

import copy
import json
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import build_target
from engine_server import EngineServer
from letters import build_tokenizer
from safetensors.torch import save_file

from eagle31_hf import Eagle31Trainer, Eagle31TrainingArguments
from eagle31_hf.cli import main
from eagle31_hf.cli.loading import load_outline
from eagle31_hf.targets.layers import decoder_layers
from eagle31_hf.training.ends import ends_from_checkpoint, find_scoring
from eagle31_hf.training.engine_server import Server
from eagle31_hf.training.engine_states import StreamedStates, engine_states
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.prepare import prepare_data
from eagle31_hf.training.servers import EngineOptions
from eagle31_hf.training.store import HiddenStateStore, read_manifest
from eagle31_hf.training.target import TargetReader

LAYERS, DEPTH = [2, 3, 4], 7  # of the target's states that are read, and its layers
QUICKLY = {"timeout": 5.0, "tries": 6, "pause": 0.01, "longest_pause": 0.05}
LENGTH = 40


@pytest.fixture(scope="module")
def target():
    return build_target("llama", eos_token_id=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    """A checkpoint of the target with its tokenizer, and texts it can read."""
    folder = tmp_path_factory.mktemp("states")
    tokenizer = build_tokenizer()
    for saved in (target, tokenizer):
        saved.save_pretrained(folder / "target")
    letters = torch.randint(0, 9, (20, 12), generator=torch.Generator().manual_seed(0))
    lines = (json.dumps({"text": "".join(chr(ord("a") + i) for i in row)}) for row in letters.tolist())
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def outline(folder):
    return load_outline(str(folder / "target"))


@pytest.fixture
def serve(target, tmp_path):
    """`serve(**options)` starts an EngineServer that gives the states of LAYERS and of the last one."""
    started = []

    def start(**options) -> EngineServer:
        options = {"target": target, "states": [*LAYERS, DEPTH], "folder": tmp_path / "shared"} | options
        (tmp_path / "shared").mkdir(exist_ok=True)
        made = EngineServer(options.pop("target"), build_tokenizer(), **options)
        started.append(made)
        return made

    yield start
    for server in started:
        server.stop()


def states_of(outline, *servers, layer_ids=LAYERS, told=lambda line: None, **options):
    engine = EngineOptions(tuple(server.url for server in servers), **QUICKLY, **options)
    return engine_states(outline, engine, layer_ids, LENGTH, told)


def some_texts(count: int = 9) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 10, (3 + 4 * i,), generator=generator) for i in range(count)]


def close(found, expected):
    for pair in zip(found, expected, strict=True):
        for ours, theirs in zip(*pair, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.std()))


# The same states


def test_servers_give_the_targets_states_and_keep_no_file(outline, target, serve, tmp_path):
    servers = serve(), serve()
    told = []
    source = states_of(outline, *servers, told=told.append)
    source.compare(target)
    texts = some_texts()
    close(source.of_texts(texts), TargetReader(target, LAYERS).of_texts(texts))
    assert all(len(server.asked) > 3 for server in servers)
    assert told == [f"states by the-target on {servers[0].url}, {servers[1].url}"]
    assert not [*(tmp_path / "shared").iterdir()]


def test_states_that_are_written_after_the_answer_are_waited_for(outline, target, serve):
    server = serve()
    source = states_of(outline, server)
    server.late = 0.2
    texts = some_texts(3)
    close(source.of_texts(texts), TargetReader(target, LAYERS).of_texts(texts))


def test_a_folder_under_another_name(outline, target, serve, tmp_path):
    server = serve(folder=tmp_path / "there")
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "there")
    server._write_states = lambda prompt, number: "/nowhere/" + EngineServer._write_states(server, prompt, number).name
    with pytest.raises(ValueError, match=r"in /nowhere/cmpl.*, which is not here; .* or --engine-states-folder"):
        states_of(outline, server)
    source = states_of(outline, server, states_folder=str(tmp_path / "here"))
    close(source.of_texts(some_texts(2)), TargetReader(target, LAYERS).of_texts(some_texts(2)))


def test_a_store_of_servers_is_that_of_the_target(outline, target, folder, serve, tmp_path):
    options = PreparationOptions(max_length=LENGTH, states=True, layer_ids=LAYERS, records_per_shard=6)
    prepare = partial(prepare_data, source=str(folder / "texts.jsonl"), options=options)
    tokenizer = build_tokenizer()
    prepare(target, tokenizer, output=tmp_path / "here")
    prepare(outline, tokenizer, output=tmp_path / "served", states_by=states_of(outline, serve(), serve()))
    here, served = HiddenStateStore(tmp_path / "here"), HiddenStateStore(tmp_path / "served")
    assert len(here) == len(served) > 10
    for i in range(len(here)):
        assert served.tokens(i).input_ids.equal(here.tokens(i).input_ids)
        close([[served[i]["states"], served[i]["last_states"]]], [[here[i]["states"], here[i]["last_states"]]])
    assert read_manifest(tmp_path / "served").source["states_by"] == {"served": "the-target"}
    assert "states_by" not in read_manifest(tmp_path / "here").source


def losses(drafter_of, examples, tmp_path, target=None) -> list[float]:
    args = Eagle31TrainingArguments(
        str(tmp_path), max_length=LENGTH, depth=2, max_steps=6, logging_steps=1, use_cpu=True, report_to="none",
        save_strategy="no", position_reach=0,
    )  # fmt: skip
    trainer = Eagle31Trainer(new_drafter(drafter_of, aux_hidden_state_layer_ids=LAYERS), args, examples, target=target)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Measured(list):
    """Examples that know their lengths, as a store does."""

    @property
    def lengths(self) -> list[int]:
        return [len(example["input_ids"]) for example in self]


def test_training_on_streamed_states_learns_as_beside_the_target(outline, target, serve, tmp_path):
    examples = Measured({"input_ids": text, "answers": torch.ones_like(text) > 0} for text in some_texts())
    source = states_of(outline, serve(), serve())
    streamed = losses(source.ends, StreamedStates(examples, source), tmp_path / "streamed")
    assert len(streamed) == 6
    assert streamed == pytest.approx(losses(target, examples, tmp_path / "beside", target), rel=1e-3)


# Servers that fail


def test_a_server_that_is_killed_and_comes_back_costs_nothing(outline, target, serve):
    server = serve()
    source = states_of(outline, server)
    source.servers.options = replace(source.servers.options, tries=30, pause=0.02, longest_pause=0.1)
    is_back, begun = threading.Event(), len(server.asked)

    def restart():
        server.stop()
        server.start()
        is_back.set()

    def trouble(number):
        if number == begun + 4:
            threading.Thread(target=restart).start()
            assert is_back.wait(60)
        return "close" if number % 3 == 0 or number == begun + 4 else None

    server.trouble = trouble
    texts = some_texts(20)
    close(source.of_texts(texts), TargetReader(target, LAYERS).of_texts(texts))
    assert is_back.is_set()


def test_states_that_were_never_written_are_asked_for_again(outline, target, serve):
    server = serve()
    source = states_of(outline, server)
    server.unfinished = {len(server.asked) + 1, len(server.asked) + 2}
    close(source.of_texts(some_texts(2)), TargetReader(target, LAYERS).of_texts(some_texts(2)))


def test_the_last_server_that_fails_ends_the_run_in_plain_words(outline, serve):
    server = serve()
    source = states_of(outline, server)
    server.stop()
    with pytest.raises(RuntimeError, match="after 6 tries; what is complete is kept"):
        source.of_texts(some_texts(1))


def test_answers_leave_no_states_behind(outline, serve, tmp_path):
    server = serve()
    source = states_of(outline, server)
    server.late = 0.05
    request = source.probe._replace(max_tokens=4)
    assert len(source.servers.each(Server.complete, [request])[0].ids) == 4
    assert not [*(tmp_path / "shared").iterdir()]
    server._write_states = lambda prompt, number: str(tmp_path / "elsewhere.safetensors")  # on its machine alone
    assert len(source.servers.each(Server.complete, [request])[0].ids) == 4


@pytest.mark.parametrize("name", ["precious.txt", "others.safetensors"])
def test_no_file_but_the_texts_states_is_removed(outline, serve, tmp_path, name):
    path = tmp_path / name
    save_file({"theirs": torch.ones(3)}, path)
    server = serve()
    source = states_of(outline, server)
    source.servers.options = replace(source.servers.options, tries=1)
    server._write_states = lambda prompt, number: str(path)
    with pytest.raises((ValueError, RuntimeError), match=r"expected a \.safetensors file|is unfinished"):
        source.of_texts(some_texts(1))
    if name.endswith(".safetensors"):
        source.servers.each(Server.complete, [source.probe])
    assert path.is_file()


# Servers that give something else


def other_target():
    other = copy.deepcopy(build_target("llama", eos_token_id=10))
    other.lm_head.weight.data = other.lm_head.weight.roll(3, 0)
    return other


def not_finite():
    broken = copy.deepcopy(build_target("llama", eos_token_id=10))
    broken.model.layers[4].mlp.down_proj.weight.data.fill_(torch.inf)
    return broken


WRONG = {
    "fewer layers": ({"states": [2, 3, DEPTH]}, r"of shape \(8, 3, 36\); expected \(8, 4, 36\).*serve|--spec"),
    "another last layer": (
        {"states": [*LAYERS, 5]},
        "expected a server of the target that gives the states of layer 7",
    ),
    "another target": ({"target": other_target}, "expected a server of the target that gives the states of layer 7"),
    "too short": ({"max_model_len": LENGTH}, f"takes {LENGTH} tokens .* expected at least {LENGTH + 1} there"),
    "not finite": ({"target": not_finite}, "states that are not finite"),
    "whole numbers": ({"dtype": torch.int32}, "states of dtype torch.int32; expected one of torch.float32, "),
}


@pytest.mark.parametrize("name", WRONG)
def test_states_that_are_not_the_targets_are_refused(outline, serve, name):
    options, words = WRONG[name]
    made = {key: value() if callable(value) else value for key, value in options.items()}
    with pytest.raises(ValueError, match=words):
        states_of(outline, serve(**made))


def test_other_layers_show_where_the_target_fits(outline, target, serve):
    source = states_of(outline, serve(states=[2, 5, 4, DEPTH]))
    with pytest.raises(ValueError, match=r"nearest to those of the target's layers \[2, 5, 4, 7\]"):
        source.compare(target)


def test_states_of_other_tokens_are_refused(outline, serve):
    server = serve()
    source = states_of(outline, server)
    server._write_states = lambda prompt, number: EngineServer._write_states(server, prompt[::-1], number)
    with pytest.raises(ValueError, match="has the states of 8 other tokens"):
        source.check()


def test_servers_of_which_only_some_give_states(outline, serve):
    with pytest.raises(ValueError, match="gives no hidden states, and other servers do"):
        states_of(outline, serve(), serve(states=None))
    assert states_of(outline, serve(states=None)) is None


# The ends of a target, from its checkpoint


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_window_8"])
@pytest.mark.parametrize("tied", [False, True])
def test_ends_of_a_checkpoint_score_as_the_target_does(kind, tied, tmp_path):
    target = build_target(kind, tie_word_embeddings=tied)
    target.save_pretrained(tmp_path)
    ends, norm = ends_from_checkpoint(load_outline(str(tmp_path)))
    reader = TargetReader(target, [len(decoder_layers(target))])
    states, last = reader.of_texts(some_texts(1))[0]
    torch.testing.assert_close(norm(states), last)
    torch.testing.assert_close(ends.logits(last), reader.logits(last))
    assert ends.scoring == find_scoring(target)
    assert (ends.head.weight is ends.embedding.weight) == tied


def test_an_architecture_that_is_nothing_without_layers(tmp_path):
    build_target("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be read without its layers .* prepare-data --engine, then"):
        ends_from_checkpoint(load_outline(str(tmp_path)))


def test_a_checkpoint_without_an_embedding(tmp_path, target, folder):
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((folder / "target" / "config.json").read_text())
    tensors = load_file(folder / "target" / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"the checkpoint has no model\.embed_tokens\.weight"):
        ends_from_checkpoint(load_outline(str(tmp_path)))


# The commands


def run(capsys, command, folder, *arguments):
    places = ["--target", folder / "target", "--data", folder / "texts.jsonl"]
    layers = ["--layers", *LAYERS] if command == "prepare-data" else ["--field", f"aux_hidden_state_layer_ids={LAYERS}"]
    words = [command, *places, "--max-length", LENGTH, "--device", "cpu", *layers, *arguments]
    status = main([str(word) for word in words])
    return status, capsys.readouterr().err


QUICK = ["--depth", 2, "--accumulate", 1, "--steps", 3, "--eval-every", 2]


def test_from_texts_to_a_drafter_without_the_targets_layers(capsys, folder, serve, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle31_hf.cli.target.free_memory", lambda: 0)  # the target does not fit
    server, output = serve(), tmp_path / "drafter"
    status, err = run(capsys, "train", folder, *QUICK, "--output", output, "--engine", server.url)
    assert status == 0, err
    assert "are not compared with the target's own: 0.0 GB do not fit in 0.0" in err
    assert "step 3 of 3: held out, loss" in err
    assert json.loads((output / "config.json").read_text())["aux_hidden_state_layer_ids"] == LAYERS
    assert not [*(tmp_path / "shared").iterdir()]


def test_answers_and_states_by_one_server(capsys, folder, serve, tmp_path):
    server, output = serve(), tmp_path / "store"
    wanted = ["--output", output, "--regenerate", "--states", "--max-new-tokens", 5, "--engine", server.url]
    status, err = run(capsys, "prepare-data", folder, *wanted)
    assert status == 0, err
    assert "the states are the target's own, on a short text" in err
    assert read_manifest(output).layer_ids == LAYERS
    status, err = run(
        capsys, "train", folder, *QUICK, "--output", tmp_path / "d", "--data", output, "--engine", "http://h"
    )
    assert status == 2
    assert "holds the target's states, and the target is not run; expected neither" in err


def test_an_engine_that_gives_no_states(capsys, folder, serve, tmp_path):
    server = serve(states=None)
    wanted = ["--output", tmp_path / "store", "--states", "--engine", server.url]
    status, err = run(capsys, "prepare-data", folder, *wanted)
    assert status == 2
    assert "gives no hidden states, and no answers are asked for; expected --regenerate too" in err
    assert not (tmp_path / "store").exists()
    status, err = run(capsys, "prepare-data", folder, *wanted, "--regenerate", "--max-new-tokens", 5)
    assert status == 0, err
    assert "the engine gives no hidden states; loading" in err
    assert "states_by" not in read_manifest(tmp_path / "store").source


def test_what_an_engine_cannot_do(capsys, folder, serve, tmp_path):
    engine = ["--output", tmp_path / "d", "--engine", serve().url]
    status, err = run(capsys, "train", folder, *QUICK, *engine, "--device-map", "auto")
    assert status == 2
    assert "--device-map says how to load the target here, where --engine runs it" in err
