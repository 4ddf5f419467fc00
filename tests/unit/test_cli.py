"""The command line from outside: exit codes, what goes to which stream, and that planning imports nothing heavy.

The driver is replaced by a stand-in: what is tested here ends where a run begins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

from rlk.cli import main
from rlk.plan.derive import Plan
from tests.unit.tiny import write_profile

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "ray", "numpy", "transformers")
KEYS = ["passed", "run_dir", "steps", "tokens_compared", "mismatching_tokens", "digest", "seconds", "errors"]


@dataclass(frozen=True)
class Outcome:
    passed: bool
    run_dir: str
    steps: int = 2
    tokens_compared: int = 640
    mismatching_tokens: int = 0
    digest: str = "ab" * 32
    seconds: float = 1.5
    errors: tuple[str, ...] = ()


Execute = Callable[..., Outcome]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a test profile, which may run a dirty checkout, without RLK_ variables, as the current one."""
    write_profile(tmp_path, test=True)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RLK_") or name == "RAY_ADDRESS"]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def plans(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that reached the driver, which writes to both streams and passes."""
    seen: list[Plan] = []

    def execute(plan: Plan, *, verify: bool, out: TextIO) -> Outcome:
        assert verify == (plan.config.command == "verify")
        seen.append(plan)
        print("a line from Python", file=out)
        print("a print")  # noqa: T201 - libraries print
        os.write(1, b"a line from C\n")
        return Outcome(True, f"{plan.config.output_root}/{plan.run_id}")

    drive(monkeypatch, execute)
    return seen


def drive(monkeypatch: pytest.MonkeyPatch, execute: Execute) -> None:
    module = types.ModuleType("rlk.driver.run")
    module.execute = execute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlk.driver.run", module)


def test_plan_imports_nothing_heavy(home: Path) -> None:
    code = f"""
import sys
from rlk.cli import main
assert main(["plan", "--tp", "2", "--rollout-tp", "4"]) == 0
assert main(["plan", "--json"]) == 0
assert main(["verify", "--top-p", "7"]) == 2
heavy = sorted(set({HEAVY!r}) & set(sys.modules))
assert not heavy, heavy
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_plan_shows_every_derived_value(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--tp", "2", "--rollout-tp", "4", "--temperature", "0.7", "--top-p", "0.95"]) == 0
    text = capsys.readouterr().out
    for expected in (
        "tp2_rtp4-cp4-t0.7-p0.95-koff",
        "8 ranks = TP 2 x CP 4",
        "2 engines of 4 = TP 4 x CP 1",
        "T 0.7, top-p 0.95, top-k off",
        "256 a rank and micro-batch, 1024 over CP",
        "400 real, 1024 padded",
        "OMP_NUM_THREADS",
        "rlk verify --mode consistency --tp 2 --cp 4",
        "5e-07  (default)",
    ):
        assert expected in text


def test_plan_as_json_is_the_plan(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run", "--json", "--steps", "5"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert (plan.config.command, plan.config.steps) == ("run", 5)


def test_plan_is_the_same_in_every_process(home: Path) -> None:
    texts = set()
    for seed in ("0", "1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed}
        command = [sys.executable, "-m", "rlk", "plan", "--json", "--mix", "0.7,0"]
        texts.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(texts) == 1


def test_expanded_command_gives_the_same_plan(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--tp", "2", "--mix", "0.7/0.95,0"]) == 0
    first = Plan.from_json(capsys.readouterr().out)
    assert main(["plan", *first.commands[0].split()[2:]]) == 0
    capsys.readouterr()
    assert main(["plan", *first.commands[0].split()[2:], "--json"]) == 0
    again = Plan.from_json(capsys.readouterr().out)
    assert again.effective() == first.effective()
    assert again.commands == first.commands


@pytest.mark.parametrize("command", [["plan"], ["verify"], ["run"]])
def test_every_wrong_word_is_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("RLK_SEED", "-1")
    assert main([*command, "--tp", "3", "--topp", "0.9", "--nonsense=1", "stray", "--rollout-top-k", "401"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(":")[0] for line in captured.err.splitlines()] == [
        "--topp",
        "--nonsense",
        "stray",
        "--tp 3",
        "RLK_SEED=-1",
        "--rollout-top-k 401",
    ]


@pytest.mark.parametrize(
    "words", [["verify", "--tp"], ["fly"], ["validate"], ["validate", "a", "b"], ["validate", "--tp", "2", "a"]]
)
def test_wrong_usage_is_one_line_and_two(home: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_profile_and_option_errors_come_together(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", "nowhere.json", "--tp", "3"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "nowhere.json: No such file" in first
    assert second == "--tp 3: allowed is 1, 2, 4 or 8"


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["verify", "--help"], ["validate", "--help"]])
def test_help_is_a_pass(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 0
    assert "Usage: rlk" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["verify", "run"])
def test_rollout_context_parallelism_is_run(plans: list[Plan], command: str) -> None:
    assert main([command, "--rollout-cp", "2"]) == 0
    assert [plan.rollout.cp for plan in plans] == [2]


def test_json_is_one_object_on_standard_output(plans: list[Plan], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--json", "--run-id", "one"]) == 0
    captured = capfd.readouterr()
    assert captured.out.count("\n") == 1
    assert list(json.loads(captured.out)) == KEYS
    for line in ("a line from Python", "a print", "a line from C"):
        assert line in captured.err
    assert main(["verify", "--run-id", "two"]) == 0
    captured = capfd.readouterr()
    assert "a line from C" in captured.out
    assert "PASS  2 steps, 640 tokens compared, 0 mismatching" in captured.out


def test_failed_run_exits_with_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drive(monkeypatch, lambda plan, verify, out: Outcome(False, "x", mismatching_tokens=3, errors=("step 0: no",)))
    assert main(["verify"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("step 0: no\nFAIL  2 steps, 640 tokens compared, 3 mismatching")
    assert main(["verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["errors"] == ["step 0: no"]


def test_refusal_as_json_is_the_same_object(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--json", "--tp", "3"]) == 2
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert list(result) == KEYS
    assert (result["passed"], result["errors"]) == (False, ["--tp 3: allowed is 1, 2, 4 or 8"])
    assert captured.err == "--tp 3: allowed is 1, 2, 4 or 8\n"


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("two\nlines"), 1), (KeyboardInterrupt(), 130)])
def test_nothing_ends_in_a_traceback(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def execute(plan: Plan, verify: bool, out: TextIO) -> Outcome:
        raise error

    drive(monkeypatch, execute)
    monkeypatch.setattr("tempfile.tempdir", str(home))
    assert main(["verify"]) == code
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line)
    assert line.startswith("internal error" if code == 1 else "interrupted")
    if code == 1:
        assert line.startswith("internal error: RuntimeError: two lines: traceback in ")
        assert "raise error" in Path(line.rsplit(" ", 1)[1]).read_text()


def test_run_ids_are_new_and_say_the_cell(plans: list[Plan]) -> None:
    assert main(["verify", "--tp", "2"]) == 0
    assert main(["verify", "--tp", "2"]) == 0
    first, second = (plan.run_id for plan in plans)
    assert first != second
    date, clock, cell = first.split("-", 2)
    assert (len(date), len(clock)) == (8, 6)
    assert cell[:-5] == "tp2_rtp1-cp4-t1-poff-koff"


def test_run_id_is_never_reused(plans: list[Plan], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "runs" / "old").mkdir(parents=True)
    assert main(["verify", "--run-id", "old"]) == 2
    assert capsys.readouterr().err.startswith("--run-id old: runs/old exists")
    assert plans == []


@pytest.mark.parametrize("words", [["verify"], ["run", "--detach"]])
def test_refused_run_leaves_nothing(
    plans: list[Plan],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    before = sorted(home.rglob("*"))
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("RAY_ADDRESS=10.0.0.1:6379: ")
    assert plans == []
    assert sorted(home.rglob("*")) == before


def test_detached_command_runs_in_its_own_session(
    plans: list[Plan], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = home / "child"
    child.write_text('#!/bin/sh\necho "$@"\nps -o sid= -p $$\necho "detach=$RLK_DETACH"\n')
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    monkeypatch.setenv("RLK_DETACH", "1")
    assert main(["verify", "--tp", "2", "--rollout-top-p", "0.9"]) == 0
    words = capsys.readouterr().out.splitlines()
    run_id, pid = words[0].split()[-1], words[1].split()[-1]
    assert words[2].endswith(f"tail -f runs/{run_id}.launch.log")
    assert words[3].endswith(f"rlk validate runs/{run_id}")
    lines = wait_for(home / "runs" / f"{run_id}.launch.log", 3)
    assert lines[0] == f"-m rlk verify --tp 2 --rollout-top-p 0.9 --run-id {run_id}"
    assert lines[1].strip() == pid
    assert lines[2] == "detach="
    assert plans == []


def wait_for(path: Path, count: int) -> list[str]:
    for _ in range(200):
        lines = path.read_text().splitlines()
        if len(lines) >= count:
            return lines
        time.sleep(0.05)
    raise AssertionError(f"{path} has fewer than {count} lines after 10 s: {lines}")


def test_detached_log_is_never_overwritten(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "runs").mkdir()
    (home / "runs" / "one.launch.log").write_text("kept")
    assert main(["verify", "--detach", "--run-id", "one"]) == 2
    assert "--detach: runs/one.launch.log: File exists" in capsys.readouterr().err
    assert (home / "runs" / "one.launch.log").read_text() == "kept"


def test_folder_without_evidence_is_no_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (home, home / "missing"):
        assert main(["validate", str(folder)]) == 2
        assert "allowed is a run directory" in capsys.readouterr().err


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_validation_decides_the_exit_code(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], passed: bool, code: int
) -> None:
    (home / "run").mkdir()
    (home / "run" / "plan.json").write_text("{}")
    check: dict[str, Any] = {
        "name": "logprobs",
        "passed": passed,
        "count": 640,
        "compared": "tokens",
        "message": "said",
    }
    result = types.SimpleNamespace(**vars(Outcome(passed, "")), checks=(types.SimpleNamespace(**check),))
    module = types.ModuleType("rlk.evidence.validate")
    module.validate = lambda run_dir: result  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlk.evidence.validate", module)
    assert main(["validate", "run"]) == code
    assert capsys.readouterr().out.startswith(f"{'ok ' if passed else 'RED'}  logprobs: said\n")
    assert main(["validate", "run", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == KEYS
    assert (answer["passed"], answer["run_dir"]) == (passed, "run")
