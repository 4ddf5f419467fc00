"""What all programs share: rounding, tensor-core steps, and sums whose order is written out.

tl.sum leaves its order to the layout, and so to the number of warps. Floating-point sums here are chains and trees of
single additions instead, the ones that the CPU form has; tl.sum is used for integers and, in attention, in one fixed
tile.
"""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def real(i, size, EVEN: tl.constexpr):
    """Which indices exist. EVEN, said by the caller: all. Comparing with an unknown size makes accesses narrow."""
    return tl.full(i.shape, 1, tl.int1) if EVEN else i < size


@triton.jit
def widen(x):
    """bf16 to fp32, exactly. The interpreter's own conversion loses subnormals."""
    if INTERPRETED:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def to_bf16(x):
    """fp32 to bf16, to nearest even. The interpreter's own conversion truncates."""
    if INTERPRETED:
        u = x.to(tl.uint32, bitcast=True)
        y = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(tl.bfloat16)
    return y


@triton.jit
def round_bf16(x):
    """The one rounding at the root of a sum. A zero comes out positive: its sign could depend on the instruction."""
    u = to_bf16(x).to(tl.uint16, bitcast=True)
    return tl.where((u & 0x7FFF) == 0, 0, u).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b: steps of 16 along the inner axis, ascending, each one tensor-core accumulation into fp32."""
    return tl.dot(widen(a), widen(b), acc) if INTERPRETED else tl.dot(a, b, acc)


@triton.jit
def neighbours(x, R: tl.constexpr, N: tl.constexpr):
    """[R, N] to [R, N / 2]: each even column plus the next."""
    a, b = tl.split(tl.reshape(x, (R, N // 2, 2)))
    return a + b


@triton.jit
def tree(x, R: tl.constexpr, N: tl.constexpr):
    """[R, N] to [R], N a power of two up to 2^12: neighbours first."""
    for i in tl.static_range(12):
        if N >> i > 1:
            x = neighbours(x, R, N >> i)
    return tl.reshape(x, (R,))


@triton.jit
def hold(x):
    """x, fp32, computed here. The compiler would otherwise delay a tree's additions to the end and keep all leaves
    in registers until then."""
    if INTERPRETED:
        y = x
    else:
        y = tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    return y
