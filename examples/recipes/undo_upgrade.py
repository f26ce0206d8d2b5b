"""An undo button for a risky upgrade: snapshot, upgrade, look; if it went wrong, the machine is what it was, its services running.

The upgrade spoils the database under a running service and removes its program. A backup of the files would bring those back; here the
service itself comes back too, with its open database and its number of requests.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.story import PYTHON, Story, inside, main, until

from statefork import Environment

HERE = "/srv/ledger"


def ask(environment: Environment, *words: str) -> str:
    done = environment.run([PYTHON, f"{HERE}/ledger.py", HERE, *words], timeout=60)
    return done.stdout.strip() if done.ok else f"no answer: {(done.stderr.strip().splitlines() or ['?'])[-1]}"


def healthy(environment: Environment) -> bool:
    return " cents, request " in ask(environment, "sum")


def start(environment: Environment) -> None:
    inside(environment, f"rm -f {HERE}/socket; {PYTHON} {HERE}/ledger.py serve {HERE} </dev/null >{HERE}/log 2>&1 &")
    until("the service answers", lambda: healthy(environment))


def tell(environment: Environment, story: Story) -> None:
    story.title("A service that has been in use for a while")
    for name in ("ledger.py", "upgrade.py"):
        environment.upload(Path(__file__).parent / "inside" / name, f"{HERE}/{name}")
    start(environment)
    for cents in ("250", "1799", "-500"):
        answer = ask(environment, "add", cents)
    story.say(answer)
    total, process = answer.split()[0], answer.split()[-1]
    count = int(answer.split("request ")[1].split()[0])
    story.snapshot(environment, "before")

    story.title("The upgrade")
    inside(environment, f"{PYTHON} {HERE}/upgrade.py {HERE}")
    story.check("the service is well", healthy(environment), False)
    story.say(ask(environment, "sum"))

    story.title("Undo")
    story.restore(environment, "before")
    if story.whole:
        story.check("the same process goes on", ask(environment, "sum"), f"{total} cents, request {count + 1} of process {process}")
    else:
        story.say("only files came back: the service starts again, and counts its requests from 1")
        start(environment)
    story.check("nothing is lost", ask(environment, "sum").split()[0], total)

    story.title("A better upgrade: tried on a fork first, then done")
    with story.forks(environment, 1, "before") as (rehearsal,):
        if not story.whole:
            start(rehearsal)
        inside(rehearsal, f"{PYTHON} {HERE}/upgrade.py {HERE} --carefully")
        story.check("the rehearsal's service is well", healthy(rehearsal), True)
    inside(environment, f"{PYTHON} {HERE}/upgrade.py {HERE} --carefully")
    story.check("the service is well", healthy(environment), True)
    story.check("and adds up", ask(environment, "add", "1").split()[0], str(int(total) + 1))


if __name__ == "__main__":
    sys.exit(main(__doc__, tell))
