"""Run a test suite in parallel from one warm state: pytest has collected, the modules are imported, and each fork runs its share.

Workers that are started (pytest-xdist) import and collect once each. Here that is done once, and forked.
"""

from __future__ import annotations

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from examples.story import PYTHON, Story, inside, main, until

from statefork import Environment

HERE = "/srv/suite"
FORKS = 4


def warm(environment: Environment) -> float:
    """Start pytest and wait until it stands at the gate; seconds."""
    if not environment.run([PYTHON, "-c", "import pytest"]).ok:
        raise SystemExit("the environment has no pytest; on Debian: apt-get install python3-pytest")
    began = time.monotonic()
    run = f"{PYTHON} -m pytest -p gate -p no:cacheprovider -rA --tb=short"
    inside(environment, f"cd {HERE} && rm -f share collected; PYTHONPATH={HERE} {run} </dev/null >{HERE}/report 2>&1 &")
    until("pytest has collected", lambda: environment.run(["test", "-s", f"{HERE}/collected"]).ok)
    return time.monotonic() - began


def share(environment: Environment, number: int, of: int) -> set[str]:
    """Let it run its share: the tests that passed."""
    environment.run(["sh", "-c", f"echo {number}/{of} >{HERE}/share"], timeout=60)

    def ended() -> bool:
        return environment.run(["grep", "-qE", "^=+ .* in [0-9.]+s", f"{HERE}/report"]).ok

    until("pytest has ended", ended)
    report = environment.run(["cat", f"{HERE}/report"]).stdout
    return set(re.findall(r"^PASSED (\S+)", report, re.MULTILINE))


def tell(environment: Environment, story: Story) -> None:
    here = Path(__file__).parent
    story.title("pytest, with everything imported and collected, stands before the first test")
    environment.upload(here / "suite", HERE)
    environment.upload(here / "inside/gate.py", f"{HERE}/gate.py")
    story.say(f"{warm(environment):.1f} s to get there")
    total = int(inside(environment, f"cat {HERE}/collected"))
    story.snapshot(environment, "collected")

    story.title(f"{FORKS} forks, each runs its share")
    passed: list[str] = []
    with story.forks(environment, FORKS, "collected") as forks:
        if not story.whole:
            for fork in forks:
                story.say(f"only files came back: {warm(fork):.1f} s to get there again")
        with ThreadPoolExecutor(FORKS) as pool:
            for number, tests in enumerate(pool.map(lambda pair: share(pair[1], pair[0], FORKS), enumerate(forks))):
                story.say(f"fork {number}: {len(tests)} passed")
                passed += tests
    story.check("tests that passed", len(passed), total)
    story.check("tests that ran twice", len(passed) - len(set(passed)), 0)

    story.title("The first one still stands at the gate: it can run them all")
    story.check("passed", len(share(environment, 0, 1)), total)


if __name__ == "__main__":
    sys.exit(main(__doc__, tell))
