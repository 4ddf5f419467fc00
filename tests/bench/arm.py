"""One arm in a process of its own: cuBLAS reads its switches when it starts, and the ordinary op runs without ours.

python -m tests.bench.arm ours|ordinary OUT [TEXT]
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.bench import attention, policies, products, rows, states
from tests.bench.case import Case

PARTS: tuple[Callable[[], Iterator[Case]], ...] = (
    products.cases, attention.cases, policies.cases, rows.cases, states.cases,
)  # fmt: skip


def main(arm: str, out: Path, text: str = "") -> None:
    """Measures every case whose name has `text` in it; the file is rewritten after each."""
    p = torch.cuda.get_device_properties(0)
    record: dict[str, Any] = {
        "device": p.name, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "l2_bytes": p.L2_cache_size, "cases": [],
    }  # fmt: skip
    for case in (case for part in PARTS for case in part()):
        if text not in f"{case.op}, {case.size}":
            continue
        start, entry = time.monotonic(), {"op": case.op, "size": case.size}
        try:
            entry["measured"] = case.measure(arm)
        except Exception as error:  # one case that this torch cannot run must not cost the others
            entry["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        entry["seconds"] = round(time.monotonic() - start, 2)
        record["cases"].append(entry)
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
