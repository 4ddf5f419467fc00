"""Runs a test's body in a process of its own, where Triton programs are interpreted and CUDA forms take CPU tensors.

Triton decides when it is imported whether its programs are interpreted, and another test, or vLLM, may have imported it
in this process already.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec

P = ParamSpec("P")

TIMEOUT_S = 900


def interpreted(test: Callable[P, None]) -> Callable[P, None]:
    """The test, run elsewhere; its arguments must survive pickling."""

    @functools.wraps(test)
    def elsewhere(*args: P.args, **kwargs: P.kwargs) -> None:
        _process().submit(_body, test.__module__, test.__name__, args, kwargs).result(TIMEOUT_S)

    return elsewhere


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), _enter)


def _enter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import torch

    torch.set_num_threads(1)
    np.seterr(all="ignore")  # a tile's padding may overflow on its way to being masked, as it may on a GPU


def _body(module: str, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
