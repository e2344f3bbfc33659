"""What types keywords and settings take, and their values in plain Python.

Which values are right is the program's to say; here a value only becomes a text or a number that it
can read, whatever library it is from.

*Invariant:* a value of a wrong type is a TypeError that names the keyword, before anything starts.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral, Real
from typing import Any

from cuda_cluster import _table


@dataclass(frozen=True)
class Kind:
    """What a keyword takes, in words, and how it becomes plain; `plain` raises TypeError otherwise."""

    words: str
    plain: Callable[[Any], Any]

    def take(self, name: str, value: Any) -> Any:
        """A value in plain Python; raises TypeError and ValueError with the keyword's name."""
        try:
            return self.plain(_unboxed(value))
        except TypeError:
            raise TypeError(f"{name} must be {self.words}, not {value!r}") from None
        except _Unsayable as error:
            raise ValueError(f"{name} {error}") from None
        except ValueError as error:
            raise ValueError(f"{name} {error}: {value!r}") from None


class _Unsayable(ValueError):
    """The value may be a secret."""


def _unboxed(value: Any) -> Any:
    # NumPy's scalars, and those of its relatives.
    return value.item() if getattr(value, "shape", None) == () else value


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return operator.index(value) if isinstance(value, Integral) else float(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool) and value not in (0, 1):
        raise TypeError
    return bool(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ValueError("must not contain half of a character (a lone surrogate)") from None
    return value


def _path(value: Any) -> str:
    if "-----BEGIN " in (path := _text(os.fspath(value))):
        raise _Unsayable("must be the path of a file, not what is in one")
    return path


def _span(value: Any) -> Any:
    return f"{value.total_seconds()}s" if isinstance(value, timedelta) else _number(value)


def _each(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise TypeError
        kind = tuple if isinstance(value, tuple) else list
        return kind(of(_unboxed(one)) for one in value)

    return plain


def _named(of: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def plain(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError
        return {_text(name): of(_unboxed(one)) for name, one in value.items()}

    return plain


def _either(*ways: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The first way that takes a value."""

    def plain(value: Any) -> Any:
        for way in ways[:-1]:
            try:
                return way(value)
            except TypeError:
                pass
        return ways[-1](value)

    return plain


def _off(value: Any) -> bool:
    if value is not False:
        raise TypeError
    return False


def _nothing(value: Any) -> None:
    if value is not None:
        raise TypeError


def _on_or_off(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _tree(value: Any) -> Any:
    return _either(_nothing, _on_or_off, _number, _text, _path, _named(_tree), _each(_tree))(value)


def _spec(value: Any) -> Any:
    return _named(_tree)(value) if isinstance(value, Mapping) else _path(value)


WHOLE = Kind("a whole number", _whole)
NUMBER = Kind("a number", _number)
SWITCH = Kind("True or False", _switch)
TEXT = Kind("a text", _text)
PATH = Kind("a path, as a text or an os.PathLike", _path)
SIZE = Kind("a size, as a number or a text like '2GB'", _either(_number, _text))
LIMIT = Kind("a size, as a number or a text like '2GB', or None", _either(_off, SIZE.plain))
SPAN = Kind("a time, as seconds or a text like '5s'", _either(_text, _span))
PORTS = Kind("a port, as a number, or a text like '8786:8800'", _either(_whole, _text))
PORTS_OR_OFF = Kind("a port, an address like ':8787', or None", _either(_off, PORTS.plain))
SHARE = Kind("a share, such as 0.7, or False", _either(_off, _number))
CLASS = Kind("a class, or its path as a text", lambda it: it if isinstance(it, type) else _text(it))
NAME = Kind("a text or a whole number", _either(_text, _whole))
DEVICES = Kind(
    "a text like '0,1', a number, or a list of them",
    _either(_text, _whole, _each(_either(_text, _whole))),
)
NAMES = Kind("a text with commas or a list of texts", _either(_text, _each(_text)))
FILES = Kind("a path or a list of them", _either(_path, _each(_path)))
ENVIRONMENT = Kind(
    "a mapping of names to texts",
    _named(lambda value: str(_either(_path, _on_or_off, _number)(value))),
)
RESOURCES = Kind(
    "a mapping of names to numbers, or a text like 'GPU=1'",
    _either(_text, _named(_either(_text, _number))),
)
CONFIGURATION = Kind("a mapping of names to texts, numbers, lists and mappings", _named(_tree))
PLAIN = Kind("a text, a number, or a list or mapping of them", _tree)
SPEC = Kind("a path, a mapping, or a list of them", _either(_spec, _each(_spec)))


_KINDS = {
    "switch": SWITCH,
    "whole": WHOLE,
    "text": TEXT,
    "name": NAME,
    "path": PATH,
    "size": SIZE,
    "limit": LIMIT,
    "span": SPAN,
    "ports": PORTS,
    "devices": DEVICES,
    "names": NAMES,
    "files": FILES,
    "resources": RESOURCES,
}

#: What the program's flags take.
FLAGS: dict[str, Kind] = {
    **{keyword: _KINDS[takes] for keyword, takes in _table.TAKES.items()},
    "nthreads": WHOLE,
    "spec": SPEC,
}


def taken(given: Mapping[str, Any], kinds: Mapping[str, Kind] = FLAGS) -> dict[str, Any]:
    """Keywords with plain values, where they are known; None is left to say "as usual"."""
    return {
        name: value if value is None or name not in kinds else kinds[name].take(name, value)
        for name, value in given.items()
    }
