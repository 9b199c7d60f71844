"""The layers of docs/overview.md hold: a lower layer never imports a higher one, and two
layers on one line never import each other. Parsed from source, so a lazy import counts too."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "farcast"

LAYERS: list[set[str]] = [
    {"errors", "types"},
    {"config"},
    {"delta"},
    {"formats"},
    {"lineage"},
    {"store"},
    {"publish", "replica"},
    {"engines"},
    {"trajectory"},
    {"rollout", "train"},
    {"fleet"},
    {"gateway"},
    {"relay"},
    {"interop", "bench", "study"},
    {"dashboard"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PURE = ("delta", "formats", "lineage")
FORBIDDEN_IN_PURE = {"os", "time", "pathlib", "socket", "random", "datetime", "tempfile", "shutil"}
FORBIDDEN = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_imports_a_higher_layer(path: Path) -> None:
    own = layer_of(path)
    if own in ("__init__", "__main__"):
        return
    assert own in RANK, f"{own} is not a layer: give it a place in docs/overview.md"
    for name, line in imported(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] != "farcast" or len(parts) < 2 or parts[1] not in RANK or parts[1] == own:
            continue
        assert RANK[parts[1]] < RANK[own], f"{path.name}:{line}: {own} may not import {parts[1]}"


def test_every_layer_is_there_and_has_a_line_in_the_overview() -> None:
    there = {layer_of(path) for path in modules()} - {"__init__", "__main__"}
    assert set(RANK) == there
    table = (PACKAGE.parents[1] / "docs" / "overview.md").read_text().partition("## Folders")[2]
    told = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line[:30])}
    assert told == there


@pytest.mark.parametrize("layer", PURE)
def test_pure_layers_have_no_io_and_no_clock(layer: str) -> None:
    for path in sorted((PACKAGE / layer).rglob("*.py")):
        names = {name.split(".")[0] for name, _ in imported(ast.parse(path.read_text()))}
        assert not names & FORBIDDEN_IN_PURE, f"{path}: {names & FORBIDDEN_IN_PURE}"


def test_nothing_is_ever_unpickled() -> None:
    for path in modules():
        tree = ast.parse(path.read_text())
        names = {name.split(".")[0] for name, _ in imported(tree)}
        assert not names & FORBIDDEN, f"{path}: {names & FORBIDDEN}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}, (
                    path
                )
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path


def test_functions_fit_a_screen() -> None:
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert lengths[int(len(lengths) * 0.9)] < 40
    assert lengths[-1] <= 90
