"""Branch a logger whose log is on disk and whose numbers are in memory.

An error storm is undone: the log and the process that writes it go back together, and the next line has the next
number. Then three forks run a service with another setting each, and the one that gets most jobs done is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.story import Story, ask, inside, listens, main, until

from statefork import Environment

HERE = Path(__file__).parent
APP = "/srv/logger"


def start(environment: Environment) -> None:
    inside(environment, f"sh {APP}/logger.sh {APP} </dev/null >/dev/null 2>&1 &")
    until("the logger listens", lambda: listens(environment, APP))


def write(environment: Environment, *lines: str) -> None:
    environment.run(["sh", "-c", f"cat >{APP}/in"], stdin="".join(f"{line}\n" for line in lines), timeout=60)


def log(environment: Environment) -> list[str]:
    return environment.read_file(f"{APP}/log").decode().splitlines()


def numbered_without_a_gap(lines: list[str]) -> bool:
    return [line.split()[0] for line in lines] == [str(number) for number in range(1, len(lines) + 1)]


def tell(environment: Environment, story: Story) -> None:
    story.title("A logger, and forty lines of an ordinary day")
    for name in ("logger.sh", "service.sh"):
        environment.upload(HERE / name, f"{APP}/{name}")
    start(environment)
    write(environment, *(f"info request {number}" for number in range(1, 39)), "error disk slow", "info all well")
    story.check("the logger counts", ask(environment, APP, "?"), "40 lines, 1 errors")
    story.snapshot(environment, "calm")

    story.title("An error storm")
    write(environment, *(f"error cannot reach the database ({number})" for number in range(1, 61)))
    story.check("the logger counts", ask(environment, APP, "?"), "100 lines, 61 errors")

    story.title("Undo it")
    story.restore(environment, "calm")
    story.check("lines in the log", len(log(environment)), 40)
    story.check("the logger still runs", listens(environment, APP), story.whole)
    if story.whole:
        story.check("and counts", ask(environment, APP, "?"), "40 lines, 1 errors")
        write(environment, "info after the storm")
        ask(environment, APP, "?")
        story.check("the next line", log(environment)[-1], "41 info after the storm")
    else:
        story.say("only files came back: the log is as it was, but the process that wrote it is gone")
        start(environment)
        write(environment, "info after the storm")
        ask(environment, APP, "?")
        story.check("a new logger begins at one again", log(environment)[-1], "1 info after the storm")

    story.title("Three settings of a service, tried at once from the calm state")
    done: dict[int, int] = {}
    attempts = (1, 2, 3)
    with story.forks(environment, len(attempts), "calm") as forks:
        for allowed, fork in zip(attempts, forks, strict=True):
            if not story.whole:
                start(fork)
            inside(fork, f"sh {APP}/service.sh {APP} {allowed}")
            counted = ask(fork, APP, "?")
            lines = log(fork)
            done[allowed] = sum(" done " in line for line in lines)
            story.say(f"{allowed} attempts: {done[allowed]} of 12 jobs done; the logger says {counted}")
            story.check("numbered without a gap", numbered_without_a_gap(lines), story.whole)
        best = max(done, key=lambda allowed: done[allowed])
        story.say(f"the best: {best} attempts")
        forks[attempts.index(best)].snapshot("best")
    story.restore(environment, "best")
    story.check("jobs done in the state that is kept", sum(" done " in line for line in log(environment)), 12)
    if story.whole:
        story.check("its logger counts", ask(environment, APP, "?"), "60 lines, 9 errors")
    story.title("The tree")
    for line in str(environment.tree()).splitlines():
        story.say(line)


if __name__ == "__main__":
    sys.exit(main(__doc__, tell))
