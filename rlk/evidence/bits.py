"""Comparison of fp32 arrays as integers, so that -0.0 differs from 0.0 and a NaN is a value like any other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlk.evidence.arrays import F32

Words = NDArray[np.uint32]
Flags = NDArray[np.bool_]

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)


@dataclass(frozen=True)
class Difference:
    """The first place where two arrays differ, and in how many of `compared` places they do."""

    position: int
    left: np.float32
    right: np.float32
    count: int
    compared: int


def words(values: F32) -> Words:
    """The 32-bit words of fp32 values. Raises TypeError for another dtype: a cast would hide a difference."""
    if values.dtype != np.float32:
        raise TypeError(f"bits are compared in float32, not {values.dtype}")
    return np.ascontiguousarray(values).view(np.uint32)


def differing(left: F32, right: F32) -> Flags:
    """True where the words differ. Raises ValueError when the lengths differ: nothing is broadcast or cut."""
    if left.shape != right.shape:
        raise ValueError(f"lengths differ: {left.shape} and {right.shape}")
    return np.not_equal(words(left), words(right))


def first_difference(left: F32, right: F32) -> Difference | None:
    """The first differing place, or None where every word is equal. Raises ValueError for different lengths."""
    wrong = np.flatnonzero(differing(left, right))
    if not len(wrong):
        return None
    at = int(wrong[0])
    return Difference(at, left[at], right[at], len(wrong), len(left))


def _magnitude(values: F32) -> Words:
    return np.bitwise_and(words(values), _MAGNITUDE)


def is_nan(values: F32) -> Flags:
    """True where the word is a NaN of any payload."""
    return np.greater(_magnitude(values), _INFINITY)


def is_inf(values: F32) -> Flags:
    """True where the word is an infinity of either sign."""
    return np.equal(_magnitude(values), _INFINITY)


def is_positive(values: F32) -> Flags:
    """True where the word is a finite number above zero."""
    found = words(values)
    return (found > 0) & (found < _INFINITY)


def is_zero(values: F32) -> Flags:
    """True where the word is +0.0."""
    return np.equal(words(values), 0)


def is_negative_zero(values: F32) -> Flags:
    """True where the word is -0.0."""
    return np.equal(words(values), _SIGN)


def show(value: np.float32) -> str:
    """The shortest decimal text that reads back as this fp32 value."""
    return str(np.float32(value))


def hex_word(value: np.float32) -> str:
    """The word as text: 0x3f800001."""
    return f"0x{int(np.float32(value).view(np.uint32)):08x}"
