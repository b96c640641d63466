"""Decodes by a grammar, that of a JSON schema, with the libraries that people use for it: is the text that of the
target alone, and how much of the drafts is accepted? Beside it texts of the same prompts without a grammar.

    pip install --no-deps xgrammar apache-tvm-ffi lm-format-enforcer interegular
    PYTHONPATH=. python tests/peers/grammars.py --target HuggingFaceTB/SmolLM2-135M-Instruct \
        --drafter model_cards/SmolLM2-135M-Instruct-eagle31

LM Format Enforcer 0.11 imports `transformers.tokenization_utils`, which transformers 5 lacks: where that is so, the
name is lent to it. On stdout: a JSON object of accepted lengths, tokens a target forward, by grammar and way of
drafting, "texts that differ", and the versions. "drafts masked": what if the drafter asked the function of LM Format
Enforcer, too? This library does not have it do so: in a string the function lists nearly all of 49,152 tokens, which
takes 10 ms for every draft.
"""

import argparse
import json
import sys
import types
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PrefixConstrainedLogitsProcessor

from eagle31_hf import Eagle31DrafterModel, track_acceptance
from eagle31_hf.generation import processors

SUBJECTS = ("a person", "a baker", "a sailor of long ago", "a doctor in a small town", "a student of music")
PROMPT = "Describe {} as JSON with name, age, city and hobbies."
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
HOBBIES = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 4}
FIELDS = {"name": TEXT, "age": NUMBER, "city": TEXT, "hobbies": HOBBIES}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
WAYS = {
    "chain of 3": {"num_assistant_tokens": 3},
    "tree of 12, 4 deep": {"num_assistant_tokens": 4, "draft_tree_top_k": 3, "draft_tree_total_tokens": 12},
}


def xgrammar_of(tokenizer: Any, vocab_size: int) -> Any:
    """Returns a function of the arguments of one call: xgrammar's processors keep a text's state."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    return lambda: {"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(grammar)]}


def enforcer_of(tokenizer: Any, vocab_size: int) -> Any:
    """Returns a function of the arguments of one call."""
    if "transformers.tokenization_utils" not in sys.modules:
        lent = types.ModuleType("transformers.tokenization_utils")
        lent.PreTrainedTokenizerBase = transformers.PreTrainedTokenizerBase  # type: ignore[attr-defined]
        sys.modules[lent.__name__] = lent
    from lmformatenforcer import JsonSchemaParser
    from lmformatenforcer.integrations import transformers as integration

    known = integration.build_token_enforcer_tokenizer_data(tokenizer, vocab_size=vocab_size)
    build = integration.build_transformers_prefix_allowed_tokens_fn
    return lambda: {"prefix_allowed_tokens_fn": build(known, JsonSchemaParser(SCHEMA))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub repository of a chat model")
    parser.add_argument("--drafter", required=True, help="folder or Hub repository of a drafter for it")
    parser.add_argument("--max-new-tokens", type=int, default=80, help="(default: 80)")
    args = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    drafter = Eagle31DrafterModel.from_pretrained(args.drafter, dtype=torch.float32)
    grammars = {"no grammar": dict, "xgrammar": xgrammar_of(tokenizer, target.config.vocab_size)}
    grammars["LM Format Enforcer"] = enforcer_of(tokenizer, target.config.vocab_size)
    grammars["LM Format Enforcer, drafts masked"] = grammars["LM Format Enforcer"]
    chats = [[{"role": "user", "content": PROMPT.format(subject)}] for subject in SUBJECTS]
    asked = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompts = [tokenizer.apply_chat_template(chat, **asked) for chat in chats]
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    shown = (*processors.DRAFT_PROCESSORS, PrefixConstrainedLogitsProcessor)
    found: dict[str, Any] = {}
    for name, new in grammars.items():
        kinds = shown if name.endswith("masked") else processors.DRAFT_PROCESSORS
        texts = [target.generate(**prompt, **options, **new()).tolist() for prompt in prompts]
        found[name] = {"texts that differ": 0}
        for way, knobs in WAYS.items():
            with patch.object(processors, "DRAFT_PROCESSORS", kinds), track_acceptance() as stats:
                drafted = [
                    target.generate(**prompt, **options, **new(), **knobs, assistant_model=drafter).tolist()
                    for prompt in prompts
                ]
            found[name][way] = round(stats.mean_accepted_length, 2)
            found[name]["texts that differ"] += sum(one != other for one, other in zip(texts, drafted, strict=True))
    packages = ("torch", "transformers", "xgrammar", "lm-format-enforcer")
    print(json.dumps(found | {"versions": {name: version(name) for name in packages}}, indent=1))


if __name__ == "__main__":
    main()
