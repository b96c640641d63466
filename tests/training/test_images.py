"""Chats with images: what a drafter is trained on is what the target reads of them, and what decoding feeds it."""

import base64
import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from close import FORWARD, assert_close
from letters import write_data
from PIL import Image
from training_runs import ARGUMENTS
from vision import IMAGE, KINDS, asked, build_processor, build_target, said, write_image

from eagle31_hf import Eagle31Trainer, Eagle31TrainingArguments
from eagle31_hf.chat_template import as_read
from eagle31_hf.cli import main
from eagle31_hf.images import Picture
from eagle31_hf.reports.prompts import Renderer
from eagle31_hf.storage.fingerprints import weights_fingerprint
from eagle31_hf.targets.layers import capture_states
from eagle31_hf.training.chats import ExampleMaker
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.images import image_ids
from eagle31_hf.training.kinds import Chat, parse_record
from eagle31_hf.training.packing import Collator
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.prepare import Prepared, prepare_data
from eagle31_hf.training.recipe import asked_data
from eagle31_hf.training.skipped import Skipped
from eagle31_hf.training.store import HiddenStateStore
from eagle31_hf.training.trainer import as_trained
from eagle31_hf.training.unroll import unroll

LAYERS = [0, 1, 3]
WITH_STATES = {"max_length": 48, "states": True, "layer_ids": LAYERS, "records_per_shard": 2}


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    return build_target(request.param), build_processor(request.param)


@pytest.fixture(scope="module")
def llava():
    return build_target("LLaVA"), build_processor("LLaVA")


@pytest.fixture(scope="module")
def picture(tmp_path_factory) -> str:
    return write_image(tmp_path_factory.mktemp("pictures") / "one.png")


def prepare(pair, folder, records: list[dict], **options) -> Prepared:
    folder.mkdir(exist_ok=True)
    data = write_data(folder / "chats.jsonl", records)
    return prepare_data(*pair, data, folder / "store", PreparationOptions(**WITH_STATES | options))


def served(processor, messages: list[dict]) -> dict[str, torch.Tensor]:
    """The inputs that a user gives generate(): the processor's own tokens and pixels. Its template reads words in parts
    alone."""
    plain = [message for message in messages if isinstance(message["content"], str)]
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} if m in plain else m for m in messages]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return dict(processor.apply_chat_template(parts, add_generation_prompt=len(messages) == 1, **options))


def test_states_are_the_target_s_own_with_the_pixels(pair, picture, tmp_path):
    target, processor = pair
    other = write_image(tmp_path / "other.png", seed=1)
    chats = [{"messages": [asked("abc", path=path), said("defg")]} for path in (picture, other)]
    done = prepare(pair, tmp_path, [*chats, {"text": "abcdefgh"}])
    store = HiddenStateStore(done.folder)
    assert (len(store), done.skipped) == (3, {})
    for row, chat in enumerate(chats):
        inputs = served(processor, chat["messages"])
        with torch.no_grad(), capture_states(target, LAYERS) as captured:
            logits = target(**inputs).logits
        assert torch.equal(store[row]["input_ids"], inputs["input_ids"][0])
        assert_close("states", store[row]["states"], captured.take()[0], FORWARD)
        assert_close("logits", target.get_output_embeddings()(store[row]["last_states"]), logits[0], FORWARD)
    assert not torch.allclose(store[0]["states"], store[1]["states"], rtol=0.1)
    answers = store[0]["input_ids"][store[0]["answers"]]
    assert processor.tokenizer.decode(answers) == "defgk"


def test_what_training_feeds_a_drafter_is_what_decoding_feeds_it(pair, picture, tmp_path):
    """Tokens, states and positions of an image, for the first draft after the target's own first token."""
    target, processor = pair
    chat = [asked("abc", path=picture)]
    prompt = served(processor, chat)
    count = prompt["input_ids"].shape[1]
    text = target.generate(**prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, suppress_tokens=[IMAGE])
    words = processor.tokenizer.decode(text[0, count:])
    store = HiddenStateStore(prepare(pair, tmp_path, [{"messages": [*chat, said(words)]}] * 2).folder)
    assert torch.equal(store[0]["input_ids"][: count + 6], text[0])

    drafter = new_drafter(target, aux_hidden_state_layer_ids=LAYERS)
    begun = weights_fingerprint(drafter)
    args = Eagle31TrainingArguments(str(tmp_path / "run"), **ARGUMENTS | {"train_prompts": True, "max_steps": 3})
    Eagle31Trainer(drafter, args, store).train()
    assert weights_fingerprint(drafter) != begun

    fed = list[torch.Tensor]()  # the last state of each forward over the target's states, until something is drafted

    def note(module, args, kwargs, output):
        fed.append(output.last_hidden_state[0, -1] if "target_hidden_states" in kwargs else torch.empty(0))

    with drafter.eval().register_forward_hook(note, with_kwargs=True):
        options = {"num_assistant_tokens": 2, "prompt_lookup_num_tokens": 0, "max_new_tokens": 6, "do_sample": False}
        target.generate(**prompt, assistant_model=drafter, suppress_tokens=[IMAGE], **options)
    first_draft = [len(state) for state in fed].index(0)
    with torch.no_grad():
        _, trained = next(unroll(drafter, store[0]["input_ids"][None], store[0]["states"][None], depth=1))
    assert_close("the first draft", fed[first_draft - 1], trained[0, count - 1], FORWARD)


def test_tokens_of_images_are_never_supervised(llava, picture, tmp_path):
    target, _ = llava
    record = {"messages": [asked("abc", path=picture), said("defg")]}
    for mask in ("answers", "all"):
        store = HiddenStateStore(prepare(llava, tmp_path / mask, [record], mask=mask).folder)
        is_image = store[0]["input_ids"] == IMAGE
        assert is_image.sum() == 4
        assert not store[0]["answers"][is_image].any()
    assert store[0]["answers"][~is_image].all()
    batch = as_trained(Collator()([store[0]]), True, image_ids(target.config), 0, torch.Generator())
    assert torch.equal(batch["answers"][0], ~is_image)


def data_url(path: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(Path(path).read_bytes()).decode()}"


# how users name an image: the part of a message, and columns beside the messages
NAMED = {
    "path": lambda path: ({"type": "image", "path": path}, {}),
    "url": lambda path: ({"type": "image", "url": path, "image": None}, {}),
    "base64": lambda path: ({"type": "image", "base64": data_url(path).partition(",")[2]}, {}),
    "data": lambda path: ({"type": "image_url", "image_url": {"url": data_url(path)}}, {}),
    "Pillow": lambda path: ({"type": "image", "image": Image.open(path)}, {}),
    "column": lambda path: ({"type": "image"}, {"images": [path]}),
    "bytes": lambda path: ({"type": "image"}, {"image": {"bytes": Path(path).read_bytes(), "path": None}}),
    "a column of None": lambda path: ({"type": "image"}, {"images": None, "image": path}),
}


def test_images_of_the_words_of_llava_stand_where_these_say():
    turns = [{"from": "human", "value": "<image>\nabc <image>"}, {"from": "gpt", "value": "de <image>"}]
    chat = parse_record({"conversations": turns, "image": ["a.png", "b.png"]}, no_images=None)
    content = [(part["type"], part.get("text") or str(part["image"].path)) for part in chat.messages[0]["content"]]
    assert content == [("image", "a.png"), ("text", "abc"), ("image", "b.png")]
    assert chat.messages[1]["content"] == "de <image>"
    with pytest.raises(Skipped, match="1 images stand beside the messages, and 2 parts"):
        parse_record({"conversations": turns, "image": "a.png"}, no_images=None)


def test_an_image_beside_a_question_goes_before_its_words():
    chat = parse_record({"question": "abc", "answer": "de", "images": [], "image": "a.png"}, no_images=None)
    assert [part["type"] for part in chat.messages[0]["content"]] == ["image", "text"]
    assert chat.messages[1]["content"] == "de"


@pytest.mark.parametrize("name", NAMED)
def test_images_are_named_in_many_ways(name, picture):
    part, columns = NAMED[name](picture)
    content = [part, {"type": "text", "text": "abc"}]
    chat = parse_record({"messages": [{"role": "user", "content": content}, said("de")], **columns}, no_images=None)
    [image] = chat.images
    assert image["image"].open().tobytes() == Image.open(picture).convert("RGB").tobytes()


def test_what_cannot_be_read_is_skipped_with_its_reason(llava, picture, tmp_path):
    answer = said("defg")
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"%!PS")
    records = {
        "an image that cannot be read": [asked("abc", path=str(tmp_path / "none.png")), answer],
        "images and their places differ in number": [asked("abc"), answer],
        "an image of no known kind": [asked("abc", image=5), answer],
        "over-long prompt": [asked("abcdefgh" * 8), said("de"), asked("a", path=picture), answer],
        "tokens of images without their pixels": [{"role": "user", "content": "<image>abc"}, answer],
        "holds more than text": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, answer],
    }
    records["over-long prompt"][0]["content"].pop(0)
    os.mkfifo(tmp_path / "pipe.png")
    sources = (
        str(bad),
        str(tmp_path / "pipe.png"),
        "https://example.com/a.png",
        {"bytes": None, "path": "https://example.com/a.png"},
        {"bytes": None, "path": None},
    )
    others = [[asked("abc", image=source), answer] for source in sources]
    good = [asked("abc", path=picture), answer]
    chats = [{"messages": each} for each in (*records.values(), *others, good)]
    chats.append({"messages": [{"role": "user", "content": "abc"}, answer], "images": [picture]})
    done = prepare(llava, tmp_path / "of", chats)
    assert done.rows == 1
    more = ("an image that cannot be read", "images and their places differ in number", "an image of no known kind")
    assert done.skipped == dict.fromkeys(records, 1) | dict(zip(more, (5, 2, 2), strict=True))


def test_a_chat_that_the_target_refuses_is_skipped(picture, tmp_path):
    """PaddleOCR-VL cannot read two images without a token between them."""
    two = {"role": "user", "content": [{"type": "image", "path": picture}] * 2}
    chats = [{"messages": [user, said("de")]} for user in (asked("abc", path=picture), two)]
    done = prepare((build_target("PaddleOCR-VL"), build_processor("PaddleOCR-VL")), tmp_path, chats)
    assert (done.rows, sum(done.skipped.values())) == (1, 1)
    assert "target refused it" in str(done.skipped)


def test_a_damaged_image_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.png").write_bytes(b"%!PS")
    with pytest.raises(ValueError, match=r"bad\.png is no image"):
        Picture("bad.png").open()


def test_words_reach_a_template_that_reads_parts_alone(llava):
    """As those of processors, which tokenizers are saved with."""
    tokenizer = copy.deepcopy(llava[1].tokenizer)
    own = [{"role": "user", "content": "abc"}]
    assert as_read(tokenizer, own, {"chat_template": "{{ messages[0].content }} of one type"}) == own
    tokenizer.chat_template = llava[1].chat_template
    assert "abc" not in tokenizer.apply_chat_template(own, tokenize=False)
    [example] = ExampleMaker(tokenizer, PreparationOptions(), 100, set()).examples({"messages": [*own, said("de")]})
    assert "abc" in tokenizer.decode(example["input_ids"]).replace(" ", "")
    assert "abc" in tokenizer.decode(Renderer(tokenizer, 8, 100, {}).templated(Chat(own))).replace(" ", "")


def test_without_pixels_no_chat_with_images_is_trained_on(llava, picture, tmp_path):
    """By a tokenizer alone, without states, in the target's own words; nor by a target that reads a store's tokens."""
    target, processor = llava
    records = [{"messages": [asked("abc", path=picture), said("defg")]}, {"text": "abcdefgh"}]
    text_only = (target, processor.tokenizer)
    bare = {"states": False, "layer_ids": None}
    for name, pair, options in (
        ("tokenizer", text_only, {}),
        ("tokens", llava, bare),
        ("answers", llava, {"regenerate": True, "max_new_tokens": 4}),
    ):
        done = prepare(pair, tmp_path / name, records, **options)
        assert (done.rows, done.skipped) == (1, {"holds more than text": 1})
    store = HiddenStateStore(prepare(llava, tmp_path / "store", records[:1]).folder)
    args = Eagle31TrainingArguments(str(tmp_path / "run"), **ARGUMENTS)
    with pytest.raises(ValueError, match="tokens of images without their pixels"):
        Eagle31Trainer(new_drafter(target), args, store, target=target).train()
    with pytest.raises(ValueError, match="1: tokens of images without their pixels"):
        prepare_data(target, processor, str(store.folder), tmp_path / "again", PreparationOptions(**WITH_STATES))


def test_another_image_is_another_record(llava, tmp_path):
    """A killed run goes on with the same bytes; one whose pictures are others by now does not."""
    path = write_image(tmp_path / "one.png")
    records = [{"messages": [asked("abc", path=path), said(words)]} for words in ("defg", "gfed", "abcd")]
    folder = Path(prepare(llava, tmp_path / "of", records).folder)
    first, kept = folder / "shard-00000.safetensors", asked_data(str(folder), None, PreparationOptions())
    before = first.read_bytes()
    first.unlink()
    prepare(llava, tmp_path / "of", records)
    assert first.read_bytes() == before
    write_image(path, seed=1)
    with pytest.raises(ValueError, match=r"source\.images is .*the data there was made from something else"):
        prepare(llava, tmp_path / "of", records)
    shutil.rmtree(folder)
    prepare(llava, tmp_path / "of", records)
    assert first.read_bytes() != before
    assert asked_data(str(folder), None, PreparationOptions()) != kept  # by which a resumed run knows its data


def test_where_a_template_changes_its_past_each_answer_is_read_with_the_images_before_it(llava, picture, tmp_path):
    target, processor = llava
    changing = copy.deepcopy(processor)
    changing.chat_template = "{{ 'gg'[: messages | length // 3] }}" + processor.chat_template
    other = write_image(tmp_path / "other.png", seed=1)
    messages = [asked("abc", path=picture), said("de"), asked("f", path=other), said("gfe")]
    store = HiddenStateStore(prepare((target, changing), tmp_path / "of", [{"messages": messages}]).folder)
    assert len(store) == 2
    for row, count in enumerate((2, 4)):
        with torch.no_grad(), capture_states(target, LAYERS) as captured:
            target(**served(changing, messages[:count]))
        assert_close("states", store[row]["states"], captured.take()[0], FORWARD)


@pytest.mark.parametrize("kind", KINDS)
def test_commands_from_chats_with_images_to_acceptance_on_them(kind, picture, tmp_path, capsys):
    target, folder = build_target(kind), tmp_path / "target"
    target.save_pretrained(folder)
    build_processor(kind).save_pretrained(folder)
    chats = [{"messages": [asked(words, path=picture), said("defg")]} for words in ("a", "bb", "cba", "abc")]
    data = write_data(tmp_path / "chats.jsonl", chats)
    places = ["--target", str(folder), "--data"]
    assert main(["prepare-data", *places, data, "--output", str(tmp_path / "store"), "--states"]) == 0
    quick = ["--steps", "2", "--depth", "2", "--accumulate", "1", "--eval-rows", "0", "--device", "cpu"]
    assert main(["train", *places, str(tmp_path / "store"), "--output", str(tmp_path / "drafter"), *quick]) == 0
    # without the states of a store nothing reads the pixels
    assert main(["train", *places, data, "--output", str(tmp_path / "none"), *quick]) == 2
    said_of_it = capsys.readouterr().err
    assert "4: holds more than text" in said_of_it
    assert "These are read by prepare-data --states" in said_of_it
    pair = ["--target", str(folder), "--drafter", str(tmp_path / "drafter"), "--prompts", data]
    small = ["--max-new-tokens", "6", "--depths", "2", "--trees", "6", "--depth", "2", "--json"]
    assert main(["bench", "acceptance", *pair, *small]) == 0
    out = capsys.readouterr().out
    assert "4 of chats.jsonl" in json.loads(out)["facts"]["prompts"]
    assert "are not the target's own" not in out
    assert main(["drift", *pair, *["--max-new-tokens", "6", "--depth", "2"]]) == 2
    assert "all that this report is of" in capsys.readouterr().err
