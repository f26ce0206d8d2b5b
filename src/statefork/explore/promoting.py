"""`promote`: the winner of a search goes on as the main environment."""

from __future__ import annotations

from statefork.environment import Environment
from statefork.explore.searches import Outcome

__all__ = ["promote"]


def promote(outcome: Outcome, main: Environment) -> None:
    """`main`, which the search began with, goes on as the winner, and the winner's own environment is gone afterwards.

    What the caller did in the winner since the search counts too. If it fails, both go on as they are.
    """
    snapshot = outcome.environment.snapshot()
    main.become(snapshot)
    outcome.environment.destroy()
