"""One arm of the step benchmark in a process of its own: it makes itself ready, waits for its turn, and measures.

    python -m tests.bench.step_arm ARM FOLDER PROFILE SIZES

In FOLDER it leaves ARM.ready, waits for ARM.go, and writes ARM.json after each result. Starts overlap, measurements do
not: an arm that waits has nothing on the GPU.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from rlk.model.seeded import ensure_weights
from rlk.plan.derive import Plan
from tests.bench.engines import Product, Stock, prompts
from tests.bench.step_sizes import ARMS, NUCLEUS, STOCK, Decode, Sizes, decodes, plan

Results = Iterator[dict[str, Any]]
WARM_CONTEXT, WARM_NEW, WARM_UPDATES = 16, 4, 2


class DecodeArm:
    """An engine, started, its kernels compiled for all batches that it will decode."""

    def __init__(self, arm: str, plan: Plan, sizes: Sizes) -> None:
        self.sizes, self.cases, self.next = sizes, decodes(sizes, arm), 0
        self.engine = Stock(plan, default=arm == "decode stock-default") if arm in STOCK else Product(plan)
        for case in self.cases:
            self._decode(replace(case, context=min(WARM_CONTEXT, case.context), new=min(WARM_NEW, case.new)))
        self.facts = self.engine.facts()

    def _decode(self, case: Decode) -> dict[str, Any]:
        self.next += case.requests
        return self.engine.decode(case, self.next - case.requests)

    def measure(self) -> Results:
        """One batch after the other."""
        batched = self.engine.plan.profile.engine.max_num_batched_tokens
        for case in self.cases:
            counted = self._decode(case)
            yield {**self.engine.clock.told(case, batched), **counted}


class TrainArm:
    """A trainer of one rank, started, after two steps."""

    def __init__(self, arm: str, plan: Plan, sizes: Sizes) -> None:
        from rlk.train.batching import Sample
        from rlk.train.rank import TrainRank

        del arm  # the plan says the mode
        self.sizes, self.rank = sizes, TrainRank(plan.to_json(), 0)
        self.facts = self.rank.start(self.rank.open_store())
        case = Decode(sizes.samples, sizes.length, 0, NUCLEUS)
        rows = prompts(case, plan.shape.vocab_size, 0)
        self.samples = [Sample(i, tuple(tokens), sizes.prompt, NUCLEUS) for i, tokens in enumerate(rows)]
        self.coefficients = {s.sample_id: np.full(s.response_len, 1e-3, np.float32) for s in self.samples}
        for _ in range(WARM_UPDATES):
            self._score(), self._update()

    def _score(self) -> None:
        self.rank.worker.begin(self.samples)
        self.rank.worker.score()

    def _update(self) -> None:
        self.rank.worker.update(self.coefficients)

    def measure(self) -> Results:
        """Medians over the same samples scored and trained on again and again."""
        tokens, spans = self.sizes.samples * self.sizes.length, [(seconds(self._score), seconds(self._update))]
        for _ in range(self.sizes.updates - 1):
            spans.append((seconds(self._score), seconds(self._update)))
        score, update = (median(column) for column in zip(*spans, strict=True))
        yield {
            "tokens": tokens, "response_tokens": sum(s.response_len for s in self.samples), "steps": len(spans),
            "score_ms": round(score * 1e3, 2), "update_ms": round(update * 1e3, 2),
            "tokens_per_s": round(tokens / (score + update)),
        }  # fmt: skip


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of a call and of what it started on the device."""
    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def memory() -> dict[str, int]:
    """Bytes of torch's allocator in this process: now, and the most since the last reset."""
    if not torch.cuda.is_available():
        return {}
    return {
        "allocated_bytes": torch.cuda.memory_allocated(), "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }  # fmt: skip


def environment(plan: Plan) -> dict[str, Any]:
    """What a reader needs to place the numbers."""
    gpu = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else None
    return {
        "device": gpu or plan.profile.device, "torch": torch.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }  # fmt: skip


def run(arm: str, folder: Path, plan: Plan, make: Callable[[], DecodeArm | TrainArm]) -> None:
    """Makes the arm, says that it is ready, waits for its turn; each result is in the file as soon as it exists."""
    begin, record = time.monotonic(), dict[str, Any](what=ARMS[arm])

    def write() -> None:
        partial = folder / f"{arm}.partial"
        partial.write_text(json.dumps(record) + "\n")
        partial.rename(folder / f"{arm}.json")

    try:
        made = make()
        record["environment"] = environment(plan)
        record |= {"start_seconds": round(time.monotonic() - begin, 1), "settings": made.facts, "measured": []}
        (folder / f"{arm}.ready").touch()
        while not (folder / f"{arm}.go").exists():
            time.sleep(0.02)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        for result in made.measure():
            record["measured"].append(result)
            record["memory"] = memory()
            write()
        record["complete"] = True
    except Exception as error:  # an arm that fails is a result, and the others go on
        record["error"] = f"{type(error).__name__}: {str(error)[:500]}"
        record["where"] = traceback.format_exc(limit=-4)
    write()


def main(arm: str, folder: str, profile: str, sizes: str) -> None:
    """See the module."""
    size = Sizes.from_json(sizes)
    made = plan(arm, profile, size)
    if made.profile.weights_seed is not None:
        ensure_weights(Path(made.profile.model), made.shape, made.profile.weights_seed)
    kind = DecodeArm if arm.startswith("decode") else TrainArm
    run(arm, Path(folder), made, lambda: kind(arm, made, size))
    sys.stdout.flush()
    os._exit(0)  # the file is there, and the next arm waits for this process to be gone: nothing is taken down in order


if __name__ == "__main__":
    main(*sys.argv[1:])
