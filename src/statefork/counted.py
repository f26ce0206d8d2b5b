"""A number in a record that is still being found out: whoever reads it first waits for it, and nobody else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

__all__ = ["Bytes", "Counted", "as_given"]

Bytes = int | Callable[[], int]
"""How many, or what tells."""


class Counted:
    """A field of a dataclass without slots; its default is 0."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, record: None, owner: type) -> int: ...
    @overload
    def __get__(self, record: object, owner: type) -> int: ...
    def __get__(self, record: object | None, owner: type) -> int:
        if record is None:  # what the dataclass takes for the default
            return 0
        value: Bytes = vars(record)[self._name]
        if not isinstance(value, int):
            value = vars(record)[self._name] = value()
        return value

    def __set__(self, record: object, value: Bytes) -> None:
        vars(record)[self._name] = value


def as_given(record: object, name: str) -> Bytes:
    """Of one record for another: nobody waits."""
    value: Bytes = vars(record)[name]
    return value
