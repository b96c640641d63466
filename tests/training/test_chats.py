"""The tokens of a chat that are the target's to say, under templates as targets have them."""

import pytest
import torch
from letters import maker_of
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from eagle31_hf.chat_template import as_read
from eagle31_hf.training.chats import RENDERINGS
from eagle31_hf.training.loss_mask import loss_mask
from eagle31_hf.training.skipped import Skipped

SPECIAL = ["<bos>", "<eos>", "<im>", "<end>", "<think>", "</think>"]
CHATML = (
    "{% for m in messages %}<im>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt"
    " %}<im>assistant\n{% endif %}"
)
SAID = "{{ m.content }}<end>\n"
MARKED = "{% generation %}" + SAID + "{% endgeneration %}"
TEMPLATES = {
    "chatml": CHATML,
    "llama": (
        "{{ bos_token }}"
        + CHATML.replace("\n", "\n\n").replace("<end>\n\n", "<end>").replace("m.content", "m.content | trim")
    ),
    "marked": CHATML.replace(SAID, "{% if m.role == 'assistant' %}" + MARKED + "{% else %}" + SAID + "{% endif %}"),
    "marked_inside": CHATML.replace(
        "{{ m.content }}",
        "{% generation %}{{ m.content if m.role == 'assistant' }}{% endgeneration %}"
        "{{ m.content if m.role != 'assistant' }}",
    ),
    # Qwen3: what was thought before the last question is taken out.
    "stripping": CHATML.replace(
        "{{ m.content }}", "{{ m.content if m.role == 'user' or loop.last else m.content.split('</think>')[-1] }}"
    ),
    # The prompt begins the thinking; its line break is one token with what follows where there is none.
    "thinking": (
        CHATML.replace(
            "{{ m.content }}",
            "{{ '<think>\n' + (m.thinking or '') + '\n</think>' if m.role == 'assistant' }}{{ m.content }}",
        ).replace("<im>assistant\n", "<im>assistant\n<think>\n")
    ),
    "strict": "{% if messages[0].role != 'user' %}{{ raise_exception('who asks?') }}{% endif %}" + CHATML,
    # Qwen3: a switch decides whether the prompt asks for thoughts.
    "switched": (
        CHATML.replace(
            "{{ m.content }}",
            "{{ '<think></think>' if m.role == 'assistant' and not thinks | default(true) }}{{ m.content }}",
        ).replace("<im>assistant\n", "<im>assistant\n{{ '<think></think>' if not thinks }}")
    ),
    "rewriting": "{{ messages | length }}" + CHATML.replace("<im>assistant", "<im>model"),
    # Gemma 4: the prompt ends the thinking, of which an answered chat has nothing.
    "unthinking": CHATML.replace("<im>assistant\n", "<im>assistant\n<think></think>"),
    # Command R7B: whatever is said last, an answer is asked for.
    "asking": CHATML.replace("{% if add_generation_prompt %}", "")
    .replace("{% endif %}", "")
    .replace("<im>assistant\n", "<im>assistant\n<think></think>"),
    # Mistral: nothing asks for an answer, and what the system says stands before the user's last words.
    "last_words": (
        "{% for m in messages %}{% if m.role == 'user' %}<im>{{ messages[0].content if loop.last }}{{ m.content }}"
        "<think>{% elif m.role == 'assistant' %}{{ m.content }}<end>{% endif %}{% endfor %}"
    ),
    # Hermes: a message ends otherwise where it is the last.
    "ending": CHATML.replace("<end>\n{% endfor", "<end>{{ '\n' if not loop.last }}{% endfor"),
    "counting": "{{ messages | length }}" + CHATML,
    # GLM: a turn ends with the token that begins the next one.
    "open": CHATML.replace("<end>\n", ""),
    "tools": (
        "{{ tools[0].name if tools }}" + CHATML.replace("{{ m.content }}", "{{ m.content or m.tool_calls[0].name }}")
    ),
}
CHAT = [("system", "s"), ("user", "hi"), ("assistant", "abc"), ("user", "yo"), ("assistant", "de")]


@pytest.fixture(scope="module")
def make_tokenizer():
    """Makes tokenizers of one character a token, but for special ones and "\\n\\n"; texts, not chats, get BOS from the
    tokenizer itself."""

    def build(template: str | None = "chatml", has_bos: bool = True, **special) -> PreTrainedTokenizerFast:
        words = ["<unk>", *SPECIAL, "\n\n", *map(chr, (10, *range(32, 127)))]
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n\n|[\s\S]"), "isolated")
        backend.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
        if has_bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<bos> $A", special_tokens=[("<bos>", words.index("<bos>"))]
            )
            special["bos_token"] = "<bos>"
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "<end>"} | special)
        tokenizer.chat_template = TEMPLATES.get(template)
        return tokenizer

    return build


def messages(*turns) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def examples_of(tokenizer, record, index: int = 0, **options) -> list[tuple[str, list[str]]]:
    """Returns the text and the answers of each example."""
    made = maker_of(tokenizer, **{"max_length": 200} | options).examples(record, index)
    return [(decoded(tokenizer, example["input_ids"]), answers_of(tokenizer, example)) for example in made]


def decoded(tokenizer, ids) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


def answers_of(tokenizer, example) -> list[str]:
    marked, found = example["answers"].tolist(), []
    for place, is_answer in enumerate(marked):
        if is_answer and not (place and marked[place - 1]):
            end = next((i for i in range(place, len(marked)) if not marked[i]), len(marked))
            found.append(decoded(tokenizer, example["input_ids"][place:end]))
    return found


@pytest.mark.parametrize("template", ["chatml", "llama", "marked", "marked_inside", "strict"])
def test_an_answer_is_what_the_assistant_says_and_the_end_of_its_turn(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    chat = messages(*CHAT[template == "strict" :])
    ((text, answers),) = examples_of(tokenizer, chat)
    assert answers == ["abc<end>", "de<end>"]
    assert text == tokenizer.apply_chat_template(chat["messages"], tokenize=False)


@pytest.mark.parametrize("template", ["chatml", "llama", "marked", "marked_inside"])
def test_chains_predict_the_second_token_of_an_answer_to_the_end_of_its_turn(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    (example,) = maker_of(tokenizer, 200).examples(messages(*CHAT))
    positions = loss_mask(example["answers"][None], 0)[0].nonzero().flatten()
    assert decoded(tokenizer, example["input_ids"][positions + 2]) == "bc<end>e<end>"


def test_bos_comes_from_the_template_alone(make_tokenizer):
    """The tokenizer puts one before every text, which for a chat serving does not ask for."""
    for template, count in (("llama", 1), ("chatml", 0)):
        tokenizer = make_tokenizer(template)
        ((text, _),) = examples_of(tokenizer, messages(*CHAT))
        assert text.count("<bos>") == count
        assert text.startswith("<bos>" * count)


def test_thoughts_stripped_later_make_an_example_of_each_turn(make_tokenizer):
    """When serving, thoughts are in the turn under way, but no longer in those before it."""
    tokenizer = make_tokenizer("stripping")
    chat = messages(
        ("user", "hi"), ("assistant", "<think>x</think>a"), ("user", "yo"), ("assistant", "<think>y</think>b")
    )
    ask, again = "<im>user\nhi<end>\n<im>assistant\n", "<end>\n<im>user\nyo<end>\n<im>assistant\n"
    assert examples_of(tokenizer, chat) == [
        (ask + "<think>x</think>a<end>", ["<think>x</think>a<end>"]),
        (ask + "a" + again + "<think>y</think>b<end>", ["<think>y</think>b<end>"]),
    ]
    prompt = tokenizer.apply_chat_template(chat["messages"][:3], add_generation_prompt=True, tokenize=False)
    assert examples_of(tokenizer, chat)[1][0].startswith(prompt)
    assert len(examples_of(tokenizer, messages(*CHAT))) == 1


def test_a_prompt_may_begin_the_thinking(make_tokenizer):
    tokenizer = make_tokenizer("thinking")
    thought = {"role": "assistant", "content": "a", "thinking": "xy"}
    ask = {"role": "user", "content": "hi"}
    made = examples_of(tokenizer, {"messages": [ask, thought, ask, thought | {"thinking": None}]})
    assert [answers for _, answers in made] == [["xy\n</think>a<end>"], ["\n</think>a<end>"]]


@pytest.mark.parametrize("template", ["unthinking", "asking", "last_words", "ending", "counting"])
def test_a_turn_begins_with_the_prompt_as_it_is_served(make_tokenizer, template):
    """Where an answered chat has something else in its place."""
    tokenizer, chat = make_tokenizer(template), messages(*CHAT)["messages"]
    prompts = [
        tokenizer.apply_chat_template(chat[:number], add_generation_prompt=True, tokenize=False) for number in (2, 4)
    ]
    assert examples_of(tokenizer, {"messages": chat}) == [
        (prompts[0] + "abc<end>", ["abc<end>"]),
        (prompts[1] + "de<end>", ["de<end>"]),
    ]


def test_a_turn_may_end_with_the_token_that_begins_the_next(make_tokenizer):
    tokenizer = make_tokenizer("open", eos_token="<im>")
    assert examples_of(tokenizer, messages(*CHAT))[0][1] == ["abc<im>", "de"]


def test_switches_of_the_template(make_tokenizer):
    ((text, answers),) = examples_of(make_tokenizer("switched"), messages(*CHAT), template_options={"thinks": False})
    assert text.count("<im>assistant\n<think></think>") == 2
    assert answers == ["abc<end>", "de<end>"], "what the prompt holds is no part of the answer"


def test_other_ends_of_a_turn(make_tokenizer):
    """A target may end its turn with other tokens than the tokenizer's EOS: its generation config lists them."""
    tokenizer = make_tokenizer("chatml", eos_token="<eos>")
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert examples_of(tokenizer, messages(*CHAT), stop_ids={0, end})[0][1] == ["abc<end>", "de<end>"]
    assert examples_of(tokenizer, messages(*CHAT), stop_ids={0})[0][1] == ["abc<end>\n", "de<end>\n"]


@pytest.mark.parametrize("template", ["chatml", "marked", "marked_inside", "thinking"])
def test_silent_turns_are_no_answers(make_tokenizer, template):
    chat = [("user", "hi"), ("assistant", ""), ("user", "yo")]
    assert examples_of(make_tokenizer(template), messages(*chat, ("assistant", "ab")))[0][1] == [
        "\n</think>" * (template == "thinking") + "ab<end>"
    ]
    with pytest.raises(Skipped, match="no answer"):
        examples_of(make_tokenizer(template), messages(*chat))


def test_nobody_asks_the_assistant_to_begin(make_tokenizer):
    chat = messages(("assistant", "hello"), ("user", "hi"), ("assistant", "ab"))
    assert examples_of(make_tokenizer(), chat)[0][1] == ["ab<end>"]


def test_tools_and_calls_reach_the_template(make_tokenizer):
    call = {"role": "assistant", "tool_calls": [{"name": "fn", "arguments": {}}]}
    ((text, answers),) = examples_of(
        make_tokenizer("tools"), {"messages": [{"role": "user", "content": "hi"}, call], "tools": [{"name": "t"}]}
    )
    assert text.startswith("t<im>user")
    assert answers == ["fn<end>"]


FORMS = {  # of words, of a call's arguments, and what is rendered of both
    "a string": ("{{ '' + m.content }}", "{{ a | tojson }}", "hi yo", '{"a": "b"}'),
    "what is printed": ("{{ m.content | trim }}", "{% for k, v in a.items() %}{{ k + v }}{% endfor %}", "hi yo", "ab"),
    "parts": (
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}",
        "{{ a + '' }}",
        "hiyo",
        '{"a": "b"}',
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_words_and_calls_reach_a_template_in_the_form_that_it_reads(make_tokenizer, form):
    words, arguments, *expected = FORMS[form]
    calls = "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}" + arguments + "{% endfor %}"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", words + calls)
    ask = {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "yo"}]}
    for given in ({"a": "b"}, '{"a": "b"}'):
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "fn", "arguments": given}}]}
        ((text, answers),) = examples_of(tokenizer, {"messages": [ask, call]})
        assert text.startswith(f"<im>user\n{expected[0]}<end>")
        assert answers == [expected[1] + "<end>"]


def test_what_is_said_in_parts_is_one_text_and_arguments_that_are_no_object_stay(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML.replace("m.content", "'' + m.content")
    said = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    calls = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "fn", "arguments": '"a"'}}]}
    assert as_read(tokenizer, [said, calls], {}) == [said | {"content": "ab"}, calls]


def test_tokenizers_that_cannot_place_marks():
    """Tokenizers written in Python do not know which letters a token is of."""
    tokenizer = ByT5Tokenizer(chat_template=TEMPLATES["marked"].replace("<end>", "</s>"))
    assert not tokenizer.is_fast
    assert examples_of(tokenizer, messages(*CHAT))[0][1] == ["abc</s>", "de</s>"]


def test_a_template_of_ones_own(make_tokenizer):
    assert examples_of(make_tokenizer(None), messages(*CHAT), chat_template=CHATML)[0][1] == ["abc<end>", "de<end>"]


def test_one_question_is_a_chat(make_tokenizer):
    assert examples_of(make_tokenizer(), {"prompt": "hi", "completion": "ab"}) == [
        ("<im>user\nhi<end>\n<im>assistant\nab<end>\n", ["ab<end>"])
    ]


@pytest.mark.parametrize(
    ("template", "record", "reason", "options"),
    [
        ("chatml", messages(("user", "hi")), "no answer", {}),
        ("chatml", {"messages": []}, "no answer", {}),
        ("chatml", messages(("user", "a" * 30), ("assistant", "abc")), "over-long prompt", {"max_length": 40}),
        ("chatml", messages(("user", "hi"), ("assistant", "abc")), "over-long prompt", {"max_length": 21}),
        ("stripping", messages(("user", "a" * 30), ("assistant", "abc")), "over-long prompt", {"max_length": 40}),
        ("strict", messages(("system", "s"), ("assistant", "abc")), "template refused it: who asks", {}),
        (
            "rewriting",
            messages(("user", "hi"), ("assistant", "abc")),
            "template refused it: it renders a prompt otherwise",
            {},
        ),
        ("chatml", {"input_ids": [5, 6, 7], "answers": [0, 0, 1]}, "too short", {}),
        ("chatml", {"input_ids": [5, 6, 7], "answers": [0, 0, 0]}, "no answer", {}),
        ("chatml", {"text": "ab"}, "too short", {}),
        (
            "chatml",
            {"text": "hello"},
            r"token ids go from 1 to \d+; expected 0 to 49, the target's",
            {"vocab_size": 50},
        ),
        (
            "chatml",
            {"input_ids": [3, -1, 4], "answers": [1, 1, 1]},
            "token ids go from -1 to 4; expected 0 to 49",
            {"vocab_size": 50},
        ),
    ],
)
def test_skipped(make_tokenizer, template, record, reason, options):
    with pytest.raises(Skipped, match=reason):
        examples_of(make_tokenizer(template), record, **options)


def test_long_chats_are_cut_at_the_end(make_tokenizer):
    """Two tokens of an answer are the least: the first of them is never drafted."""
    tokenizer = make_tokenizer()
    whole = examples_of(tokenizer, messages(*CHAT))[0][0]
    start = tokenizer(whole, add_special_tokens=False).char_to_token(whole.index("abc"))
    assert [examples_of(tokenizer, messages(*CHAT), max_length=start + n)[0][1] for n in (2, 3, 4, 5)] == [
        ["ab"],
        ["abc"],
        *[["abc<end>"]] * 2,
    ]
    with pytest.raises(Skipped, match="over-long prompt"):
        examples_of(tokenizer, messages(*CHAT), max_length=start + 1)


@pytest.mark.parametrize(("length", "pieces"), [(7, [8]), (16, [8, 8]), (18, [8, 8]), (19, [8, 8, 4])])
def test_text_is_cut_into_pieces(make_tokenizer, length, pieces):
    tokenizer = make_tokenizer()
    text = "".join(chr(97 + i) for i in range(length))
    made = maker_of(tokenizer, 8).examples({"text": text})
    assert [len(example["input_ids"]) for example in made] == pieces
    assert ("<bos>" + text).startswith(decoded(tokenizer, torch.cat([example["input_ids"] for example in made])))
    assert all(example["answers"].all() for example in made)
    assert all(example["input_ids"].untyped_storage().nbytes() == 8 * len(example["input_ids"]) for example in made)


def test_tokens_are_kept_and_cut(make_tokenizer):
    (example,) = maker_of(make_tokenizer(), 4).examples({"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, 7, 8, 9]})
    torch.testing.assert_close(
        example, {"input_ids": torch.tensor([5, 6, 7, 8]), "answers": torch.tensor([False, True, True, True])}
    )


@pytest.mark.parametrize(
    "record", [messages(*CHAT), messages(("user", "hi")), {"input_ids": [5, 6, 7], "answers": [0, 0, 0]}]
)
def test_all_tokens_may_count(make_tokenizer, record):
    (example,) = maker_of(make_tokenizer("stripping"), 200, mask="all").examples(record)
    assert example["answers"].all()


PERTURBED = {
    "regular": ("<bos><im>user\n\nhi<end><im>assistant\n\nab<end>", ["ab<end>"]),
    "no_bos": ("<im>user\n\nhi<end><im>assistant\n\nab<end>", ["ab<end>"]),
    "no_template": ("<bos>hi\nab", ["ab"]),
    "no_bos_no_template": ("hi\nab", ["ab"]),
}


def test_perturbed_renderings(make_tokenizer):
    tokenizer, chat = make_tokenizer("llama"), messages(("user", "hi"), ("assistant", "ab"))
    name_of = {text: name for name, (text, _) in PERTURBED.items()}
    drawn = []
    for index in range(400):
        ((text, answers),) = examples_of(tokenizer, chat, index, template_augmentation=0.5, seed=3)
        assert answers == PERTURBED[name_of[text]][1]
        drawn.append(name_of[text])
    counts = {name: drawn.count(name) for name in RENDERINGS}
    assert 160 < counts["regular"] < 240
    assert all(40 < counts[name] < 95 for name in RENDERINGS if name != "regular")
    again = [examples_of(tokenizer, chat, index, template_augmentation=0.5, seed=3)[0][0] for index in (7, 0, 300)]
    assert [name_of[text] for text in again] == [drawn[index] for index in (7, 0, 300)]
    assert {examples_of(tokenizer, chat, index)[0][0] for index in range(50)} == {PERTURBED["regular"][0]}


@pytest.mark.parametrize("special", [{}, {"bos_token": "<bos>"}], ids=["no BOS", "BOS not used"])
def test_a_target_without_bos_is_not_robbed_of_its_first_token(make_tokenizer, special):
    tokenizer, chat = make_tokenizer("chatml", has_bos=False, **special), messages(("user", "hi"), ("assistant", "ab"))
    texts = {examples_of(tokenizer, chat, index, template_augmentation=1)[0][0] for index in range(40)}
    assert texts == {"<im>user\nhi<end>\n<im>assistant\nab<end>\n", "hi\nab"}


def test_an_answer_that_is_a_line_break_counts(make_tokenizer):
    tokenizer = make_tokenizer("chatml", has_bos=False)
    chat = messages(("user", "hi"), ("assistant", "\n"), ("user", "yo"), ("assistant", "ab"))
    found = {}
    for index in range(40):
        found |= dict(examples_of(tokenizer, chat, index, template_augmentation=1))
    assert found["hi\n\n\nyo\nab"] == ["\n", "ab"]


def test_what_is_wrong_with_everything(make_tokenizer):
    tokenizer = make_tokenizer(None)
    for record, options, problem in (
        (messages(*CHAT), {}, "the tokenizer has no chat template; expected one. Pass chat_template"),
        ({"text": "hello"}, {"mask": "most"}, "mask is 'most'; expected one of answers, all"),
        ({"text": "hello"}, {"template_augmentation": 2}, "template_augmentation is 2; expected a share"),
        ({"text": "hello"}, {"max_length": 3}, "max_length is 3; expected at least 4"),
    ):
        with pytest.raises(ValueError, match=problem) as caught:
            examples_of(tokenizer, record, **options)
        assert not isinstance(caught.value, Skipped)
