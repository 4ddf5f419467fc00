"""Why a mutant of the validator may survive: part of the module's name, a pattern of `before => after`, the reason."""

from __future__ import annotations

REASONS: tuple[tuple[str, str, str], ...] = (
    ("", r"^@dataclass\(frozen=True\) =>", "nobody assigns to these fields, and mypy holds that nobody will"),
    (
        "",
        r"& .* => .* \* |& .* => .* // ",
        "of two flags the product, and the floor of the quotient, is the conjunction",
    ),
    ("coverage", r"sample - first\) // group.*=> .*sample \+ first", "first is a multiple of the group: groups stay"),
    ("coverage", r"times > 1.*=> .*times != 1", "what was counted is there at least once"),
    ("coverage", r"reason == STOP .*=> if reason <= STOP", "STOP is 0, and the column has no sign"),
    ("coverage", r"len\(stops\) != 1 .*=> .*len\(stops\) < 1", "of two ends the first is not the last token either"),
    ("coverage", r"=> .*stops\[ -1\]", "there is one end, and so the first is the last"),
    ("checks/probe", r"sample_id >= place", "samples stand by id: the first that is not below is the one"),
    ("coverage", r"=> .*stops\[0\] < len", "no place is beyond the last"),
    ("coverage", r"len\(response\) != limit.*=> .*len\(response\) < limit", "a longer one was refused above"),
    ("logprobs", r"top_p == 1\.0.*=> .*top_p >= 1\.0|top_k == -1.*=> .*top_k <= -1", "a plan allows nothing beyond"),
    (
        "logprobs",
        r"top_p\[rows\] < 1.*=> .*(!= 1|top_k\[rows\] >= 0|top_k\[rows\] > -1)",
        "a plan allows no other value",
    ),
    (
        "metrics",
        r'-float\("inf"\) < value < .*!=',
        "the other comparison refuses a NaN, and so both infinities are left",
    ),
    ("checks/oracle", r'mode == "native": =>.* >= "native"', "the only other mode comes before it in the alphabet"),
    ("checks/oracle", r"heat == 0: => if heat <= 0", "no temperature is negative"),
    (
        "checks/oracle",
        r"<= draw <=.*=>|low <= value <=.*=> .*( < value <= | < high)",
        "a float on the very edge of a tolerance",
    ),
    ("checks/oracle", r"^return 0\.0 =>", "a red check does not say how near the others were"),
    ("checks/oracle", r", 0\.0\) / allowed =>", "the largest deviation starts at 0 in any case"),
    ("checks/probe", r"nonzero\(\)\[ -1\]|rows\[ -1\]", "a sample has one row"),
    (
        "checks/probe",
        r"=> if rows or place",
        "a row of a sample has a position; of an unknown sample other checks are red",
    ),
    ("processes", r'state == "ALIVE" if.*=> .*state <= "ALIVE"', "no state comes before it in the alphabet"),
    ("processes", r"=> for pid in started\[: 2\]", "one that is recorded twice is red above"),
    ("settings", r"=> if len\(chosen\) <", "a mapping has no more names than the list that it was made of"),
    ("structure", r'=> .*split\(":", 2\)', "the first part is the same"),
    (
        "structure",
        r"run.plan == again",
        "texts of equal plans differ where a number has another type, which no schema lets in",
    ),
    ("checks/partition", r"cp == 1: => .*<= 1", "a degree is at least 1"),
    ("checks/probe", r"seen < .*=> if seen !=", "what both sides predicted is a token of the rollout"),
    ("checks/oracle", r"worst = 0\.0 => worst = -1\.0", "every deviation is at least 0"),
)
