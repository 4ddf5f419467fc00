"""Random weights of a shape: a function of the seed and of each tensor's name, written once.

The smallest shape that eight shards allow, tied and not; its single end id must stand out, or no response would end.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from rlk.model.seeded import FILE, draw, ensure_weights
from rlk.plan.shape import read_shape
from tests.unit import checkpoints


def folder_of(path: Path, *, tied: bool) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**checkpoints.CONFIG, "tie_word_embeddings": tied}))
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_same_seed_draws_the_same_bits(tmp_path: Path, tied: bool) -> None:
    shape = read_shape(str(folder_of(tmp_path, tied=tied)))
    first, again, other = draw(shape, 5), draw(shape, 5), draw(shape, 6)
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.int16), again[name].view(torch.int16)), name
        assert not torch.equal(tensor, other[name]), name


def test_rows_that_end_a_response_are_longest(tmp_path: Path) -> None:
    shape = read_shape(str(folder_of(tmp_path, tied=True)))
    rows = draw(shape, 5)["model.embed_tokens.weight"].float().norm(dim=1)
    assert rows.argmax().item() in shape.eos_ids
    plain = draw(dataclasses.replace(shape, eos_ids=(3,)), 5)["model.embed_tokens.weight"].float().norm(dim=1)
    assert plain.argmax().item() == 3


def test_weights_are_written_once(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tied=True)
    shape = read_shape(str(folder))
    assert ensure_weights(folder, shape, 5)
    written = (folder / FILE).read_bytes()
    assert not ensure_weights(folder, shape, 6)
    assert (folder / FILE).read_bytes() == written
