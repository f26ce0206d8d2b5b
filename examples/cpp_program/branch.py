"""Branch a C++ program in the middle of its work: a travelling salesman whose tour exists only in memory.

Twice, four forks go on from the best tour so far at four temperatures, and the shortest is kept. At the end an old
state is brought back and made to go the same way again: if every byte of its memory came back, it takes exactly the same
turns, and arrives at the same tour to the last digit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from examples.story import Story, ask, inside, listens, main, until

from statefork import Environment

APP = "/srv/solver"
CITIES = 400
WARM_UP = "anneal 200000 60"
TEMPERATURES = (0, 8, 25, 70)
ROUNDS = 2


def compiled(directory: Path) -> Path:
    """Static, so that it runs in any root file system."""
    program = directory / "solver"
    source = Path(__file__).parent / "solver.cpp"
    try:
        subprocess.run(["g++", "-O2", "-static", "-o", str(program), str(source)], check=True)
    except FileNotFoundError:
        raise SystemExit("no C++ compiler on this machine; on Debian: apt-get install g++") from None
    return program


def start(environment: Environment) -> None:
    inside(environment, f"{APP}/solver {APP} {CITIES} </dev/null >/dev/null 2>&1 &")
    until("the program listens", lambda: listens(environment, APP))


def answer(environment: Environment, request: str) -> tuple[float, int]:
    """The tour's length, and how many changes were tried."""
    said = ask(environment, APP, request)
    if said is None:
        raise SystemExit(f"no answer to {request!r}")
    length, tried = said.split()
    return float(length), int(tried)


def tell(environment: Environment, story: Story) -> None:
    story.title(f"A tour of {CITIES} cities")
    with tempfile.TemporaryDirectory() as scratch:
        environment.upload(compiled(Path(scratch)), f"{APP}/solver")
    start(environment)
    story.say(f"in the order of the map: {answer(environment, 'length')[0]:.0f}")
    warm = answer(environment, WARM_UP)
    story.say(f"after a first {warm[1]} changes: {warm[0]:.0f}")
    story.snapshot(environment, "warm")
    if not story.whole:
        lost(environment, story)
        return

    at, best = "warm", warm
    for number in range(1, ROUNDS + 1):
        story.title(f"Round {number}: four temperatures, each from the tour of {best[0]:.0f}")
        lengths: list[tuple[float, int]] = []
        with story.forks(environment, len(TEMPERATURES), at) as forks:
            for temperature, fork in zip(TEMPERATURES, forks, strict=True):
                story.check("the program goes on from", answer(fork, "length"), best)
                lengths.append(answer(fork, f"anneal 200000 {temperature}"))
                story.say(f"at {temperature:>2} degrees: {lengths[-1][0]:.0f}")
            winner = lengths.index(min(lengths))
            forks[winner].snapshot(f"round-{number}")
        at, best = f"round-{number}", lengths[winner]
        story.say(f"kept: {TEMPERATURES[winner]} degrees, {best[0]:.0f}")

    story.title("Keep the best")
    story.restore(environment, at)
    story.check("the tour", answer(environment, "length"), best)
    story.check("shorter than after the warm-up", best[0] < warm[0], True)

    story.title("The same way again, from the first snapshot")
    went = []
    for _ in range(2):
        story.restore(environment, "warm")
        went.append(answer(environment, "anneal 100000 30"))
    story.check("both arrive at", went[1], went[0])
    story.check("changes tried", went[0][1], warm[1] + 100000)


def lost(environment: Environment, story: Story) -> None:
    story.title("Only files are kept here")
    story.restore(environment, "warm")
    story.check("the program still runs", listens(environment, APP), False)
    start(environment)
    story.check("started again, it has tried", answer(environment, "length")[1], 0)
    story.say("the tour was in memory and is lost: on this backend it would have to be computed again for every branch")


if __name__ == "__main__":
    sys.exit(main(__doc__, tell))
