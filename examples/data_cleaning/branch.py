"""An agent that cleans a table, and tries every idea on a fork before it does it.

In each round it looks what is wrong, proposes steps, tries each of them in a copy of its environment, and goes on in the
copy that is best. Some steps look good and lose data (dropping the bad rows mends everything at once): tried on
a fork they cost nothing. At the end the table is compared with the true one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.story import PYTHON, Story, inside, main

from statefork import Environment

HERE = Path(__file__).parent
APP = "/srv/cleaning"
TABLE = f"{PYTHON} {APP}/table.py"
IDEAS = {
    "order": ("trim",),
    "mail": ("trim", "lower-mail"),
    "date": ("iso-dates", "drop-bad-rows"),
    "amount": ("fill-with-zero", "plain-amounts"),
    "doubles": ("drop-doubles",),
}
"""What the agent knows: for each kind of trouble the steps that may help."""


def profile(environment: Environment) -> dict[str, int]:
    lines = inside(environment, f"{TABLE} profile {APP}/orders.csv").splitlines()
    return {kind: int(count) for kind, count in (line.split() for line in lines)}


def trouble(found: dict[str, int], orders: int) -> int:
    """What the agent wants to be small. An order that is lost, or an amount that was made up, weighs more than a blot."""
    blots = sum(found[kind] for kind in IDEAS)
    return blots + 20 * (orders - found["orders"]) + 20 * found["zeros"]


def tell(environment: Environment, story: Story) -> None:
    story.title("A table with all that tables have")
    for name in ("table.py", "orders.csv"):
        environment.upload(HERE / name, f"{APP}/{name}")
    found = profile(environment)
    orders, current = found["orders"], trouble(found, found["orders"])
    story.say(", ".join(f"{kind} {count}" for kind, count in found.items()))
    path: list[str] = []
    inside(environment, "steps=")
    story.snapshot(environment, "round-0")
    while current:
        number = len(path) + 1
        story.title(f"Round {number}: trouble {current}")
        ideas = list(dict.fromkeys(step for kind, steps in IDEAS.items() if found[kind] for step in steps))
        tried: dict[str, tuple[int, dict[str, int]]] = {}
        with story.forks(environment, len(ideas), f"round-{number - 1}") as forks:
            for step, fork in zip(ideas, forks, strict=True):
                inside(fork, f'{TABLE} {step} {APP}/orders.csv && steps="$steps {step}"')
                seen = profile(fork)
                tried[step] = trouble(seen, orders), seen
                story.say(f"{step:<15} trouble {tried[step][0]}")
            best = min(tried, key=lambda step: tried[step][0])
            if tried[best][0] >= current:
                break
            forks[ideas.index(best)].snapshot(f"round-{number}")
        current, found = tried[best]
        path.append(best)
        environment.restore(f"round-{number}")
        story.say(f"kept: {best}")

    story.title("The outcome")
    true_table = (HERE / "expected.csv").read_bytes()
    story.check("orders.csv is the true table", environment.read_file(f"{APP}/orders.csv") == true_table, True)
    remembered = inside(environment, 'echo "$steps"').split()
    if story.whole:
        story.check("the shell of the last fork remembers", remembered, path)
    else:
        story.say("only files came back, and the table is a file: nothing that this agent needs was lost")
        story.check("what it noted in the shell is", remembered, [])
    story.title("The tree: one branch for each round")
    for line in str(environment.tree()).splitlines():
        story.say(line)


if __name__ == "__main__":
    sys.exit(main(__doc__, tell))
