"""What a test of equality may not do: tolerate, retry, skip for want of evidence, expect to fail, or return a verdict.

Read from the sources of tests/consistency by ast, so that nothing has to run here. Each rule has sources that break it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "consistency"
SOURCES = sorted(FOLDER.glob("*.py"))

_UNITTEST = {"assertAlmostEqual"}
TOLERANT = {"allclose", "isclose", "assert_close", "assert_allclose", "assert_almost_equal", "approx"} | _UNITTEST
LENIENT = {"flaky", "rerun", "reruns", "skip", "skipif", "importorskip", "xfail", "SkipTest", "suppress", "warns"}
# One test compares with another program's arithmetic, so its error has a bound; it says so, and it is the only one.
EXEMPT = {("test_engine_events.py", "test_logprobs_agree_with_transformers_model")}


def problems(source: str, file: str = "test_some.py") -> Iterator[str]:
    """One line for each thing that a test of equality may not do."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in TOLERANT:
                yield f"{file}:{node.lineno}: {name}: equality has no tolerance"
            if name in LENIENT:
                yield f"{file}:{node.lineno}: {name}: a test of equality runs, once, and decides"
        elif isinstance(node, ast.alias) and node.name.rpartition(".")[2] in TOLERANT | LENIENT:
            yield f"{file}: import of {node.name}"
        elif isinstance(node, ast.keyword) and node.arg in ("atol", "rtol", "tol", "reruns", "abs_tol", "rel_tol"):
            yield f"{file}:{node.value.lineno}: {node.arg}: equality has no tolerance"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield from _of_test(node, file)


def _of_test(test: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> Iterator[str]:
    own = list(ast.walk(test))
    if any(isinstance(n, ast.Return | ast.Yield) and n.value is not None for n in own):
        yield f"{file}:{test.lineno}: {test.name} returns something: what a test returns nobody looks at"
    calls = [_called(n).lstrip("_") for n in own if isinstance(n, ast.Call)]
    decides = any(isinstance(n, ast.Assert) for n in own) or any(
        name.startswith(("assert", "check", "raises")) for name in calls
    )
    if not decides:
        yield f"{file}:{test.lineno}: {test.name} asserts nothing"
    if any(isinstance(n, ast.Try) for n in own):
        yield f"{file}:{test.lineno}: {test.name} catches exceptions: let them fail the test"
    if (file, test.name) not in EXEMPT and any(_bound(n) for n in own):
        yield f"{file}:{test.lineno}: {test.name} compares a difference with a bound: that is a tolerance by hand"


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _bound(node: ast.AST) -> bool:
    """abs(...) or .abs() within an order comparison."""
    if not isinstance(node, ast.Compare):
        return False
    ordered = any(isinstance(o, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for o in node.ops)
    return ordered and any(isinstance(n, ast.Call) and _called(n) == "abs" for n in ast.walk(node))


def test_sources_of_the_consistency_tests_are_found() -> None:
    assert {"conftest.py", "test_cells.py", "test_faults.py"} <= {path.name for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_consistency_test_decides_by_equality(path: Path) -> None:
    assert list(problems(path.read_text(encoding="utf-8"), path.name)) == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def test_a():\n assert torch.allclose(a, b)", "no tolerance"),
        ("def test_a():\n torch.testing.assert_close(a, b)", "no tolerance"),
        ("def test_a():\n assert a == pytest.approx(b)", "no tolerance"),
        ("from pytest import approx", "import of approx"),
        ("def test_a():\n assert same(a, b, atol=1e-3)", "no tolerance"),
        ("def test_a():\n assert (a - b).abs().max() < 1e-6", "by hand"),
        ("def test_a():\n assert abs(a - b) < 1e-6", "by hand"),
        ("@pytest.mark.flaky(reruns=3)\ndef test_a():\n assert a", "runs, once"),
        ("@pytest.mark.xfail\ndef test_a():\n assert a", "runs, once"),
        ("def test_a():\n if not logprobs:\n  pytest.skip('none')\n assert a", "runs, once"),
        ("torch = pytest.importorskip('torch')", "runs, once"),
        ("def test_a():\n return a == b", "returns something"),
        ("def test_a():\n compare(a, b)", "asserts nothing"),
        ("def test_a():\n try:\n  assert a\n except AssertionError:\n  pass", "catches"),
    ],
)
def test_each_leniency_is_found(source: str, says: str) -> None:
    assert any(says in problem for problem in problems(source))


def test_plain_equality_is_allowed() -> None:
    source = "def test_a():\n assert a == b\n with pytest.raises(ValueError):\n  f()\n assert len(a) > 0"
    assert list(problems(source)) == []
