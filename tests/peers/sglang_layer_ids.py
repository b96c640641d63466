"""Layer ids of exports for SGLang, beside SGLang's own code: do its target models capture the layers a drafter reads?

    pip download --no-deps sglang==0.5.23
    python tests/peers/sglang_layer_ids.py sglang-0.5.23-*.whl

SGLang needs a GPU, its `set_eagle3_layers_to_capture` does not: each model's is taken from the wheel's text and run on
an object in place of the model. Prints a line for each, and exits with 1 where one would capture other layers.
"""

import argparse
import ast
import sys
import zipfile
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Optional
from unittest.mock import MagicMock

from eagle31_hf import Eagle31Config
from eagle31_hf.checkpoints import engine_config

METHOD = "set_eagle3_layers_to_capture"
LISTS = ([2, 18, 33], [3, 18, 34], [24, 30, 36])
LAYERS = 36


def methods(wheel: str) -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """Yields file, class and method of every target model in a wheel that is told layer ids."""
    with zipfile.ZipFile(wheel) as archive:
        for file in sorted(name for name in archive.namelist() if "/srt/models/" in name and name.endswith(".py")):
            for node in ast.walk(ast.parse(archive.read(file))):
                if isinstance(node, ast.ClassDef):
                    for item in node.body:
                        is_told = isinstance(item, ast.FunctionDef) and item.name == METHOD
                        if is_told and item.args.args[1].arg == "layer_ids":
                            yield PurePath(file).stem, node.name, item


def captured(method: ast.FunctionDef, ids: list[int]) -> list[int]:
    """Runs a method, and returns the layers that it marks, at whose entry SGLang captures; where it hands the ids on to
    a model within, the ids."""
    groups = ("get_parallel", "get_pp_group")  # of processes: all of a mock says that this one is the last
    names: dict[str, Any] = {"Optional": Optional, "List": list, **{name: MagicMock() for name in groups}}
    exec(compile(ast.Module([method], []), METHOD, "exec"), names)
    inner, config = MagicMock(), MagicMock(num_hidden_layers=LAYERS)
    names[METHOD](MagicMock(model=inner, language_model=inner, config=config), ids)
    handed_on = getattr(inner, METHOD).call_args
    return handed_on.args[0] if handed_on else inner.layers_to_capture


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel")
    wrong = 0
    for file, name, method in methods(parser.parse_args().wheel):
        said = []
        for ids in LISTS:
            config = Eagle31Config(target_hidden_size=64, hidden_size=64, aux_hidden_state_layer_ids=ids)
            # the file's name serves as model_type: those of DeepSeek's classes begin as theirs do
            written = engine_config(config, "sglang", file)["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
            found = captured(method, written)
            is_right = found == (written if f"{METHOD}(layer_ids)" in ast.unparse(method) else ids)
            said.append("right" if is_right else f"{found} for {ids}")
            wrong += not is_right
        print(f"{file} {name}: {', '.join(said)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
