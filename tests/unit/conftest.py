"""Checkpoints that are made once for all unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with a head of its own."""
    from tests.unit import checkpoints  # here, because most unit tests need no torch

    return checkpoints.write(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose embedding is its head."""
    from tests.unit import checkpoints

    return checkpoints.write(tmp_path_factory.mktemp("checkpoint") / "tied", tied=True)
