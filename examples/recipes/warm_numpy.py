"""Fork a warm numpy interpreter 50 times: no fork imports numpy or makes the data again, each has both in memory.

Each fork draws one bootstrap sample of the same data; together they give the interval of an estimate.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from examples.story import PYTHON, Story, ask, inside, listens, main, until

from statefork import Environment

HERE = "/srv/numpy"
FORKS = 50


def start(environment: Environment) -> float:
    """Seconds until the interpreter answers."""
    if not environment.run([PYTHON, "-c", "import numpy"]).ok:
        raise SystemExit("the environment has no numpy; on Debian: apt-get install python3-numpy")
    began = time.monotonic()
    inside(environment, f"rm -f {HERE}/in {HERE}/out; {PYTHON} {HERE}/interpreter.py {HERE} </dev/null >/dev/null 2>&1 &")
    until("the interpreter answers", lambda: listens(environment, HERE))
    return time.monotonic() - began


def tell(environment: Environment, story: Story) -> None:
    story.title("An interpreter with numpy imported and 100,000 people in memory")
    environment.upload(Path(__file__).parent / "inside/interpreter.py", f"{HERE}/interpreter.py")
    story.say(f"ready after {start(environment):.1f} s")
    digest = ask(environment, HERE, "digest()")
    story.snapshot(environment, "warm")

    story.title(f"{FORKS} copies, and a sample from each")
    with story.forks(environment, FORKS, "warm") as forks:

        def sampled(pair: tuple[int, Environment]) -> tuple[str | None, float]:
            seed, fork = pair
            if not story.whole:
                start(fork)
            return ask(fork, HERE, "digest()"), float(ask(fork, HERE, f"slope({seed})") or "nan")

        if not story.whole:
            story.say("only files came back: every copy imports numpy and makes the data again")
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(sampled, enumerate(forks)))
    story.check("copies with the same data in memory", sum(one == digest for one, _ in found), FORKS)
    slopes = sorted(slope for _, slope in found)
    story.check("different samples", len(set(slopes)), FORKS)
    story.say(f"0.9 is what the data were made with; the samples say {slopes[1]:.4f} to {slopes[-2]:.4f}")

    story.title("The first interpreter, asked for the same sample, says the same")
    story.check("sample 7", float(ask(environment, HERE, "slope(7)") or "nan"), found[7][1])


if __name__ == "__main__":
    sys.exit(main(__doc__, tell))
