"""Every Triton program compiles for Hopper, as the CUDA forms launch it at Qwen3-8B's sizes, without a GPU.

The compiler's own words are checked too: a fused multiply-add rounds once where the program says twice, a product off
the Hopper tensor cores would have another inner order, and a spilled register costs more than any tile gains. A process
of its own, because this one may interpret its programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCTS = {"product", "plain_chain", "weight_gradients", "attention", "query_gradient", "key_gradients"}
OTHERS = {
    "tree_sum", "rmsnorm", "rmsnorm_backward", "gains", "add", "rope", "swiglu", "swiglu_backward", "embedding_leaf",
    "row_dots", "write_pages", "segment_tops", "segment_masses", "find_floor", "count_orders", "find_cut", "find_end",
    "draw", "score", "score_gradient", "adamw", "block_sums", "fingerprint",
    "row_fingerprints", "put", "signal", "collect", "collect_tree",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One record a distinct launch; the cache is empty, so nothing is answered from an earlier run."""
    folder = tmp_path_factory.mktemp("compiled")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools/compile_kernels.py"), str(folder / "out.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    records: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())
    return records


def test_every_program_compiles_for_hopper(compiled: list[dict[str, Any]]) -> None:
    assert {r["program"] for r in compiled} == PRODUCTS | OTHERS
    assert len(compiled) == 81, "distinct launches: a new one belongs in the time budget of a start"


def test_products_run_on_hoppers_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    for record in compiled:
        wgmma = record["program"] in PRODUCTS
        assert (record["wgmma"] > 0) == wgmma, record
        assert record["mma"] == 0, record


def test_no_multiply_and_add_are_fused(compiled: list[dict[str, Any]]) -> None:
    assert [r for r in compiled if r["fused_fp32"]] == []


def test_no_program_spills_registers(compiled: list[dict[str, Any]]) -> None:
    """But for 32 words where the second half of a gradient's tree meets the first: once a tile, not in a loop."""
    joins = [r for r in compiled if r["constants"].get("ADD") and r["stack"] <= 128]
    assert [r for r in compiled if r["stack"] and r not in joins] == []
