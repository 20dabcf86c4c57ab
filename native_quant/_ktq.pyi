"""The cffi module for csrc/ktq.h, which alone lists functions and constants: cffi checks each call against it."""

from typing import Any

ffi: Any  # types-cffi does not know the fields of a struct

class Symbol(int):
    """A constant KTQ_*; or a function: what it gives is an int, a pointer or nothing."""

    def __call__(self, *arguments: Any) -> int: ...

class Lib:
    def __getattr__(self, name: str) -> Symbol: ...

lib: Lib
