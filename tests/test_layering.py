"""A module imports, at its top or inside its functions, only from the layers below it or from its own subpackage."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "eagle31_hf"
LAYERS = (
    {"cache_names", "chat_template", "errors", "config_rules", "images", "json_file", "names", "printable", "seeding"},
    {"markdown", "version", "starting", "clock", "configuration", "storage", "vocab", "kernels", "web"},
    {"quantized"},
    {"acceptance", "attention", "cache", "checkpoints"},
    {"targets"},
    {"hub"},
    {"pretrained", "shared_target"},
    {"modeling"},
    {"generation"},
    {"diagnostics"},
    {"training"},
    {"demo", "bench", "checking", "upgrade", "vllm_plugin"},
    {"reports", "chat", "serving"},
    {"cli"},
    {"__init__", "__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODEL_NEVER = ("transformers.generation", "transformers.trainer")
FORBIDDEN = {"attention": MODEL_NEVER, "modeling": MODEL_NEVER}


def imports(path: Path) -> set[str]:
    """Returns the dotted names of what the module imports anywhere, relative ones resolved."""
    names, parents = set[str](), ("eagle31_hf", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) + 1 - node.level] if node.level else ()
            base = [*above, *filter(None, [node.module])]
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return names


def climbing(path: Path) -> set[str]:
    """Returns the rooms of this library from which the module imports, though they are not below it."""
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    others = {name.split(".")[1] for name in imports(path) if name.startswith("eagle31_hf.")} - {room}
    # a public name of the package itself comes from above
    return {other for other in others if LEVEL.get(other, len(LAYERS)) >= LEVEL[room]}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    name = str(path.relative_to(PACKAGE))
    assert climbing(path) == set()
    forbidden = FORBIDDEN.get(name.removesuffix(".py"), ())
    assert not [imported for imported in imports(path) if imported.startswith(forbidden or "nothing")]


def test_an_import_inside_a_function_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "modeling.py").write_text(
        "from .attention import GQAttention\n"
        "class Model:\n"
        "    def decode(self):\n"
        "        if True:\n"
        "            from .generation.decoding import decode_with\n"
        "        from . import hub, cli\n"
        "        from eagle31_hf import Eagle31DrafterModel\n"
        "        import eagle31_hf.training.store\n"
    )
    assert climbing(tmp_path / "modeling.py") == {"generation", "cli", "Eagle31DrafterModel", "training"}
