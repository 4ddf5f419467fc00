"""Compiles every Triton program for Hopper on a machine without a GPU, as the CUDA forms would launch it for Qwen3-8B.

The forms run for real on empty CPU tensors; only the launch is replaced, by Triton's own binding of the arguments and
its compiler. So what is compiled is what a GPU would be asked to run: same constants, warps and specializations.

    python tools/compile_kernels.py OUT.json
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import click

# What libraries bring needs a GPU.
os.environ["RLK_GEMM"] = os.environ["RLK_TREE"] = os.environ["RLK_ATTENTION"] = "triton"
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlk.kernels.collectives.arena import Layout
from rlk.kernels.collectives.turns import ArenaCollective
from rlk.kernels.cuda import attention, gemm, launch, pointwise, policy, state, tree
from rlk.kernels.policy import RowParams
from rlk.kernels.state import AdamStep, Part

log = logging.getLogger("compile_kernels")
HOPPER = GPUTarget("cuda", 90, 32)
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
HIDDEN, HEADS, KV_HEADS, D, SHARD_MLP, SHARD_QKV, VOCAB = 4096, 32, 8, 128, 1536, 768, 151_936


class Compiler:
    """Stands where launches are: compiles each distinct one, once."""

    def __init__(self) -> None:
        self.backend = make_backend(HOPPER)
        self.seen: dict[str, dict[str, Any]] = {}

    def run(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, **constants: Any
    ) -> None:
        """The signature of rlk.kernels.cuda.launch.run."""
        if 0 in grid:
            return
        options = {**constants, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
        binder = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, specialization, extra = binder(*args, **options)
        key = f"{kernel.__name__} {specialization} {sorted(extra.items())}"
        if key not in self.seen:
            parsed, signature, constexprs, attrs = kernel._pack_args(
                self.backend, options, bound, specialization, extra
            )
            source = ASTSource(kernel, signature, constexprs, attrs)
            self.seen[key] = self._compile(
                kernel.__name__, constants | {"warps": warps, "stages": stages}, source, parsed
            )

    def _compile(self, name: str, constants: dict[str, Any], source: ASTSource, options: Any) -> dict[str, Any]:
        start = time.monotonic()
        compiled = triton.compile(source, target=HOPPER, options=options.__dict__)
        seconds, ptx = time.monotonic() - start, compiled.asm["ptx"]
        record = {
            "program": name, "constants": constants, "seconds": round(seconds, 2), "shared": compiled.metadata.shared,
            "wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync"), "fused_fp32": ptx.count("fma.rn.f32"),
            **resources(compiled.asm["cubin"]),
        }  # fmt: skip
        log.info("%s", record)
        return record


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack (spills), read from the machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    fields = dict(f.split(":", 1) for line in text.splitlines() if "REG:" in line for f in line.split() if ":" in f)
    return {"registers": int(fields["REG"]), "stack": int(fields["STACK"])}


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Memory that is never touched."""
    return torch.empty(shape, dtype=dtype)


def products() -> None:
    """Chains, trees and weight gradients, few and many rows."""
    qkv, o, down = empty(8, SHARD_QKV, HIDDEN), empty(8, HIDDEN, 512), empty(8, HIDDEN, SHARD_MLP)
    for rows in (16, 256):
        x, dy = empty(rows, HIDDEN), empty(rows, 8, SHARD_QKV)
        gemm.linear(x, gemm.prepare(qkv.flatten(0, 1)))
        gemm.chain(x, gemm.prepare(qkv)[0], None)
        gemm.leaves_sum(empty(rows, 8, 512), gemm.prepare(o))
        gemm.leaves_sum(empty(rows, 4, SHARD_MLP), gemm.prepare(down[:4]))
        gemm.leaves_sum(empty(rows, 2, SHARD_MLP), gemm.prepare(down[:2]))
        gemm.leaves_sum(dy, qkv)
        gemm.row_inputs(x, o)
        gemm.chain(x, o[0], empty(rows, 512, dtype=F32))
        gemm.plain_chain(x, o[0].t())
    for slices in (1, 2, 4, 8):
        gemm.weight_gradients(empty(256, 8 * SHARD_QKV), empty(256, HIDDEN), [[(0, 9)] * slices])
    for leaves in (1, 2, 4, 8):
        tree.tree(empty(leaves, 64, dtype=F32))
    tree.round_bf16(empty(64, dtype=F32))


def pointwises() -> None:
    """Norms over hidden states and heads, rotation, SwiGLU, the embedding's leaf."""
    for shape in ((256, HIDDEN), (256, HEADS, D)):
        x, w = empty(*shape), empty(shape[-1])
        _, rstd = pointwise.rmsnorm(x, w, 1e-6)
        pointwise.rmsnorm_backward(x, x, w, rstd, None)
        pointwise.rmsnorm_backward(x, x, w, rstd, x)
        pointwise.rmsnorm_gain(x, x, rstd)
    q = empty(256, 8, 4, D)
    pointwise.rmsnorm_gains(q, q, empty(256 * HEADS, dtype=F32), [(0, 9), (9, 20)])
    pointwise.add(x, x)
    tables, positions = empty(512, D // 2, dtype=F32), torch.zeros(256, dtype=torch.int64)
    pointwise.rope(empty(256, HEADS, D), tables, tables, positions, 1.0)
    pointwise.rope(empty(256, KV_HEADS, D), tables, tables, positions, 1.0)
    gate_up = empty(256, 8, 2 * SHARD_MLP)
    pointwise.swiglu_backward(pointwise.swiglu(gate_up), gate_up)
    pointwise.embedding_leaf(empty(256, HIDDEN), positions, 99)


def attentions() -> None:
    """Packed, paged, backward; eight key heads and one."""
    for heads, kv_heads in ((HEADS, KV_HEADS), (HEADS // 8, KV_HEADS // 8)):
        q, k = empty(256, heads, D), empty(256, kv_heads, D)
        first, positions = torch.tensor([0, 256]), torch.arange(256)
        out, lse = attention.packed(q, k, k, positions, first, first)
        attention.packed_gradients(out, q, k, k, out, lse, positions, first, first.tolist(), [[(0, 128), (128, 256)]])
        leaves = empty(2, 256, kv_heads, D, dtype=F32)
        attention.packed_backward(out, q, k, k, out, lse, positions, torch.empty_like(q), leaves[0], leaves[1])
        cache = empty(20, kv_heads, 16, 2 * D)
        attention.write_pages(k, k, cache, positions)
        table = torch.zeros(2, 16, dtype=I32)
        attention.paged(q, cache, table, torch.tensor([0, 1, 256], dtype=I32), torch.tensor([9, 255], dtype=I32))


def policies() -> None:
    """Sampling, scoring, gradient, with and without truncation."""
    logits = empty(2, VOCAB)
    params, ids = RowParams.build([(0.7, 0.9, -1), (1.0, 1.0, -1)], VOCAB), torch.zeros(2, dtype=torch.int64)
    policy.sample(logits, params, ids, ids, ids)
    policy.score(logits, params, ids)
    policy.score_backward(logits, params, ids, torch.zeros(2))


def states() -> None:
    """Optimizer, norms and fingerprints of 2- and 4-byte elements."""
    x = empty(4096, dtype=F32)
    step = AdamStep.at(1, lr=1e-3, betas=(0.9, 0.98), eps=1e-8, decay=0.1, clip=1.0)
    state.adamw(x, x, x, x, step)
    state.sums_of_squares([x])
    for dtype in (BF16, F32):
        state.fingerprints([[Part(torch.zeros(rows, 64, dtype=dtype), 0, 0, 64)] for rows in (64, 1)])
        state.row_fingerprints(torch.zeros(2, 64, dtype=dtype), 8, 0)


def collectives() -> None:
    """Moves of words and of bytes, sums over two, four and eight ranks."""
    for size in (2, 4, 8):
        layout = Layout(size, 2 << 20)
        arena, progress = torch.zeros(layout.total, dtype=torch.uint8), torch.zeros(3, dtype=I32)
        group = ArenaCollective("", 1, layout, arena, progress, [0] * size, lambda: None)
        group.all_gather(empty(64, HIDDEN), "")
        group.all_to_all(empty(size, 64, HIDDEN), "")
        group.gather_tree(empty(64, 1024, dtype=F32), "")
        group.gather_tree(empty(7, dtype=F32), "")
    group.all_gather(torch.zeros(3, dtype=torch.uint8), "")


CASES: tuple[Callable[[], None], ...] = (products, pointwises, attentions, policies, states, collectives)


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def main(out: Path) -> None:
    """Compiles all programs and writes what became of each to OUT."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    compiler = Compiler()
    with mock.patch.object(launch, "run", compiler.run), mock.patch.object(launch, "DEVICE", "cpu"):
        for case in CASES:
            case()
    out.write_text(json.dumps(list(compiler.seen.values()), indent=1) + "\n")


if __name__ == "__main__":
    main()
