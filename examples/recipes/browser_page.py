"""Fork a browser page in three: headless Chromium with a page whose JavaScript is running and whose state is in no storage.

Each copy goes on clicking its own way, from the same basket.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.story import PYTHON, Story, inside, main, until

from statefork import Environment

HERE = "/srv/browser"
BASKET = "document.getElementById('sum').textContent + ' for ' + basket.join(', ')"
CHROMIUM = (
    "chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
    f"--remote-debugging-port=9222 --user-data-dir={HERE}/profile file://{HERE}/shop.html"
)


def evaluate(environment: Environment, expression: str) -> str:
    done = environment.run([PYTHON, f"{HERE}/page.py", expression], timeout=120)
    return done.stdout.strip() if done.ok else ""


def start(environment: Environment) -> None:
    if not environment.run(["sh", "-c", "command -v chromium"]).ok:
        raise SystemExit("the environment has no Chromium; on Debian: apt-get install chromium")
    # A browser that does not come up on a busy machine is started once more.
    script = f"cd {HERE}; for i in 1 2 3; do rm -rf profile; timeout -k 5 100000 {CHROMIUM}; sleep 1; done"
    inside(environment, f"setsid sh -c {script!r} </dev/null >{HERE}/log 2>&1 &")
    until("the page's clock ticks", lambda: evaluate(environment, "ticks > 3") == "true")


def tell(environment: Environment, story: Story) -> None:
    story.title("A page with a basket; it is nowhere but in the page's memory")
    for name in ("page.py", "shop.html"):
        environment.upload(Path(__file__).parent / "inside" / name, f"{HERE}/{name}")
    start(environment)
    for what in ("bread", "cheese"):
        evaluate(environment, f"put('{what}')")
    before = evaluate(environment, BASKET)
    story.say(f"the basket: {before}")
    story.snapshot(environment, "basket")

    story.title("Three copies of the page go on, each its own way")
    ways = {"wine": '"22 for bread, cheese, wine"', "bread": '"13 for bread, cheese, bread"', "cheese": '"17 for bread, cheese, cheese"'}
    with story.forks(environment, len(ways), "basket") as forks:
        for (what, wanted), fork in zip(ways.items(), forks, strict=True):
            if not story.whole:
                story.say("only files came back: a new browser has an empty basket")
                start(fork)
                story.check("the basket", evaluate(fork, BASKET), '"0 for "')
                continue
            story.check("the same basket", evaluate(fork, BASKET), before)
            ticks = int(evaluate(fork, "ticks") or -1)
            until("its clock goes on", lambda fork=fork, ticks=ticks: int(evaluate(fork, "ticks") or -1) > ticks)
            evaluate(fork, f"put('{what}')")
            story.check(f"put {what}", evaluate(fork, BASKET), wanted)

    story.title("The first page was never touched")
    story.check("the basket", evaluate(environment, BASKET), before)


if __name__ == "__main__":
    sys.exit(main(__doc__, tell))
