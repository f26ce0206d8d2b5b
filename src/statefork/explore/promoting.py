"""The winner of a search goes on: as the main environment, or under a name of its own when everything else is gone."""

from __future__ import annotations

from statefork.environment import Environment
from statefork.explore.searches import Outcome

__all__ = ["keep", "promote"]


def promote(outcome: Outcome, main: Environment) -> None:
    """`main`, which the search began with, goes on as the winner, and the winner's own environment is gone afterwards.

    What the caller did in the winner since the search counts too. If it fails, both go on as they are.
    """
    snapshot = outcome.environment.snapshot()
    getattr(main, "become", main.restore)(snapshot)  # a daemon's environments belong to nobody else: restore is all it takes
    outcome.environment.destroy()


def keep(environment: Environment, name: str) -> str:
    """The present state once more, as a session or container of that name, which outlives this process and is the caller's
    to remove. Returns the command that leads to it. Raises Unsupported where the backend's things end with their process."""
    snapshot, family = environment.snapshot(), environment.family
    return family.driver.keep(family.tree.find(snapshot).captured, name)
