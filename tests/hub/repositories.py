"""Repositories for the tests' Hub: a drafter as the first release names things, and a config that points to one."""

import json

from safetensors.torch import save

from eagle31_hf import Eagle31DrafterModel

REPO, BASE = "tester/drafter", "yuhuili/eagle3"


def original_release(drafter: Eagle31DrafterModel) -> dict[str, bytes]:
    """Returns the files of a drafter as the first EAGLE 3 code names things, config and all, sharded in two."""
    config = drafter.config
    names = (
        "vocab_size",
        "draft_vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    )
    names += ("head_dim", "rms_norm_eps", "max_position_embeddings")
    values = {name: getattr(config, name) for name in names}
    values |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
    }
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in drafter.state_dict().items()}
    shards = {
        "model-00001-of-00002.safetensors": sorted(tensors)[:5],
        "model-00002-of-00002.safetensors": sorted(tensors)[5:],
    }
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    files = {shard: save({name: tensors[name] for name in held}) for shard, held in shards.items()}
    return files | {
        "config.json": json.dumps(values).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
    }


def pointing(**fields) -> bytes:
    link = {"repo_id": BASE, "revision": "main"}
    return json.dumps({"model_type": "eagle31", "weights_from": link, "target_model": "org/target"} | fields).encode()
