"""The verdict as a document: what each check compared, and where the first failure is (run-validation.json)."""

from __future__ import annotations

from typing import ClassVar

from rlk.evidence.documents import Count, Document, Part
from rlk.evidence.schemas import Command, Mode


class Side(Part):
    """One of two values that should be equal: who said it, the value, and for fp32 its hex word."""

    source: str
    value: str
    word: str | None = None


class Failure(Part):
    """Where a check failed first. Fields that mean nothing for the check are null."""

    where: str
    step: int | None = None
    sample: int | None = None
    token_index: int | None = None
    token_id: int | None = None
    left: Side | None = None
    right: Side | None = None

    @property
    def place(self) -> str:
        """The parts that are known, as text: `step 1 sample 5 token 2 (id 17)`."""
        named = (("step", self.step), ("sample", self.sample), ("token", self.token_index))
        words = [f"{name} {value}" for name, value in named if value is not None]
        return " ".join([*words, *([] if self.token_id is None else [f"(id {self.token_id})"])])


class CheckResult(Part):
    """One check: it compared `count` things of the kind `compared`, of which `failures` were wrong."""

    name: str
    passed: bool
    compared: str
    count: Count
    failures: Count
    failure: Failure | None
    message: str


class Validation(Document):
    """The verdict on a run directory. `tokens_compared` counts each response token once.

    `mismatching_tokens` counts the tokens whose rollout log-probability differs from the recomputed policy or from
    the update forward. `steps` is the number of steps read whole. `digest` is that of the last step, or None.
    `errors` has one line for each red check.
    """

    SCHEMA: ClassVar[str] = "rlk.validation/1"

    passed: bool
    command: Command | None
    mode: Mode | None
    steps: Count
    tokens_compared: Count
    mismatching_tokens: Count
    digest: str | None
    errors: tuple[str, ...]
    notes: tuple[str, ...]
    checks: tuple[CheckResult, ...]

    def check(self, name: str) -> CheckResult:
        """The result of one check; KeyError where it did not run."""
        for result in self.checks:
            if result.name == name:
                return result
        raise KeyError(name)
