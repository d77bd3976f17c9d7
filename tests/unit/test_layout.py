"""The shape of the source tree: imports go down one list, the environment is read in one place, names keep apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "slipstream"
ORDER = [
    *("cli", "server", "planner", "engine", "speculation", "parallel", "loading", "text", "models", "layers"),
    *("sampling", "cache", "devices", "kernels", "ops", "core"),
]
FILES = sorted(SOURCE.rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import of our own, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            names = [node.module or ""]
            if node.module == "slipstream":
                names = [f"slipstream.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("slipstream."):
                yield node.lineno, name


def package(name: str) -> str:
    return name.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_the_list(path: Path) -> None:
    parts = path.relative_to(SOURCE).parts
    if len(parts) == 1:
        return
    assert parts[0] in ORDER, f"{parts[0]} has no place in the order of packages"
    for line, name in imported(path):
        if package(name) not in ORDER:
            continue
        assert ORDER.index(package(name)) >= ORDER.index(parts[0]), f"{path}:{line}: {parts[0]} must not import {name}"


def test_the_check_sees_an_import_that_goes_up(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def f():\n    from slipstream.engine.core import Engine\n    import slipstream.cli.main\n")
    assert list(imported(file)) == [(2, "slipstream.engine.core"), (3, "slipstream.cli.main")]


def test_model_files_know_no_chip_no_cache_layout_and_no_plan() -> None:
    for path in (SOURCE / "models").glob("*.py"):
        for line, name in imported(path):
            assert package(name) in ("models", "layers", "ops", "core") or name == "slipstream.cache.spec", (path, line)


def test_core_needs_numpy_at_most() -> None:
    for path in (SOURCE / "core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"torch", "tokenizers", "jinja2", "typer", "rich"}, path
