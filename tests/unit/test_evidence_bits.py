"""fp32 values are compared as words: what == calls equal (zeros of both signs) differs, what it never does (NaN) may.

The needle is never at index 0, where an off-by-one would still find it.
"""

from __future__ import annotations

import numpy as np
import pytest

from rlk.evidence import bits

VALUES = np.array([-1.0, -0.5, -0.25, -0.125, -2.0], np.float32)


def _with(index: int, word: int) -> np.ndarray:
    changed = VALUES.copy()
    changed.view(np.uint32)[index] = word
    return changed


def test_equal_words_have_no_first_difference() -> None:
    assert bits.first_difference(VALUES, VALUES.copy()) is None


def test_first_difference_has_place_values_and_count() -> None:
    other = VALUES.copy()
    other.view(np.uint32)[[2, 4]] ^= 1
    found = bits.first_difference(VALUES, other)
    assert found is not None
    assert (found.position, found.count, found.compared) == (2, 2, 5)
    assert (bits.hex_word(found.left), bits.hex_word(found.right)) == ("0xbe800000", "0xbe800001")


def test_zeros_of_both_signs_are_different() -> None:
    left, right = np.array([1, 0.0], np.float32), np.array([1, -0.0], np.float32)
    assert left[1] == right[1]
    assert bits.differing(left, right).tolist() == [False, True]


def test_same_nan_is_equal_and_other_payload_is_not() -> None:
    same, other = _with(3, 0x7FC00000), _with(3, 0x7FC00001)
    assert bits.first_difference(same, same.copy()) is None
    assert bits.first_difference(same, other) is not None


def test_lengths_apart_are_refused_and_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"lengths differ: \(5,\) and \(1,\)"):
        bits.differing(VALUES, VALUES[:1])
    with pytest.raises(ValueError, match=r"lengths differ: \(1,\) and \(5,\)"):
        bits.differing(VALUES[:1], VALUES)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_other_dtypes_are_refused_and_not_cast(dtype: type) -> None:
    with pytest.raises(TypeError, match="bits are compared in float32"):
        bits.differing(VALUES.astype(dtype), VALUES)


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        (0x7FC00000, "nan"),
        (0xFFC00000, "nan"),
        (0x7F800001, "nan"),
        (0x7F800000, "inf"),
        (0xFF800000, "inf"),
        (0x7F7FFFFF, "positive"),
        (0x00000001, "positive"),
        (0x80000000, "negative zero"),
        (0x00000000, "zero"),
        (0x80000001, "negative"),
        (0xFF7FFFFF, "negative"),
    ],
)
def test_each_word_belongs_to_exactly_one_kind(word: int, kind: str) -> None:
    tests = {
        "nan": bits.is_nan,
        "inf": bits.is_inf,
        "positive": bits.is_positive,
        "negative zero": bits.is_negative_zero,
        "zero": bits.is_zero,
    }
    values = _with(3, word)
    found = {name for name, test in tests.items() if test(values).tolist() == [False, False, False, True, False]}
    assert found == {kind} - {"negative"}


def test_shown_value_reads_back_as_its_word() -> None:
    for word in (0xBE800001, 0x80000001, 0xC2F6E979, 0x80000000):
        value = np.array([word], np.uint32).view(np.float32)[0]
        assert bits.hex_word(np.float32(bits.show(value))) == f"0x{word:08x}"
