"""Checks of the arguments of the public classes. They raise ArgumentError, which names the argument and its value."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ktconvert.layouts.errors import ArgumentError, CallError

UINT16, INT64, FLOAT32 = np.dtype(np.uint16), np.dtype(np.int64), np.dtype(np.float32)
BOOL = np.dtype(np.bool_)
MARKS = (BOOL, np.dtype(np.uint8))  # dtypes of `skip`
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")
# Required dtype -> dtypes of arrays and tensors, or type -> how to convert the value
CONVERSIONS: Mapping[np.dtype[Any], Mapping[str, str]] = {
    UINT16: {
        "torch.uint16": "{}.numpy()",
        "torch.bfloat16": "{}.view(torch.uint16).numpy()",
        **{f"torch.{name}": "{}.bfloat16().view(torch.uint16).numpy()" for name in FLOATS},
        **dict.fromkeys(FLOATS, "torch.from_numpy({}).bfloat16().view(torch.uint16).numpy()"),
        **dict.fromkeys(("bfloat16", "int16"), "{}.view(np.uint16)"),
    },
    INT64: {
        **{f"torch.{name}": "{}.long().numpy()" for name in INTEGERS},
        **dict.fromkeys(INTEGERS, "{}.astype(np.int64)"),
        "torch.int64": "{}.numpy()",
        "list": "np.array({}, np.int64)",
    },
    FLOAT32: {
        **{f"torch.{name}": "{}.float().numpy()" for name in (*FLOATS, "bfloat16")},
        **dict.fromkeys(FLOATS, "{}.astype(np.float32)"),
        "torch.float32": "{}.numpy()",
        "list": "np.array({}, np.float32)",
    },
    BOOL: {
        **{f"torch.{name}": "{}.bool().numpy()" for name in INTEGERS},
        **dict.fromkeys(INTEGERS, "{}.astype(bool)"),
        **{f"torch.{name}": "{}.numpy()" for name in ("bool", "uint8")},
        "list": "np.array({}, bool)",
    },
}
F = TypeVar("F", bound=Callable[..., Any])


def check_calls(own: Collection[str] = (), remedy: str = "") -> Callable[[F], F]:
    """Return a decorator of public functions that raises CallError for unknown and missing arguments.

    It adds 0.3 microseconds to a call: leave it away from functions that programs call for each layer and token.
    own     parameters for our own classes, which help() does not show
    remedy  the message, for a function that only our own classes call
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        shown = [parameter for name, parameter in signature.parameters.items() if name not in own]
        public = signature.replace(parameters=shown)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except TypeError:
                accepted, given = public, [name for name in named if name not in own]
                if remedy:
                    accepted, given = signature, [*named]
                try:
                    require_names(function.__qualname__.removesuffix(".__init__"), accepted, arguments, given)
                except CallError as error:
                    raise CallError(remedy) if remedy else error from None
                raise

        call.__signature__ = public  # type: ignore[attr-defined]
        return cast(F, call)

    return decorate


def require_names(
    function: str,
    signature: inspect.Signature,
    arguments: Sequence[Any],
    named: Collection[str],
    optional: Collection[str] = (),
) -> None:
    """Raise CallError, which names all of them, for arguments that are unknown, given twice, too many or missing.

    named     names of the keyword arguments
    optional  parameters without a default that may be missing
    """
    parameters = signature.parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in named if not takes_any else ():
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, 1)
            remedy = f"did you mean {near[0]}?" if near else f"help(ktconvert.{function}) lists the arguments"
            raise CallError(f"{function} has no argument {name}; {remedy}")
    try:
        bound = signature.bind_partial(*arguments, **dict.fromkeys(named))
    except TypeError as error:
        raise CallError(f"{function}: {error}; help(ktconvert.{function}) lists the arguments") from None
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    required = [each.name for each in parameters.values() if each.default is each.empty and each.kind not in variable]
    if missing := [name for name in required if name not in bound.arguments and name not in optional]:
        by_name = [name for name in missing if parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY]
        needed = ", ".join(f"{name}=..." for name in by_name) or f"{', '.join(missing)} by position"
        raise CallError(f"{function} needs {needed}")


def require_integer(name: str, value: Any, lowest: int, highest: int | None = None) -> int:
    """Return a whole number as an int. Raise ArgumentError for any other value, and for a number out of range."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < lowest or (highest is not None and number > highest):
        limits = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
        raise ArgumentError(f"{name} must be an int {limits}, not {describe(value)}")
    return number


def require_one_of(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise ArgumentError unless the value is one of the choices."""
    if type(value) not in {type(choice) for choice in choices} or value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(map(repr, choices))}, not {describe(value)}")


def require_path(name: str, value: Any) -> str:
    """Return a path as a text. Raise ArgumentError for any other value."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if path == "":
        raise ArgumentError(f"{name} must be a path, not an empty text")
    if not isinstance(path, str):
        raise ArgumentError(f"{name} must be a path, not {describe(value)}")
    return path


class AnySize(str):
    """The name of a dimension that may have any size: it equals every size."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


def require_array(
    name: str, value: Any, dtypes: tuple[np.dtype[Any], ...], shape: tuple[int | AnySize, ...], meaning: str = ""
) -> None:
    """Raise ArgumentError unless the value is a contiguous NumPy array of one of the dtypes and of this shape.

    meaning  description of the values, for the message
    """
    if not isinstance(value, np.ndarray) or value.dtype not in dtypes or value.shape != shape:
        kinds = " or ".join(dtype.name for dtype in dtypes)
        needed = f"{kinds} [{', '.join(map(str, shape))}]{meaning and f' ({meaning})'}"
        raise ArgumentError(
            f"{name} must be a NumPy array of {needed}, not {describe(value)}{advise(name, value, dtypes, shape)}"
        )
    flags = value.flags
    if not flags.c_contiguous or not flags.aligned:
        raise ArgumentError(f"{name} must be contiguous and aligned; pass np.ascontiguousarray({name})")


def advise(name: str, value: Any, dtypes: tuple[np.dtype[Any], ...], shape: tuple[int | AnySize, ...] = ()) -> str:
    """Return how to make of a value an array of the first dtype and of this shape; empty if that is unknown."""
    if isinstance(value, np.ndarray) and value.dtype in dtypes:
        columns = value.shape[-1] if value.size and value.ndim else 0
        is_flat = value.ndim == len(shape) or len(shape) != 2
        if is_flat or not columns or shape != (value.size // columns, columns):
            return ""
        return f"; pass {name}.reshape(-1, {columns})"
    kind = "list" if isinstance(value, list | tuple) else str(getattr(value, "dtype", ""))
    conversion = CONVERSIONS[dtypes[0]].get(kind)
    on_cpu = "" if str(getattr(value, "device", "cpu")) == "cpu" else ".cpu()"
    return f"; pass {conversion.format(name + on_cpu)}" if conversion else ""


def describe(value: Any) -> str:
    """Return a short text that tells what was given for an argument: dtype and shape, a value, or a type."""
    if (shape := getattr(value, "shape", None)) is not None and hasattr(value, "dtype"):
        kind = "" if isinstance(value, np.ndarray) else f"{type(value).__name__} "
        device = getattr(value, "device", "cpu")
        return f"{kind}{value.dtype} {list(shape)}{'' if str(device) == 'cpu' else f' on {device}'}"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
