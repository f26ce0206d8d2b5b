"""Branch a key-value store in the middle of a transaction.

Three forks go on from the same open transaction: one commits it, one drops it, one adds to it first. Whichever
meets the goal is kept. A backend that keeps files only brings the journal back, and loses what was not committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.story import PYTHON, Story, inside, main, until

from statefork import Environment

APP = "/srv/kv"
PEOPLE = ("alice", "bob", "carol")
GOAL = "carol has at least 45"
TRANSFER = "begin, set alice 70, set carol 30"
CONTINUATIONS = {
    "commit": "commit",
    "roll back": "rollback",
    "add bob's 20, then commit": "set bob 30, set carol 50, commit",
}


def ask(environment: Environment, requests: str) -> str:
    """Answers, one a line, to requests with commas between them."""
    return environment.run([PYTHON, f"{APP}/store.py", *requests.split()], timeout=60).stdout.strip()


def answers(environment: Environment) -> bool:
    return environment.run([PYTHON, f"{APP}/store.py", "info"], timeout=60).ok


def start(environment: Environment) -> None:
    inside(environment, f"{PYTHON} {APP}/store.py serve {APP} </dev/null >{APP}/output 2>&1 &")
    until("the store answers", lambda: answers(environment))


def accounts(environment: Environment) -> dict[str, int]:
    balances = ask(environment, ", ".join(f"get {name}" for name in PEOPLE)).split()
    return dict(zip(PEOPLE, map(int, balances), strict=True))


def tell(environment: Environment, story: Story) -> None:
    story.title("A store with three accounts, and a transfer that is not committed yet")
    environment.upload(Path(__file__).parent / "store.py", f"{APP}/store.py")
    start(environment)
    requests = f"set alice 100, set bob 50, set carol 0, {TRANSFER}"
    for request, answer in zip(requests.split(", "), ask(environment, requests).splitlines(), strict=True):
        story.say(f"{request}: {answer}")
    story.snapshot(environment, "transfer")

    story.title("Three ways to go on, from the middle of the transaction")
    met: dict[str, bool] = {}
    with story.forks(environment, len(CONTINUATIONS), "transfer") as forks:
        for (name, requests), fork in zip(CONTINUATIONS.items(), forks, strict=True):
            story.check("the store still runs", answers(fork), story.whole)
            if not story.whole:
                story.say("only files came back: the store starts again from its journal")
                start(fork)
                story.check("the open transaction is lost", ask(fork, "commit"), "error: no open transaction")
                story.check("what was committed is not", accounts(fork), {"alice": 100, "bob": 50, "carol": 0})
                ask(fork, TRANSFER)
            ask(fork, requests)
            found = accounts(fork)
            met[name] = found["carol"] >= 45
            story.say(f"{name}: {found}; {GOAL}: {'yes' if met[name] else 'no'}")
            story.check("no money was made or lost", sum(found.values()), 150)
        (best,) = [name for name, good in met.items() if good]
        forks[list(CONTINUATIONS).index(best)].snapshot("best")
    story.say(f"the best: {best}")

    story.title("The first environment knows nothing of that, and goes on by itself")
    story.check("it has", ask(environment, "info").rsplit(",", 1)[0], "3 keys, 2 changes in an open transaction")
    story.check("roll back", ask(environment, "rollback"), "2 changes dropped")

    story.title("Keep the best")
    story.restore(environment, "best")
    if not story.whole:
        start(environment)
    story.check("accounts", accounts(environment), {"alice": 70, "bob": 30, "carol": 50})


if __name__ == "__main__":
    sys.exit(main(__doc__, tell))
