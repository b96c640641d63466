"""A module imports, when it is loaded, only from the layers below it or from its own subpackage."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "eagle31_hf"
LAYERS = (
    {"json_file", "names", "seeding"},
    {"version", "starting", "configuration", "storage", "vocab"},
    {"attention", "checkpoints", "tying"},
    {"hub"},
    {"pretrained"},
    {"modeling"},
    {"features", "wrappers"},
    {"generation"},
    {"diagnostics"},
    {"training"},
    {"demo", "bench", "targets", "upgrade", "vllm_plugin"},
    {"cli"},
    {"__init__", "__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODEL_NEVER = ("transformers.generation", "transformers.trainer")
FORBIDDEN = {"attention": MODEL_NEVER, "modeling": MODEL_NEVER}


def imports(path: Path) -> set[str]:
    """Dotted names of what the module imports outside its functions, relative ones resolved."""
    names, parents = set(), ("eagle31_hf", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join((*parents[: len(parents) + 1 - node.level], node.module or "")) if node.level else node.module
            )
            names |= {f"{base}.{alias.name}".replace("..", ".") for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imports(path):
        assert not name.startswith(FORBIDDEN.get(module, ())), f"{module} imports {name}"
        first, *rest = name.split(".")
        if first == "eagle31_hf" and rest[0] != module:
            assert LEVEL[rest[0]] < LEVEL[module], f"{module} imports {rest[0]}, which is not below it"
