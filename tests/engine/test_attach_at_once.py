"""A terminal that is attached in the very moment in which a command ends gets its prompt."""

from __future__ import annotations

from statefork.testing.fidelity.terminal import Terminal
from statefork.testing.fidelity.waypoint import SessionSubject
from waypoint.engine import Engine
from waypoint.session import Session


def test_the_prompt_comes_every_time(engine: Engine, host_session: Session) -> None:
    subject = SessionSubject(engine, host_session)
    for number in range(40):
        host_session.exec("true")
        with Terminal(subject) as terminal:
            terminal.line(f"echo got-$(({number} + 1))")
            terminal.expect(rf"^got-{number + 1}$")
