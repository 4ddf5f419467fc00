"""What a trainer tells the recorder of a probed run: whose rows a pass has, and the optimizer's inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from rlk.model.probe import Recorder
from rlk.train.batching import MicroBatch
from rlk.train.optimizer import Optimizer


@contextmanager
def recorded(recorder: Recorder | None, phase: str, batch: MicroBatch) -> Iterator[None]:
    """Records one micro-batch's pass; without a recorder, nothing."""
    if recorder is None:
        yield
        return
    ids = torch.tensor([s.sample_id for s in batch.samples], device=batch.first.device)
    recorder.begin(phase, ids.repeat_interleave(batch.first.diff()), batch.positions, batch.rows)
    yield
    recorder.end()


@contextmanager
def recorded_update(
    recorder: Recorder | None, optimizer: Optimizer, gradients: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Records the gradients, and masters and moments before and after; without a recorder, nothing."""
    if recorder is None:
        yield
        return
    recorder.atoms("grad", gradients)
    _states(recorder, optimizer, "in")
    yield
    _states(recorder, optimizer, "out")


def _states(recorder: Recorder, optimizer: Optimizer, side: str) -> None:
    for kind, pieces in (("master", optimizer.master), ("m", optimizer.m), ("v", optimizer.v)):
        recorder.atoms(f"{kind}_{side}", pieces)
