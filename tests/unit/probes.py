"""What tests of the numeric floors share: data that tells orders apart, byte equality, and error against float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Record = Callable[[str, object], None]


def spread(*shape: int, seed: int, factor: float = 2.0) -> torch.Tensor:
    """bf16 values whose sizes span many powers of two, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape, generator=generator).mul(factor).exp()
    return (torch.randn(shape, generator=generator) * sizes).to(torch.bfloat16)


def normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """bf16 values as activations and weights have them: where accuracy is measured."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(torch.bfloat16)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The integer view of a tensor: equal only where every byte is, so that -0 is not 0 and a NaN equals itself."""
    return t.contiguous().view(VIEWS[t.element_size()])


def moved(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ in any byte."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{a.dtype} {a.shape} against {b.dtype} {b.shape}"
    return int((bits(a) != bits(b)).sum())


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Every byte is equal; the failure names count, first index, both values and both hex words."""
    count = moved(found, expected)
    if count:
        first = tuple(int(i) for i in (bits(found) != bits(expected)).nonzero()[0])
        digits, mask = 2 * found.element_size(), (1 << 8 * found.element_size()) - 1
        words = [f"{t[first].item()!r} 0x{int(bits(t)[first]) & mask:0{digits}x}" for t in (found, expected)]
        raise AssertionError(f"{what}: {count} of {found.numel()} differ, first at {first}: {words[0]}, not {words[1]}")


def assert_moved(other: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """The probe is not vacuous: `what` would have changed its bits."""
    assert moved(other, expected) > 0, f"the probe cannot tell: {what} gives the same bits"


def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, N] fp32 of a [M, K] and b [N, K]: one accumulator an element, k ascending, one torch operation a step."""
    total = torch.zeros(a.shape[0], b.shape[0])
    for k in range(a.shape[1]):
        total = total + a[:, k, None].float() * b[None, :, k].float()
    return total


def left_to_right(leaves: torch.Tensor) -> torch.Tensor:
    """The order that a loop over partials has, and the tree has not."""
    total = leaves[0]
    for leaf in leaves[1:]:
        total = total + leaf
    return total


def rms_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean square of found - exact, exact in float64."""
    assert exact.dtype == torch.float64
    return float((found.double() - exact).square().mean().sqrt())


def assert_as_accurate(found: torch.Tensor, ordinary: torch.Tensor, exact: torch.Tensor, record: Record) -> None:
    """The RMS error against float64 is at most 1.05 times that of the library's ordinary op on the same data."""
    ours, theirs = rms_error(found, exact), rms_error(ordinary, exact)
    record("rms_error", f"{ours:.4g}")
    record("rms_error_of_the_ordinary_op", f"{theirs:.4g}")
    assert ours <= 1.05 * theirs, f"RMS error {ours:.4g}, the ordinary op's is {theirs:.4g}"
