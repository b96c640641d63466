"""Regenerated answers are what the target says to the prompts it is served, alone."""

import copy
from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from letters import END, build_tokenizer, generator_of

from eagle31_hf.seeding import seeded
from eagle31_hf.training.answers import AnswerGenerator, seed_of, stop_ids
from eagle31_hf.training.kinds import Chat
from eagle31_hf.training.regenerate import Beginning, regenerate

NEW_TOKENS, LENGTH = 12, 60
GREEDY = {"do_sample": False}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(params=["llama", "qwen3", "gpt2"])
def target(request, make_target):
    return make_target(request.param, eos_token_id=END)


def chat(*contents: str, system: str | None = None, **options) -> Chat:
    """Makes a chat of questions and answers by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return Chat([{"role": "system", "content": system}] * (system is not None) + messages, **options)


CHATS = [
    chat("abc", "dd", "ef", "d", "ca", "b"),
    chat("b", "dd"),
    chat("ddadce", "a", "b", "c", system="ab"),
    chat("fffffffffffff", "a"),
    chat("cb", "a", "bbbbbb", "e"),
]


def alone(target, prompt: list[int], num_tokens: int = NEW_TOKENS) -> list[int]:
    """Returns a prompt and its answer, generated in a batch of its own."""
    ids = torch.tensor([prompt])
    return target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, pad_token_id=0, do_sample=False
    )[0].tolist()


def make(generator: AnswerGenerator, chats: list[Chat]) -> tuple[list[list[dict]], Counter]:
    skipped = Counter()
    return regenerate(generator, copy.deepcopy(chats), counting(skipped)), skipped


def counting(skipped: Counter):
    return lambda index, refusal: skipped.update([str(refusal)])


def test_an_answer_may_fill_what_its_own_prompt_leaves(make_target, tokenizer):
    """A batch is generated as long as its shortest prompt leaves room for."""
    generator = generator_of(ending(make_target("llama"), []), tokenizer, 20, 50, 2, GREEDY)
    answers = generator.answers([torch.tensor([1, 2, 3, 3]), torch.arange(15) % 4], [None, None])
    assert len(answers[1]) == 5


def test_an_empty_answer_has_no_words(make_target, tokenizer):
    assert generator_of(make_target("llama"), tokenizer, 20, 5).text(torch.empty(0, dtype=torch.long)) == ""


def ids_of(found: list[list[dict]]) -> list[list[list[int]]]:
    return [[example["input_ids"].tolist() for example in examples] for examples in found]


def ending(target, ends: list[int]):
    target = copy.deepcopy(target)
    target.generation_config.eos_token_id = ends
    return target


def answers_of(example: dict) -> list[list[int]]:
    """Returns the ids of each answer in an example."""
    pairs = zip(example["input_ids"].tolist(), example["answers"].tolist(), strict=True)
    return [[token for token, _ in run] for is_answer, run in groupby(pairs, lambda pair: pair[1]) if is_answer]


def expected_examples(target, tokenizer, conversation: Chat) -> list[list[tuple[int, bool]]]:
    """Returns the ids of each example and which of them are answers, by the documentation: one prompt at a time, turns
    together where each goes on from the one before, and nothing after an answer that was cut."""
    said, examples = [], []
    for message in conversation.messages:
        if message["role"] != "assistant":
            said.append(message)
            continue
        prompt = tokenizer.apply_chat_template(said, tools=conversation.tools, add_generation_prompt=True)["input_ids"]
        answer = alone(target, prompt)[len(prompt) :]
        example = [(token, False) for token in prompt] + [(token, True) for token in answer]
        if len(answer) >= 2:
            if examples and [token for token, _ in examples[-1]] == prompt[: len(examples[-1])]:
                last = examples.pop()
                example[: len(last)] = last
            examples.append(example)
        if answer[-1] != END:
            break
        said = [*said, {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}]
    return examples


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_every_turn_is_what_the_target_says_alone(target, tokenizer, batch_size):
    generator = generator_of(target, tokenizer, 2 * LENGTH, NEW_TOKENS, batch_size, GREEDY)
    found, skipped = make(generator, CHATS)
    for examples, conversation in zip(found, CHATS, strict=True):
        pairs = [
            [*zip(example["input_ids"].tolist(), example["answers"].tolist(), strict=True)] for example in examples
        ]
        assert pairs == expected_examples(target, tokenizer, conversation)
    assert sum(map(len, found)) > skipped["too short"]


def test_a_turn_whose_prompt_says_the_last_one_otherwise_is_an_example_of_its_own(make_target, tokenizer):
    """As with templates that leave thoughts out of later prompts."""
    generator = generator_of(make_target("llama", eos_token_id=END), tokenizer, 200, 60, 2, GREEDY)
    template = tokenizer.chat_template.replace("m.content or 'f'", "m.content[:2] or 'f'")
    generator.options = replace(generator.options, chat_template=template)
    (examples,) = regenerate(generator, copy.deepcopy(CHATS[:1]), lambda *_: None)
    assert len(examples) > 1
    assert [len(answers_of(example)) for example in examples] == [1] * len(examples)


def test_a_chat_ends_with_an_answer_that_was_cut(make_target, tokenizer):
    target = make_target("llama", eos_token_id=END)
    generator = generator_of(target, tokenizer, LENGTH, 2, 2, GREEDY)
    ((example,),), skipped = make(generator, CHATS[:1])
    assert example["answers"].sum() == 2
    assert skipped == {"turns after an answer that was cut": 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("<think>a b</think>\n\nc", {"content": "c", "reasoning_content": "a b"}),
        ("a</think>b</think>", {"content": "b</think>", "reasoning_content": "a"}),
        ("a</think>c", {"content": "c", "reasoning_content": "a"}),  # the template begins the thought
        ("c d", {"content": "c d"}),
        (
            "<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>final<|message|>c<|return|>",
            {"content": "c", "thinking": "a b"},
        ),
    ],
)
def test_thoughts_stand_in_a_field_of_their_own(make_target, tokenizer, words, message):
    characters = copy.deepcopy(tokenizer)
    characters.decode = lambda ids, **options: words
    answers = generator_of(make_target("llama", eos_token_id=END), characters, LENGTH, NEW_TOKENS)
    assert answers.message(torch.tensor([1, 2, END])) == {"role": "assistant", **message}


def test_an_end_only_the_tokenizer_knows(make_target, tokenizer):
    """Engines stop there too."""
    knowing, ignorant = make_target("llama", eos_token_id=END), make_target("llama")
    assert stop_ids(ignorant, tokenizer) == stop_ids(knowing, tokenizer) == [END]
    found, expected = (
        ids_of(make(generator_of(target, tokenizer, LENGTH, NEW_TOKENS, 2, GREEDY), CHATS)[0])
        for target in (ignorant, knowing)
    )
    assert found == expected


def test_several_ends(make_target, tokenizer):
    target = ending(make_target("llama"), [END, 6])
    assert stop_ids(target, tokenizer) == [6, END]
    examples = [
        example for made in make(generator_of(target, tokenizer, LENGTH, 30, 3, GREEDY), CHATS)[0] for example in made
    ]
    assert {int(example["input_ids"][-1]) for example in examples} >= {6, END}
    assert not any({6, END} & {*answer[:-1]} for example in examples for answer in answers_of(example))


def test_a_last_question_is_answered_and_a_chat_that_begins_with_an_answer_goes_on(make_target, tokenizer):
    generator = generator_of(make_target("llama", eos_token_id=END), tokenizer, LENGTH, NEW_TOKENS, 2, GREEDY)
    begun = Chat([{"role": "assistant", "content": "c"}, *chat("abc").messages])
    (asked, went_on), _ = make(generator, [chat("abc"), begun])
    assert [tokenizer.decode(example["input_ids"][~example["answers"]]) for example in asked + went_on] == [
        "iabcj",
        "jckiabcj",
    ]


def test_calls_of_tools_stay_since_what_follows_answers_them(make_target, tokenizer):
    generator = generator_of(make_target("llama", eos_token_id=END), tokenizer, LENGTH, NEW_TOKENS, 2, GREEDY)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    messages = [
        {"role": "user", "content": "a"},
        call,
        {"role": "tool", "content": "e"},
        {"role": "assistant", "content": "d"},
    ]
    ((example,),), _ = make(generator, [Chat(messages, tools=[{"name": "f"}])])
    assert tokenizer.decode(example["input_ids"][~example["answers"]]) == "ggiajfkiej"


def test_examples_are_cut_at_the_limit_and_prompts_without_room_are_skipped(make_target, tokenizer):
    target = make_target("llama", eos_token_id=END)
    chats = [chat("abc", "d"), chat("a" * 16, "d"), chat("a" * 17, "d", "a", "d"), chat("a" * 40, "d", "a", "d")]
    found, skipped = make(generator_of(target, tokenizer, 20, NEW_TOKENS, 3, GREEDY), chats)
    assert [len(examples) for examples in found] == [1, 1, 0, 0]
    assert skipped == {"over-long prompt": 2}
    whole = alone(target, found[1][0]["input_ids"][:18].tolist())
    assert found[1][0]["input_ids"].tolist() == whole[:20]
    assert found[1][0]["answers"].sum() == 2


def test_what_a_template_refuses_is_counted(make_target, tokenizer):
    generator = generator_of(make_target("llama", eos_token_id=END), tokenizer, LENGTH, NEW_TOKENS, 2, GREEDY)
    found, skipped = make(generator, [chat("abc", "d", "bad", "d"), chat("bad", "d"), chat("b", "d")])
    assert [len(examples) for examples in found] == [1, 0, 1]
    assert skipped == {"template refused it: bad words": 2}


def test_an_answer_of_one_token_teaches_nothing(make_target, tokenizer):
    """Its only token is not drafted. The chat goes on, with an answer of no words."""
    target = ending(make_target("llama"), [*range(END + 1)])
    found, skipped = make(generator_of(target, tokenizer, LENGTH, NEW_TOKENS, 2, GREEDY), [chat("abc", "d", "e", "d")])
    assert found == [[]]
    assert skipped == {"too short": 2}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_are_gone_on_with(target, tokenizer, batch_size):
    prompts = [[1, 2, 3], [8, 1], [5, 2] * 4, [4] * 59, [2, 0]]
    skipped = Counter()
    generator = generator_of(target, tokenizer, LENGTH, NEW_TOKENS, batch_size, GREEDY)
    found = regenerate(generator, [Beginning(torch.tensor(prompt)) for prompt in prompts], counting(skipped))
    assert skipped["over-long prompt"] == 1
    assert found[3] == []
    for examples, prompt in zip(found, prompts, strict=True):
        for example in examples:
            assert example["input_ids"].tolist() == alone(target, prompt)
            assert example["answers"].tolist() == [i >= len(prompt) for i in range(len(example["input_ids"]))]
    assert sum(map(len, found)) == len(prompts) - skipped.total() >= 3


def test_samples_follow_from_the_seed_alone(make_target, tokenizer):
    generator = generator_of(
        make_target("llama", eos_token_id=END),
        tokenizer,
        LENGTH,
        NEW_TOKENS,
        2,
        {"do_sample": True, "temperature": 3.0},
    )

    def sample(*seed: int) -> list[list[int]]:
        with seeded(seed_of(*seed)):
            return [example["input_ids"].tolist() for examples in make(generator, CHATS)[0] for example in examples]

    first = sample(0, 3)
    torch.rand(7)
    assert sample(0, 3) == first
    assert sample(0, 4) != first
    assert sample(1, 3) != first


def test_numbers_drawn_afterwards_are_as_without_it():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with seeded(seed_of(1, 2)):
        torch.rand(5)
    assert torch.equal(torch.rand(3), expected)
