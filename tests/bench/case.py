"""One op at one size, ours and the ordinary one on the same data, and how each is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.gpu.data import DEVICE, chosen, rms

Call = Callable[..., Any]
BUDGET_US = 40_000.0
IDLE_CYCLES = 600_000
"""About 0.3 ms."""


@dataclass(frozen=True)
class Case:
    """`make` gives the inputs, the same in every process; all other calls take them.

    ours: a name to each implementation, the default first. names: choices that hold while it runs. ordinary: what it is
    called, and the call. exact: the result in float64, for the errors of both; all three return a tensor then.
    """

    op: str
    size: str
    make: Callable[[], tuple[Any, ...]]
    ours: Mapping[str, Call]
    ordinary: tuple[str, Call] | None = None
    exact: Call | None = None
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def measure(self, arm: str) -> dict[str, dict[str, Any]]:
        """Of each implementation of "ours" or "ordinary": median microseconds, and the error against float64."""
        calls = self.ours if arm == "ours" else dict([self.ordinary] if self.ordinary else [])
        inputs = self.make()
        exact = self.exact(*inputs) if self.exact and calls else None
        found: dict[str, dict[str, Any]] = {}
        for name, call in calls.items():
            with chosen(**self.names.get(name, {}) if arm == "ours" else {}):
                facts: dict[str, Any] = {"us": median_us(lambda c=call: c(*inputs))}
                if exact is not None:
                    facts["rms_error"] = rms(call(*inputs), exact)
            found[name] = facts
        return found


def median_us(call: Callable[[], Any]) -> float:
    """Median time on the device, CUDA events, inputs not in the L2: twice its size is written before every call. The
    device then idles long enough for Python to start the call, so that a launch costs nothing here, as in a graph."""
    flush = torch.empty(2 * torch.cuda.get_device_properties(DEVICE).L2_cache_size, dtype=torch.uint8, device=DEVICE)
    for _ in range(2):
        call()
    repeats = max(5, min(50, int(BUDGET_US / max(once(call, flush), 1.0))))
    return round(sorted(once(call, flush) for _ in range(repeats))[repeats // 2], 1)


def once(call: Callable[[], Any], flush: torch.Tensor) -> float:
    """Microseconds of one call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(IDLE_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
