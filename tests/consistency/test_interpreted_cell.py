"""One small cell of the CUDA program on a machine without a GPU: Ray, a trainer and a vLLM engine whose every kernel is
a Triton program that Triton's interpreter runs on CPU tensors.

The model has one layer and 32 columns, since an interpreted program takes milliseconds a tile: a run takes a minute or
two. What a GPU does in another way (exponential, tensor cores, libraries) is not seen here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlk.evidence.record import Record
from rlk.evidence.validate import validate
from tests.plugin import ROOT

pytestmark = pytest.mark.cpu

TIMEOUT_S = 600


def run(folder: Path, name: str, **environment: str) -> Record:
    """One step of the profile, with top-p on one sample and top-k on the other."""
    command = [
        sys.executable,
        "-m",
        "rlk",
        "run",
        "--profile",
        "micro-cpu",
        "--steps",
        "1",
        "--mix",
        "0.7/0.95,1.3/1/20",
    ]
    command += ["--output-root", str(folder), "--run-id", name, "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["passed"]
    return Record(folder / name)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The run whose kernels are interpreted."""
    return run(tmp_path_factory.mktemp("interpreted"), "interpreted", TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The twin: the same run with the CPU's own kernels."""
    return run(tmp_path_factory.mktemp("compiled"), "compiled")


def test_every_rank_ran_the_triton_programs(interpreted: Record, compiled: Record) -> None:
    said = interpreted.manifest.readback
    for kernels in (
        *(rank.kernels for rank in said.train),
        *(rank.kernels for ranks in said.engines for rank in ranks),
    ):
        assert kernels
        assert all(form.startswith("cuda, interpreted: Triton") for form in kernels.values())
    assert all(kernel.form.startswith("cpu: ") for kernel in compiled.manifest.kernels)


def test_interpreted_logprobs_are_equal_words(interpreted: Record) -> None:
    found = interpreted.step(0)
    left, right = found.matched
    rollout, policy = found.samples.logprobs[left].view(np.int32), found.scored[0].logprob[right].view(np.int32)
    assert len(rollout) > 0
    assert np.array_equal(rollout, policy)
    assert all(check.count > 0 for check in validate(interpreted.run_dir).checks if check.passed)


def test_the_interpreted_step_moved_the_weights(interpreted: Record) -> None:
    (metrics,) = interpreted.metrics
    assert metrics.grad_norm > 0
    before, after = interpreted.fingerprints
    assert before.trainer != after.trainer
    assert all(engine == after.trainer for engine in after.engines)


def test_other_kernels_make_another_trajectory(interpreted: Record, compiled: Record) -> None:
    """The twin: were the interpreter not in force, both runs would be of the same bits."""
    assert interpreted.fingerprints[0] == compiled.fingerprints[0], "one checkpoint"
    assert validate(interpreted.run_dir).digest != validate(compiled.run_dir).digest
