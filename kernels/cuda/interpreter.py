"""Lets Triton 3.6.0's interpreter run under NumPy 2.4: programs as Python on CPU tensors, for tests without a GPU.

The interpreter holds a scalar as an array of one element and turns it into a loop bound with int(), which NumPy refuses
since 2.4 unless the array has no axis. Nothing else is changed, and nothing is done outside of the interpreter.
"""

from __future__ import annotations

from typing import Any


def repair() -> None:
    """Replaces the conversion; the interpreter installs it anew for every launch, so its installer is wrapped."""
    from triton.runtime import interpreter

    install = interpreter._patch_lang_tensor

    def repaired(tensor: Any, scope: Any) -> None:
        install(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = repaired
