"""What holds the project's tools together: one set of pins, markers that name modules there are, workflows that only
call the scripts."""

import ast
import re
from pathlib import Path

import close
import conftest
import pytest
import yaml
from packaging.requirements import Requirement
from tolerances import compares_numbers

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and later")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def pins(requirements) -> dict[str, str]:
    """The packages that are required in exactly one version, and which."""
    found = {(each := Requirement(text)).name: str(each.specifier) for text in requirements}
    return {name: version for name, version in found.items() if version.startswith("==")}


def test_hooks_lint_with_the_releases_of_ci():
    of_project = pins(PROJECT["optional-dependencies"]["dev"])
    of_hooks = pins(text for hook in HOOKS for text in hook.get("additional_dependencies", ()))
    assert of_hooks["ruff"] == of_project["ruff"]
    assert [hook["entry"] for hook in HOOKS if hook["id"] == "mypy"] == [".venv/bin/mypy"]  # that of .ci/setup dev


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_only_run_the_stages(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["concurrency"]["cancel-in-progress"] is True
    stages = re.findall(r"^(\w+)\(\) \($", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    for job in workflow["jobs"].values():
        assert [row["stage"] for row in job["strategy"]["matrix"]["include"]] == stages
        assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run ${{ matrix.stage }}"]


def imported_modules(path: Path) -> set[str]:
    """Last names of the modules a file imports, and of what it imports from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.rpartition(".")[2] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").rpartition(".")[2], *(alias.name for alias in node.names)}
    return found


def test_what_tests_share_is_in_modules_without_tests():
    paths = sorted(Path(__file__).parent.rglob("*.py"))
    modules = {path.stem for path in paths if path.name.startswith("test_")}
    shared = {path.name: both for path in paths if (both := imported_modules(path) & modules)}
    assert not shared


def test_marked_modules_are_there():
    modules = {path.stem for path in Path(__file__).parent.rglob("test_*.py")}
    assert modules >= conftest.QUICK | conftest.SLOW
    assert conftest.QUICK.isdisjoint(conftest.SLOW)


def within(x):
    close.assert_close("x", x, x, close.FORWARD)


def by_a_helper(each):
    return [within(x) for x in each]


def exactly(x):
    close.assert_close("x", x, x)


def test_tests_that_compare_within_a_tolerance_are_told_from_others():
    assert [compares_numbers(each) for each in (within, by_a_helper, exactly)] == [True, True, False]


def test_types_are_published_with_the_package():
    assert (ROOT / "eagle31_hf" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]
