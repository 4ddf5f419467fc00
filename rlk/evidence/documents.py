"""What every JSON file of a run directory has in common: a schema name, strict types, one way to read a text."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from rlk.evidence.errors import EvidenceError

# JSON has no word for these. A run that went wrong must still be recorded, so they are written as text.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_WORDS = {str(number): word for word, number in _NON_FINITE.items()}


def _read_number(value: object) -> object:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _write_number(value: float) -> float | str:
    return _WORDS.get(str(value), value)


Number = Annotated[float, BeforeValidator(_read_number), PlainSerializer(_write_number, when_used="json")]
Count = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """A piece of a document: frozen, no unknown fields, no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class Document(Part):
    """A whole JSON file, or one line of a .jsonl file. `SCHEMA` is its name and version, written first."""

    SCHEMA: ClassVar[str] = ""

    def to_json(self, indent: int | None = None) -> str:
        """Strict JSON, no newline at the end."""
        body = {"schema": self.SCHEMA, **self.model_dump(mode="json")}
        return json.dumps(body, indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """Read what `to_json` wrote. `where` (file, or file and line) starts the message of an EvidenceError."""
        body = load_object(text, where)
        schema = body.pop("schema", None)
        if schema != cls.SCHEMA:
            raise EvidenceError(f"{where}: schema is {schema!r}, this reader knows {cls.SCHEMA!r}")
        try:
            # By way of JSON, since a strict model takes a list for a tuple only from JSON.
            return cls.model_validate_json(json.dumps(body))
        except ValidationError as error:
            raise EvidenceError(f"{where}: {_first_line(error)}") from error


def load_object(text: str, where: str) -> dict[str, Any]:
    """A JSON object in which no key stands twice and NaN is no number. Raises EvidenceError."""
    try:
        body = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise EvidenceError(f"{where}: holds {type(body).__name__}, an object is needed")
    return body


def canonical(value: object) -> bytes:
    """JSON in one spelling (sorted keys, no spaces, ASCII), for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} stands twice")
    return found


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _first_line(error: ValidationError) -> str:
    first, *others = error.errors()
    place = ".".join(str(part) for part in first["loc"]) or "document"
    more = f" (and {len(others)} more)" if others else ""
    return f"{place}: {first['msg']}{more}"
