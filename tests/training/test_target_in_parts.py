"""A target that does not fit: two processes read their parts of it, and run it, in less memory than it has weights."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle31_hf.targets.layers import target_states

SCRIPT = Path(__file__).with_name("target_in_parts.py")
LAYERS, IDS = [1, 5, 9], [1, 2, 3, 5, 8, 13, 21, 34]
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8}


def test_two_processes_run_what_neither_has_room_for(tmp_path):
    """A checkpoint in bf16 that is read in fp32: whole, its 269 MB are memory of the process, and no file's."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **SIZES)).bfloat16()
    target.save_pretrained(tmp_path)
    target = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = [*launcher, SCRIPT, tmp_path, json.dumps(LAYERS), json.dumps(IDS)]
    ran = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    size = sum(weight.nbytes for weight in target.parameters())
    expected, _ = target_states(target, torch.tensor([IDS]), LAYERS)
    for found in json.loads(ran.stdout.splitlines()[-1]):
        for way in ("parts", "whole"):
            torch.testing.assert_close(torch.tensor(found[way]["state"]), expected[0, -1])
        assert found["parts"]["peak"] < 0.8 * size
        assert found["whole"]["peak"] > 0.95 * size
