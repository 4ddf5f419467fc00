"""A checkpoint's bytes reach the shards whatever the degree, and every fault of a folder is named.

Fingerprints of all ranks' parts must add up to that of the published tensor; a folder with an index is cut in two
files, as large models come.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlk.kernels import state
from rlk.model import checkpoint as files
from rlk.model.checkpoint import CheckpointError
from rlk.model.layout import Param, parameters
from rlk.model.parallel import ParallelContext
from rlk.plan.shape import read_shape
from tests.unit.probes import assert_same
from tests.unit.ranks import on_ranks


def params_of(path: Path) -> tuple[Param, ...]:
    return parameters(read_shape(str(path)))


def load(path: Path) -> dict[str, torch.Tensor]:
    return files.load(path, params_of(path), ParallelContext())


def published(path: Path) -> dict[str, tuple[int, int]]:
    tensors = load_file(path / "model.safetensors")
    return {name: state.fingerprint(t if t.dim() == 2 else t[None]) for name, t in tensors.items()}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["checkpoint", "tied_checkpoint"])
def test_parts_of_all_ranks_add_up(request: pytest.FixtureRequest, kind: str, tp: int) -> None:
    path: Path = request.getfixturevalue(kind)
    params = params_of(path)

    def parts(context: ParallelContext) -> dict[str, tuple[int, int]]:
        return files.fingerprints(params, files.load(path, params, context), context)

    ranks = on_ranks(tp, 1, parts)
    replicated = {t.hf_name for p in params if p.replicated for t in p.tensors}
    for name, whole in published(path).items():
        held = [rank[name] for rank in ranks]
        assert state.combine(held[:1] if name in replicated else held) == whole, name
        assert len(set(held)) == 1 or name not in replicated, name


def test_a_shard_is_the_published_rows(checkpoint: Path) -> None:
    stored, tensors = load(checkpoint), load_file(checkpoint / "model.safetensors")
    q, k = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qk")
    assert_same(stored["layers.1.qkv"][5, :16], q[80:96])
    assert_same(stored["layers.1.qkv"][5, 16:24], k[40:48])
    assert_same(stored["layers.0.down"][2], tensors["model.layers.0.mlp.down_proj.weight"][:, 32:48])
    assert_same(stored["embed"].flatten(0, 1)[:300], tensors["model.embed_tokens.weight"])
    assert not stored["embed"].flatten(0, 1)[300:].any()


def altered(checkpoint: Path, folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """A copy of the checkpoint with one tensor replaced, or left out."""
    path = folder / "model"
    path.mkdir()
    shutil.copy(checkpoint / "config.json", path)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors.pop(name)
    save_file({**tensors, **({} if tensor is None else {name: tensor})}, path / "model.safetensors")
    return path


def test_a_missing_tensor_is_named(checkpoint: Path, tmp_path: Path) -> None:
    path = altered(checkpoint, tmp_path, "model.layers.1.self_attn.q_norm.weight", None)
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.1\.self_attn\.q_norm\.weight"):
        load(path)


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.zeros(64, 128), r"F32 \(64, 128\)"),
        (torch.zeros(64, 120, dtype=torch.bfloat16), r"BF16 \(64, 120\)"),
        (torch.zeros(128, 64, dtype=torch.bfloat16), r"BF16 \(128, 64\)"),
    ],
    ids=["dtype", "narrow", "transposed"],
)
def test_another_dtype_or_shape_is_named(checkpoint: Path, tmp_path: Path, tensor: torch.Tensor, found: str) -> None:
    path = altered(checkpoint, tmp_path, "model.layers.0.mlp.down_proj.weight", tensor)
    with pytest.raises(CheckpointError, match=rf"down_proj\.weight is {found}; allowed is BF16 \(64, 128\)"):
        load(path)


def test_an_empty_folder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor an index"):
        files.load(tmp_path, params_of(checkpoint), ParallelContext())


def test_an_index_of_files_is_followed(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    where = {name: file for file, held in halves.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for name, tensor in load(tmp_path).items():
        assert_same(tensor, load(checkpoint)[name], name)
