"""The modules that `import eagle31_hf` loads."""

import json
import subprocess
import sys

import pytest

from eagle31_hf.cache_names import IS_RENAMED

NEVER = ("triton", "datasets", "matplotlib", "bitsandbytes", "vllm")
SCRIPT = """
import json, sys
from transformers import PreTrainedModel
before = set(sys.modules)
import eagle31_hf
print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))
"""


@pytest.fixture(scope="module")
def loaded() -> tuple[list[str], list[str]]:
    """Returns the names of the modules loaded before the import, and by it."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    return tuple(json.loads(run.stdout.splitlines()[-1]))


def test_what_few_need_is_not_loaded(loaded):
    assert [name for name in loaded[1] if name.split(".")[0] in NEVER] == []
    assert "eagle31_hf.vllm_plugin" not in loaded[1]


def test_import_loads_few_modules(loaded):
    models = {name.split(".")[2] for name in loaded[1] if name.startswith("transformers.models.")}
    assert models <= {"auto", "llama", "phi3"}
    assert "transformers.trainer" not in loaded[1]
    # what generate() loads: from transformers 5.24 on making a mask does, too
    of_generate = ("transformers.generation", "tqdm", "psutil", "resource") if IS_RENAMED else ()
    others = [name for name in loaded[1] if not name.startswith(("eagle31_hf", *of_generate))]
    assert {name.split(".")[0] for name in others} <= {"transformers", "tokenizers", "torch"}
    assert len(others) <= 40, "besides this library's own, all of which are small"
