"""No file of a finished run can change, go, or come without the verdict turning red; where it lies does not matter.

The bit that flips is the lowest of the first, the middle and the last byte: a header, a value, a closing brace or
newline. The same flips are made once more under a fresh seal, where only the content can tell: there the verdict may
be either, but it must be one, not a traceback.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from rlk.evidence import layout
from rlk.evidence.errors import EvidenceError
from rlk.evidence.seal import seal
from rlk.evidence.validate import validate
from tests.unit.evidence_builder import build, make_plan, red

PLAN = make_plan()
FILES = sorted({*layout.sealed_files(PLAN.config.steps, PLAN.engines, PLAN.ranks), layout.SUMS})
CONTENT = [name for name in FILES if name not in (layout.SUMS, layout.LOG)]
everyfile = pytest.mark.parametrize("name", FILES)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir, validation = build(tmp_path_factory.mktemp("runs"))
    assert validation.passed
    return run_dir


@pytest.fixture
def copied(sealed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sealed, tmp_path / "elsewhere" / "under another name"))


def _flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def _seal_again(run_dir: Path) -> None:
    (run_dir / layout.SUMS).unlink()
    seal(run_dir)


def _state(run_dir: Path) -> dict[str, str]:
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    return {str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_copied_directory_has_the_same_verdict(sealed: Path, copied: Path) -> None:
    assert validate(copied) == validate(sealed)
    assert validate(copied).passed


def test_failed_run_has_the_same_verdict_when_copied(tmp_path: Path) -> None:
    run_dir, _ = build(tmp_path, disk=lambda run: (run / "steps/000001/batch.safetensors").unlink())
    other = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    assert validate(other) == validate(run_dir)
    assert str(tmp_path) not in validate(run_dir).to_json()


def test_validation_writes_nothing_anywhere(sealed: Path) -> None:
    before = _state(sealed.parent)
    validate(sealed)
    assert _state(sealed.parent) == before


@everyfile
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_flipped_bit_in_any_file_is_red(name: str, place: float, copied: Path) -> None:
    path = copied / name
    _flip(path, int(place * (path.stat().st_size - 1)))
    validation = validate(copied)
    assert not validation.passed
    assert "seal" in red(validation)


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("bit", [0, 6])
def test_flips_under_a_fresh_seal_never_raise(name: str, bit: int, copied: Path) -> None:
    path = copied / name
    original = path.read_bytes()
    for quarter in range(5):
        _flip(path, quarter * (len(original) - 1) // 4, bit)
        _seal_again(copied)
        validation = validate(copied)
        assert "seal" not in red(validation)
        assert validation.passed == (not validation.errors)
        path.write_bytes(original)


@everyfile
def test_removed_file_is_red_by_name(name: str, copied: Path) -> None:
    (copied / name).unlink()
    validation = validate(copied)
    assert "seal" in red(validation)
    assert name in validation.check("seal").message


@everyfile
def test_file_shorter_by_a_byte_is_red(name: str, copied: Path) -> None:
    path = copied / name
    path.write_bytes(path.read_bytes()[:-1])
    assert "seal" in red(validate(copied))


@pytest.mark.parametrize("name", CONTENT)
def test_half_a_file_is_red_under_a_fresh_seal(name: str, copied: Path) -> None:
    path = copied / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _seal_again(copied)
    validation = validate(copied)
    assert "seal" not in red(validation)
    assert not validation.passed


@pytest.mark.parametrize("name", ["notes.txt", "steps/000000/rollout-02.safetensors", ".hidden"])
def test_added_file_is_red_by_name(name: str, copied: Path) -> None:
    (copied / name).write_bytes(b"new")
    validation = validate(copied)
    assert {"seal", "files"} <= red(validation)
    assert f"{name}: added since the seal" in validation.check("seal").message


@pytest.mark.parametrize("word", ["0" * 64, "f" * 64])
def test_file_with_another_hash_in_the_seal_is_red_by_name(word: str, copied: Path) -> None:
    lines = (copied / layout.SUMS).read_text().splitlines()
    lines[3] = f"{word}{lines[3][64:]}"
    (copied / layout.SUMS).write_text("".join(f"{line}\n" for line in lines))
    check = validate(copied).check("seal")
    assert check.failures == 1
    assert check.message.startswith(f"{lines[3][66:]}: changed since the seal")
    assert check.failure is not None
    assert check.failure.where == lines[3][66:]


def test_link_in_the_place_of_a_file_is_red(copied: Path, sealed: Path) -> None:
    (copied / layout.METRICS).unlink()
    (copied / layout.METRICS).symlink_to(sealed / layout.METRICS)
    assert "seal" in red(validate(copied))


def test_stored_verdict_must_be_the_one_of_the_record(copied: Path) -> None:
    path = copied / layout.VALIDATION
    path.write_text(path.read_text().replace('"tokens_compared": 36', '"tokens_compared": 37'))
    _seal_again(copied)
    validation = validate(copied)
    assert red(validation) == {"verdict"}
    assert "tokens_compared differ" in validation.check("verdict").message


def test_stored_verdict_cannot_be_turned_green(tmp_path: Path) -> None:
    run_dir, validation = build(tmp_path, disk=lambda run: (run / "run.log").unlink())
    assert red(validation) == {"files"}
    path = run_dir / layout.VALIDATION
    path.write_text(path.read_text().replace('"passed": false', '"passed": true'))
    _seal_again(run_dir)
    assert red(validate(run_dir)) == {"files", "verdict"}


def test_seal_that_cannot_be_read_is_red_without_a_path(copied: Path) -> None:
    (copied / layout.SUMS).unlink()
    (copied / layout.SUMS).mkdir()
    check = validate(copied).check("seal")
    assert not check.passed
    assert check.message.startswith("cannot be read: Is a directory")
    assert str(copied) not in check.message


def test_unsealed_run_is_red(copied: Path) -> None:
    (copied / layout.SUMS).unlink()
    assert validate(copied).check("seal").message.startswith("SHA256SUMS: missing, the run was not finished")


def test_missing_directory_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"^nothing: there is no such run directory$"):
        validate(tmp_path / "nothing")


def test_empty_directory_is_red_in_every_check(tmp_path: Path) -> None:
    validation = validate(tmp_path)
    assert not validation.passed
    assert not any(check.passed for check in validation.checks)
    assert (validation.steps, validation.tokens_compared, validation.digest) == (0, 0, None)


def test_sums_are_what_coreutils_would_write(sealed: Path) -> None:
    expected = [f"{digest}  {name}" for name, digest in sorted(_state(sealed).items()) if name != layout.SUMS]
    assert (sealed / layout.SUMS).read_text().splitlines() == expected


def test_stored_verdict_may_be_worded_otherwise(copied: Path) -> None:
    path = copied / layout.VALIDATION
    path.write_text(path.read_text().replace("6 schemas", "six schemas"))
    _seal_again(copied)
    assert validate(copied).passed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"count": 36', '"count": 35'),
        ('"name": "files"', '"name": "file"'),
        ('"rlk.validation/1"', '"rlk.validation/2"'),
    ],
    ids=["count", "name", "schema"],
)
def test_stored_verdict_with_another_fact_is_red(old: str, new: str, copied: Path) -> None:
    path = copied / layout.VALIDATION
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    _seal_again(copied)
    assert red(validate(copied)) == {"verdict"}
