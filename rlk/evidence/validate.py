"""The verdict on a run directory, from its files alone: nothing is written, run or imported beyond this floor.

Two layers. `validate_record` looks at the content; its result is stored as run-validation.json before the seal.
`validate` does the same again and adds what can only be asked afterwards: does the stored verdict say the same, and
does the seal fit every byte.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rlk.evidence import layout
from rlk.evidence.checks.logprobs import mismatching
from rlk.evidence.checks.metrics import training_notes
from rlk.evidence.checks.registry import PROBE_CHECKS, RUN_CHECKS, STEP_CHECKS, VERIFY_CHECKS
from rlk.evidence.checks.tally import Tally
from rlk.evidence.errors import EvidenceError
from rlk.evidence.record import Record, StepRecord
from rlk.evidence.seal import seal_problems
from rlk.evidence.verdict import CheckResult, Failure, Validation
from rlk.plan.derive import Plan


def validate(run_dir: Path) -> Validation:
    """The verdict on a sealed run directory. Raises EvidenceError only where there is no directory."""
    run = Record(run_dir)
    content = _content(run)
    verdict, seal = Tally("verdict", "verdicts"), Tally("seal", "files")
    _guarded(verdict, partial(_stored_verdict, run, content, verdict))
    _guarded(seal, partial(_seal, run, seal))
    kept = content.model_dump(exclude={"passed", "errors", "checks"})
    return _validation((*content.checks, verdict.result(), seal.result()), **kept)


def validate_record(run_dir: Path) -> Validation:
    """The verdict on the content of a run directory, before it has a stored verdict and a seal."""
    return _content(Record(run_dir))


class _Steps:
    """Goes through the steps once, reading the arrays of one at a time, and fills all step checks on the way."""

    def __init__(self, run: Record) -> None:
        self.read = 0
        self.tokens = 0
        self.mismatching = 0
        self.checks = STEP_CHECKS
        try:
            number = run.plan.config.steps
            if run.plan.config.probe:
                self.checks = (*STEP_CHECKS, *PROBE_CHECKS)
            self.tallies = [Tally(check.name, check.compared) for check in self.checks]
        except EvidenceError as error:
            self.tallies = [Tally(check.name, check.compared) for check in self.checks]
            self._fail_all(str(error))
            return
        for step in range(number):
            self._step(run, step)

    def _step(self, run: Record, number: int) -> None:
        try:
            step = run.step(number)
        except EvidenceError as error:
            self._fail_all(str(error))
            return
        self.read += 1
        for check, tally in zip(self.checks, self.tallies, strict=True):
            _guarded(tally, partial(check.function, run, step, tally))
        self._count(step)

    def _count(self, step: StepRecord) -> None:
        try:
            compared, wrong = mismatching(step)
        except EvidenceError:
            return  # `lengths` and the log-prob checks are red for it already
        self.tokens += compared
        self.mismatching += wrong

    def _fail_all(self, message: str) -> None:
        for tally in self.tallies:
            tally.fail(message)


def _content(run: Record) -> Validation:
    plan = _plan(run)
    command = plan.config.command if plan else None
    # Without a plan nobody knows the command, so the stricter list is taken.
    run_checks = RUN_CHECKS if command == "run" else (*RUN_CHECKS, *VERIFY_CHECKS)
    tallies = [Tally(check.name, check.compared) for check in run_checks]
    for check, tally in zip(run_checks, tallies, strict=True):
        _guarded(tally, partial(check.function, run, tally))
    steps = _Steps(run)
    return _validation(
        tuple(tally.result() for tally in (*tallies, *steps.tallies)),
        command=command,
        mode=plan.config.mode if plan else None,
        steps=steps.read,
        tokens_compared=steps.tokens,
        mismatching_tokens=steps.mismatching,
        digest=_digest(run),
        notes=_notes(run),
    )


def _validation(checks: tuple[CheckResult, ...], **fields: object) -> Validation:
    errors = tuple(f"{check.name}: {check.message}" for check in checks if not check.passed)
    return Validation.model_validate({"passed": not errors, "errors": errors, "checks": checks, **fields})


def _stored_verdict(run: Record, content: Validation, tally: Tally) -> None:
    """run-validation.json states what the record gives now: same checks, counts, places, same outcome."""
    stored = Validation.from_json(run.validation_text(), layout.VALIDATION)
    tally.add()
    was, now = _facts(stored), _facts(content)
    fields = [name for name in now if was[name] != now[name]]
    if not fields:
        return
    message = f"{layout.VALIDATION}: {', '.join(fields)} differ from what the record gives"
    tally.fail(message, Failure(where=layout.VALIDATION))


def _facts(verdict: Validation) -> dict[str, object]:
    """A verdict without its sentences, whose wording a later version of this code may better."""
    facts = verdict.model_dump(exclude={"errors", "notes", "checks"})
    return {**facts, "checks": [check.model_dump(exclude={"message"}) for check in verdict.checks]}


def _seal(run: Record, tally: Tally) -> None:
    """SHA256SUMS is, byte for byte, the text that the files give."""
    number, problems = seal_problems(run.run_dir)
    tally.add(number)
    for problem in problems:
        tally.fail(problem, Failure(where=problem.split(":", 1)[0]))


def _guarded(tally: Tally, look: Callable[[], None]) -> None:
    """Run one check; evidence that cannot be read makes it red."""
    try:
        look()
    except EvidenceError as error:
        tally.fail(str(error))
    except OSError as error:  # its text holds a path, which must not enter a verdict
        tally.fail(f"cannot be read: {error.strerror}")


def _plan(run: Record) -> Plan | None:
    try:
        return run.plan
    except EvidenceError:
        return None  # the checks `plan` and `schemas` say why


def _digest(run: Record) -> str | None:
    try:
        return run.trajectory[-1].digest if run.trajectory else None
    except EvidenceError:
        return None  # the check `digest` says why


def _notes(run: Record) -> tuple[str, ...]:
    try:
        notes = [*training_notes(run.metrics)]
        if run.manifest.actors_outlive_run:
            notes.append("the actors outlived this run, in a session with others: their end is not in this record")
    except EvidenceError as error:
        return (f"no notes: {error}",)
    return tuple(notes)
