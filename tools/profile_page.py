"""Writes docs/profiles.md from the schema of a profile and the example: python tools/profile_page.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rlk.plan.config import OPTIONS
from rlk.plan.profile import EngineLimits, Profile, Timeouts

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "profiles.md"
EXAMPLE = ROOT / "examples" / "qwen3-8b-h100.json"

HEAD = """# Profiles

A profile says what the command lines of one machine and model have in common. `rlk` reads `.rlk-profile.json` of the
current folder, or what `--profile` names: a file, or an embedded profile ({embedded}). Paths in a file are relative to
it. `rlk plan` shows what comes of a profile and starts nothing.

This page is written by `tools/profile_page.py` from the schema in `rlk/plan/profile.py`; a test holds that it is, and
that the example makes the plans below.

## An example: Qwen3-8B on eight H100

[examples/qwen3-8b-h100.json](../examples/qwen3-8b-h100.json): copy it to `.rlk-profile.json` and correct the paths.

```json
{example}```

Then, on that machine:

```
rlk verify --tp 2 --rollout-tp 4 --temperature 0.7 --top-p 0.95
rlk verify --tp 4 --rollout-tp 2 --temperature 1.3 --top-p 0.99 --top-k 128
rlk run --tp 2 --cp 4 --rollout-tp 4 --temperature 0.7 --top-p 0.95 --steps 200 --max-response-len 6912
rlk verify --mode native --tp 2 --rollout-tp 4 --temperature 0.7 --top-p 0.95
```

`python` and `framework` make the command go on under that interpreter and checkout, whichever `rlk` was called. With
`"defaults": {{"ray_address": "10.0.0.1:8265"}}` (or `--ray-address`) a run is submitted to the Ray whose dashboard is
there, through its Jobs API: [ray.md](ray.md).
"""


def page() -> str:
    """The whole text."""
    embedded = ", ".join(f"`{path.stem}`" for path in sorted((ROOT / "rlk" / "plan" / "profiles").glob("*.json")))
    parts = [HEAD.format(embedded=embedded, example=EXAMPLE.read_text(encoding="utf-8"))]
    for title, model in (("Fields", Profile), ("`engine`", EngineLimits), ("`timeouts`, in seconds", Timeouts)):
        parts += [f"\n## {title}\n\n", *table(model)]
    names = ", ".join(f"`{name}`" for name, option in OPTIONS.items() if option.in_profile)
    parts.append(f"\n## `defaults`\n\nValues of options by name: {names}. `rlk verify --help` says what each takes.\n")
    return "".join(parts)


def table(model: type[BaseModel]) -> Iterator[str]:
    """A row a field; `origin` is the loader's own and no field of a file."""
    yield "| field | allowed | default | meaning |\n|---|---|---|---|\n"
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        if name == "origin":
            continue
        default = "required" if field.default is PydanticUndefined else _value(field.default)
        meaning = " ".join((field.description or "").split())
        yield f"| `{name}` | {_allowed(schema['properties'][name])} | {default} | {meaning} |\n"


def _value(default: Any) -> str:
    if isinstance(default, BaseModel):
        return "its own"
    words = {None: "null", True: "true", False: "false"}
    return f"`{words.get(default, default)}`" if default.__hash__ else "`{}`"


def _allowed(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_allowed(part) for part in schema["anyOf"])
    if "$ref" in schema:
        return "an object"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    words = {"integer": "a whole number", "string": "text", "boolean": "`true`, `false`", "object": "an object"}
    text = words.get(schema["type"], schema["type"])
    text += f" >= {schema['minimum']}" if "minimum" in schema else ""
    text += f", a multiple of {schema['multipleOf']}" if "multipleOf" in schema else ""
    return text + (" of letters, digits, `.`, `_`, `-`" if "pattern" in schema else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
