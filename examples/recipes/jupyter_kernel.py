"""Fork a Jupyter kernel in the middle of a notebook: three ways to go on, from the same variables and the same cell number.

The kernel is driven through its own client, over its own sockets.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.story import PYTHON, Story, inside, main, until

from statefork import Environment

HERE = "/srv/notebook"
CELLS = (
    "import collections; words = 'the cat and the dog and the bird'.split()",
    "count = collections.Counter(words); letters = (letter for word in words for letter in word); next(letters)",
)
WAYS = {
    "most common": ("count.most_common(1)", "[3] [('the', 3)]"),
    "next letter": ("next(letters)", "[3] 'h'"),
    "forget": ("words.clear(); len(words)", "[3] 0"),
}


def cell(environment: Environment, code: str) -> str:
    done = environment.run([PYTHON, f"{HERE}/cell.py", f"{HERE}/kernel.json", code], timeout=120)
    if not done.ok:
        raise SystemExit(f"the cell {code!r} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def start(environment: Environment) -> None:
    if not environment.run([PYTHON, "-c", "import ipykernel, jupyter_client"]).ok:
        raise SystemExit("no Jupyter; on Debian: apt-get install python3-ipykernel python3-jupyter-client")
    # IPython's history is an SQLite database that a restored kernel could not write to (docs/fidelity.md): it stays in memory.
    kernel = f"{PYTHON} -Xfrozen_modules=off -m ipykernel_launcher -f {HERE}/kernel.json --HistoryManager.hist_file=:memory:"
    inside(environment, f"cd {HERE}; rm -f kernel.json; {kernel} </dev/null >{HERE}/log 2>&1 &")
    until("the kernel is up", lambda: environment.run(["test", "-s", f"{HERE}/kernel.json"]).ok)
    for code in CELLS:
        cell(environment, code)


def tell(environment: Environment, story: Story) -> None:
    story.title("A notebook of two cells")
    environment.upload(Path(__file__).parent / "inside/cell.py", f"{HERE}/cell.py")
    start(environment)
    story.snapshot(environment, "two-cells")

    story.title("Three third cells")
    with story.forks(environment, len(WAYS), "two-cells") as forks:
        for (name, (code, wanted)), fork in zip(WAYS.items(), forks, strict=True):
            if not story.whole:
                story.say("only files came back: a new kernel runs the notebook again")
                start(fork)
            story.check(name, cell(fork, code), wanted)

    story.title("The first kernel has seen none of them")
    story.check("its third cell", cell(environment, "len(words), next(letters)"), "[3] (8, 'h')")

    if story.whole:
        story.title("Back to after the second cell: its number, its variables and the open generator")
        story.restore(environment, "two-cells")
        story.check("its third cell", cell(environment, "len(words), next(letters)"), "[3] (8, 'h')")


if __name__ == "__main__":
    sys.exit(main(__doc__, tell))
