"""What is asked of generate besides callbacks: how to draft, caches, prompts, choices of tokens, outputs; tables, the
usual entry first.

An entry's builder takes a `callbacks.Setting` and returns keyword arguments for `generate`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig, StaticCache

from .callbacks import PROCESSORS, STOPS, STREAMERS, Setting
from .models import ATTENTIONS, FAMILIES, WRAPPERS, conftest

LONGEST = 100  # tokens a sequence may come to have


def text_config(setting: Setting):
    return setting.target.config.get_text_config(decoder=True)


def held(setting: Setting, past: Cache) -> dict[str, Cache]:
    """The cache, into which an earlier turn has read a beginning of the one prompt there is."""
    ids = setting.given["input_ids"]
    if count := int(ids.sum()) % ids.shape[1]:  # the same however much was drawn before
        setting.target.generate(ids[:, :count], past_key_values=past, max_new_tokens=1, do_sample=False)
    return {"past_key_values": past}


DRAFTINGS = {
    "auto": lambda setting: {},
    "chain": lambda setting: {"num_assistant_tokens": setting.rng.randrange(1, 9)},
    "chain, doubting": lambda setting: {
        "num_assistant_tokens": setting.rng.randrange(2, 9),
        "assistant_confidence_threshold": 0.5,
    },
    "tree": lambda setting: {
        "num_assistant_tokens": setting.rng.randrange(1, 7),
        "draft_tree_top_k": setting.rng.randrange(2, 5),
        "draft_tree_total_tokens": setting.rng.randrange(2, 28),
    },
    "auto, chains": lambda setting: {"draft_tree_top_k": 1},
    "auto, small": lambda setting: {"draft_tree_total_tokens": setting.rng.randrange(2, 12)},
}
CACHES = {
    "default": lambda setting: {},
    "static": lambda setting: {"cache_implementation": "static"},
    "chunks": lambda setting: {"prefill_chunk_size": setting.rng.randrange(1, 6)},
    "own": lambda setting: {"past_key_values": DynamicCache(config=text_config(setting))},
    "own, no config": lambda setting: {"past_key_values": DynamicCache()},
    "own, static": lambda setting: {"past_key_values": StaticCache(config=text_config(setting), max_cache_len=LONGEST)},
    "conversation": lambda setting: {"past_key_values": DynamicCache(config=text_config(setting))},
    "conversation, static": lambda setting: {
        "past_key_values": StaticCache(config=text_config(setting), max_cache_len=LONGEST)
    },
    "conversation, chunks": lambda setting: {
        "past_key_values": DynamicCache(config=text_config(setting)),
        "prefill_chunk_size": setting.rng.randrange(1, 6),
    },
    "conversation, dict": lambda setting: {"return_dict_in_generate": True},
    "held": lambda setting: held(setting, DynamicCache(config=text_config(setting))),
    "held, static": lambda setting: held(setting, StaticCache(config=text_config(setting), max_cache_len=LONGEST)),
}
CHOICES = {
    "greedy": lambda setting: {"do_sample": False},
    "sampled": lambda setting: {"do_sample": True},
    "few": lambda setting: {"do_sample": True, "top_k": 3, "temperature": 0.7},
    "nucleus": lambda setting: {"do_sample": True, "top_p": 0.8, "min_p": 0.01},
    "returned twice": lambda setting: {"do_sample": True, "num_return_sequences": 2},
}
DICT = {"return_dict_in_generate": True}
OUTPUTS = {
    "ids": lambda setting: {},
    "dict": lambda setting: DICT,
    "scores": lambda setting: DICT | {"output_scores": True},
    "logits": lambda setting: DICT | {"output_logits": True},
    "states": lambda setting: DICT | {"output_hidden_states": True},
    "attentions": lambda setting: DICT | {"output_attentions": True},
    "everything": lambda setting: (
        DICT | {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}
    ),
}
EXTRAS = {
    "none": lambda setting: {},
    "config object": lambda setting: {},  # the same wishes in a GenerationConfig
    "decode": lambda setting: {},  # custom_generate=drafter.decode
    "logits kept": lambda setting: {"logits_to_keep": setting.rng.randrange(3)},
    "no cache": lambda setting: {"use_cache": False},
}
AXES: dict[str, Any] = {
    "family": FAMILIES,
    "attention": ATTENTIONS,
    "wrapper": WRAPPERS,
    "drafter": conftest.DRAFTERS,
    "drafter attention": ATTENTIONS,
    "drafting": DRAFTINGS,
    "cache": CACHES,
    "choice": CHOICES,
    "processors": PROCESSORS,
    "stop": STOPS,
    "streamer": STREAMERS,
    "outputs": OUTPUTS,
    "extra": EXTRAS,
}
SELDOM = {  # what takes seconds, or has one outcome
    "wrapper": ("compiled", "compiled in place", "compiled forward"), "extra": ("no cache",),
}  # fmt: skip
UNDRAWN = {"cache": ("held", "held, static")}  # for one prompt, which draws do not see to
OF_CALLS = {name: AXES[name] for name in ("cache", "choice", "processors", "stop", "streamer", "outputs", "extra")}


def prompts(setting: Setting, known: Tensor) -> dict[str, Tensor]:
    """As many as `setting.batch`, left-padded: beginnings of the text the drafter knows (1, L), or anything."""
    rng = setting.rng
    texts = []
    for _ in range(setting.batch):
        length = rng.randrange(1, 14)
        is_known = rng.random() < 0.7
        texts.append(known[0, : length + 4].tolist() if is_known else [setting.token() for _ in range(length)])
    longest = max(map(len, texts))
    ids = torch.tensor([[setting.token()] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids} | ({"attention_mask": mask} if setting.batch > 1 or rng.random() < 0.5 else {})


def as_object(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same, with what a GenerationConfig may hold in one."""
    fields = set(GenerationConfig().to_dict())
    return {name: value for name, value in kwargs.items() if name not in fields} | {
        "generation_config": GenerationConfig(**{name: value for name, value in kwargs.items() if name in fields})
    }
