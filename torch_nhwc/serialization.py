"""Dataclasses as JSON, and files that are written completely or not at all."""

import dataclasses
import enum
import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def to_data(value: Any) -> Any:
    """Convert a value to JSON data: dataclasses and named tuples to objects, enumeration members to names.

    Fields of a dataclass that are made with `metadata={"json": False}` are left out.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (each for each in dataclasses.fields(value) if each.metadata.get("json", True))
        return {each.name: to_data(getattr(value, each.name)) for each in fields}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_data(each) for name, each in value._asdict().items()}
    if isinstance(value, dict):
        return {key: to_data(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_data(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value


def from_data(kind: Any, data: Any) -> Any:
    """Convert JSON data to a value of a type, by the annotations of dataclasses and named tuples.

    Raises:
        TypeError, ValueError, KeyError: The data does not fit the type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        return _first_that_fits(arguments, data)
    if origin is typing.Literal:
        if data not in arguments:
            raise ValueError(f"expected one of {', '.join(map(repr, arguments))}, got {data!r}")
        return data
    if origin in (list, tuple):
        _expect(data, list)
        if origin is tuple and arguments[-1:] != (...,):
            if len(data) != len(arguments):
                raise ValueError(f"expected {len(arguments)} values, got {len(data)}")
            return tuple(from_data(each, value) for each, value in zip(arguments, data))
        return origin(from_data(arguments[0], value) for value in data)
    if origin is dict:
        _expect(data, dict)
        return {from_data(arguments[0], key): from_data(arguments[1], value) for key, value in data.items()}
    if kind is float and data in ("inf", "-inf", "nan"):
        return float(data)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[data]
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return _record_from_data(kind, data)
    return _expect(data, (int, float) if kind is float else kind)


def to_json(value: Any) -> str:
    """Return a dataclass as JSON text."""
    return json.dumps(to_data(value), indent=1)


def from_json(kind: type[T], text: str, check: Callable[[T], object] = lambda _: None) -> T:
    """Return the dataclass that `to_json` wrote.

    Raises:
        ValueError: The text is not JSON, or not of this type, or `check` raises an error.
    """
    try:
        value: T = from_data(kind, json.loads(text))
        check(value)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{kind.__name__}.from_json: expected what {kind.__name__}.to_json writes: {error}") from error
    return value


@contextmanager
def write_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path next to a file, and replace the file by what was written there at the end.

    After an exception or a crash the file is unchanged.

    Example:
        >>> with write_whole("plan.json") as temporary:
        ...     _ = temporary.write_text("{}")
    """
    target = Path(os.path.realpath(path))  # a link keeps pointing to the file
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _first_that_fits(kinds: tuple[Any, ...], data: Any) -> Any:
    errors: list[str] = []
    for kind in sorted(kinds, key=lambda each: each is not bool):  # True is an int too
        try:
            return from_data(kind, data)
        except (KeyError, TypeError, ValueError) as error:
            errors.append(str(error))
    raise ValueError(errors[0])


def _record_from_data(kind: Any, data: Any) -> Any:
    _expect(data, dict)
    hints = typing.get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        names = [each.name for each in dataclasses.fields(kind) if each.init and each.metadata.get("json", True)]
    else:
        names = list(kind._fields)
    unknown = data.keys() - set(names)
    if unknown:
        raise ValueError(f"{kind.__name__} has no {sorted(unknown)[0]!r}")
    return kind(**{name: from_data(hints[name], data[name]) for name in names if name in data})


def _expect(data: Any, kind: Any) -> Any:
    is_number_by_mistake = isinstance(data, bool) and kind is not bool
    if kind is type(None):
        kind = types.NoneType
    if is_number_by_mistake or not isinstance(data, kind):
        name = getattr(kind, "__name__", str(kind))
        raise TypeError(f"expected {name}, got {data!r:.80}")
    return data
