"""Branch a FastAPI server that is running, and let its copies answer different questions at once.

The shop has been open for 30 days; nothing of that is on disk. Four forks set four prices and open for 60 days more.
All of them meet the same customers, because the dice are in the snapshot too: the comparison is fair.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from examples.story import PYTHON, Story, inside, main, until

from statefork import Environment

APP = "/srv/shop"
PRICES = (6, 9, 12, 15)
URL = "http://127.0.0.1:8000"


def ask(environment: Environment, verb: str, path: str) -> dict[str, int]:
    done = environment.run(["curl", "-sS", "--fail", "-X", verb, f"{URL}{path}"], timeout=60)
    if not done.ok:
        raise SystemExit(f"{verb} {path}: {done.stderr.strip()}")
    found: dict[str, int] = json.loads(done.stdout)
    return found


def answers(environment: Environment) -> bool:
    return environment.run(["curl", "-s", "--fail", f"{URL}/report"], timeout=60).ok


def start(environment: Environment) -> None:
    if not environment.run([PYTHON, "-c", "import fastapi, uvicorn"]).ok:
        raise SystemExit("the environment has no FastAPI; on Debian: apt-get install python3-fastapi python3-uvicorn")
    inside(environment, f"cd {APP}; {PYTHON} -m uvicorn --port 8000 app:app </dev/null >{APP}/output 2>&1 &")
    until("the server answers", lambda: answers(environment))


def tell(environment: Environment, story: Story) -> None:
    story.title("A shop that has been open for 30 days")
    environment.upload(Path(__file__).parent / "app.py", f"{APP}/app.py")
    start(environment)
    before = ask(environment, "POST", "/days/30")
    story.say(f"GET /report: {before}")
    story.snapshot(environment, "open")

    story.title(f"Four prices, tried at once: {PRICES}")
    earned: dict[int, int] = {}
    with story.forks(environment, len(PRICES), "open") as forks:
        for price, fork in zip(PRICES, forks, strict=True):
            story.check("the server still runs", answers(fork), story.whole)
            if story.whole:
                story.check("in the same state", ask(fork, "GET", "/report"), before)
            else:
                story.say(
                    "only files came back: a new server knows nothing of the 30 days; they are lived through again"
                )
                start(fork)
                story.check("days", ask(fork, "GET", "/report")["days"], 0)
                ask(fork, "POST", "/days/30")
            ask(fork, "POST", f"/price/{price}")
            after = ask(fork, "POST", "/days/60")
            earned[price] = after["revenue"] - before["revenue"]
            story.say(f"price {price:>2}: {after['sold'] - before['sold']} sold, {earned[price]} earned")
        best = max(earned, key=lambda price: earned[price])
        story.say(f"the best: {best}")
        forks[PRICES.index(best)].snapshot("best")

    story.title("The first server was never asked, and stands where it stood")
    story.check("GET /report", ask(environment, "GET", "/report"), before)

    story.title("Keep the best")
    story.restore(environment, "best")
    if story.whole:
        after = ask(environment, "GET", "/report")
        story.check("days, price", (after["days"], after["price"]), (90, best))
        story.check("earned", after["revenue"] - before["revenue"], earned[best])
    else:
        story.say("its server would have to be started once more, and live through 90 days")


if __name__ == "__main__":
    sys.exit(main(__doc__, tell))
