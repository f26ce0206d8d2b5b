"""Public names: what is exported exists, and the errors are those of one tree with one code each."""

from __future__ import annotations

import inspect

import statefork
from statefork import errors, model
from waypoint.errors import WaypointError


def test_all_names_exist() -> None:
    for module in (statefork, errors, model):
        assert sorted(module.__all__) == sorted(set(module.__all__))
        assert all(hasattr(module, name) for name in module.__all__)


def test_every_error_is_of_the_tree() -> None:
    for name in errors.__all__:
        found = getattr(errors, name)
        assert inspect.isclass(found)
        assert issubclass(found, WaypointError)
        assert found.code
