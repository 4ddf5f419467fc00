"""What a check fills in while it looks: how much it compared, what was wrong, where first."""

from __future__ import annotations

from rlk.evidence.samples import token_of
from rlk.evidence.verdict import CheckResult, Failure, Side


def token_place(
    step: int, where: str, key: int, token_id: int | None = None, left: Side | None = None, right: Side | None = None
) -> Failure:
    """The place of one response token, from its key."""
    sample, index = token_of(int(key))
    known = None if token_id is None else int(token_id)
    return Failure(where=where, step=step, sample=sample, token_index=index, token_id=known, left=left, right=right)


class Tally:
    """Counts for one check. Red when something failed, and also when nothing was compared."""

    def __init__(self, name: str, compared: str) -> None:
        self.name = name
        self.compared = compared
        self.count = 0
        self.failures = 0
        self.remarks: list[str] = []
        self._first: Failure | None = None
        self._message: str | None = None

    def add(self, number: int = 1) -> None:
        """Count things that were compared."""
        self.count += number

    def fail(self, message: str, failure: Failure | None = None, number: int = 1) -> None:
        """Count things that were wrong; the first message and place are kept."""
        self.failures += number
        if self._message is None:
            self._message, self._first = message, failure

    def fail_at(self, failure: Failure, problem: str, number: int = 1) -> None:
        """As `fail`, with a message that starts with the place."""
        self.fail(f"{failure.place}: {problem}", failure, number)

    def equal(self, where: str, name: str, found: object, expected: object, step: int | None = None) -> None:
        """Count one comparison of a recorded value with the one it must have."""
        self.add()
        if type(found) is type(expected) and found == expected:
            return
        sides = Side(source="recorded", value=repr(found)), Side(source="expected", value=repr(expected))
        failure = Failure(where=f"{where}: {name}", step=step, left=sides[0], right=sides[1])
        self.fail(f"{where}: {name} is {found!r}, expected {expected!r}", failure)

    def remark(self, sentence: str) -> None:
        """Add a sentence to the message of a green check."""
        self.remarks.append(sentence)

    def result(self) -> CheckResult:
        """The finished check."""
        message = self._message or "; ".join([f"{self.count} {self.compared}", *self.remarks])
        if not self.count and self._message is None:
            message = f"compared no {self.compared}, so it shows nothing"
        elif self.failures and self.count:
            message = f"{message} [{self.failures} of {self.count} {self.compared}]"
        return CheckResult(
            name=self.name,
            passed=self.count > 0 and self.failures == 0,
            compared=self.compared,
            count=self.count,
            failures=self.failures,
            failure=self._first,
            message=message,
        )
