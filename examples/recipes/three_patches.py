"""A coding agent that tries three patches at once, each on a fork of the working session, and goes on with the best.

The session is warm: the project's directory, a variable for its settings and a background process are part of it, and the fork that
wins has them too. The patches stand here in the place of a model's proposals; `best_of_n` takes those of any policy.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.story import PYTHON, Story, inside, main

from statefork import Environment
from statefork.explore import Action, Node, PassedTests, best_of_n

HERE = "/srv/project"
TESTS = f"cd {HERE} && {PYTHON} -m pytest -q -p no:cacheprovider"
ALL_UNITS = "-e 's/\\[smh\\]/[smhd]/'"
REFUSE = "        raise ValueError(text)"
PATCHES = {
    "also days": f"sed -i {ALL_UNITS} {HERE}/durations.py",
    "refuse the empty": f"sed -i 's/^    return total/    if not total:\\n{REFUSE}\\n    return total/' {HERE}/durations.py",
    "match all of it": f"sed -i {ALL_UNITS} -e "
    f"'s/^    total = 0/    if not re.fullmatch(r\"(\\\\d+[smhd])+\", text):\\n{REFUSE}\\n    total = 0/' {HERE}/durations.py",
}


def tell(environment: Environment, story: Story) -> None:
    story.title("A working session: a project with a bug, its settings, and a process in the background")
    environment.upload(Path(__file__).parent / "project", HERE)
    if not environment.run([PYTHON, "-c", "import pytest"]).ok:
        raise SystemExit("the environment has no pytest; on Debian: apt-get install python3-pytest")
    inside(environment, f"cd {HERE} && export PYTHONDONTWRITEBYTECODE=1 STYLE=strict; sleep 100000 & server=$!")
    first = environment.run(["sh", "-c", TESTS], timeout=120)
    story.check("the tests fail", first.exit_code, 1)
    story.say(first.stdout.strip().splitlines()[-1])

    story.title("Three patches at once, each judged by the tests")
    names = {command: name for name, command in PATCHES.items()}

    def told(node: Node) -> None:
        if node.action is not None:
            story.say(f"{names[node.action.command]}: {node.score:.2f}")

    outcome = best_of_n(environment, [Action(command) for command in PATCHES.values()], PassedTests(TESTS), on_node=told)
    with outcome.environment as best:
        story.check("the best", names[outcome.actions[-1].command], "match all of it")
        story.check("its tests pass", best.run(["sh", "-c", TESTS], timeout=120).exit_code, 0)
        if story.whole:
            story.check("its shell is still in", inside(best, "echo $PWD with $STYLE settings"), f"{HERE} with strict settings")
            story.check("its process still runs", inside(best, "kill -0 $server && echo yes"), "yes")
        patch = best.run(["cat", f"{HERE}/durations.py"]).stdout

    story.title("The first session was not touched; the patch is carried over")
    story.check("the tests still fail there", environment.run(["sh", "-c", TESTS], timeout=120).exit_code, 1)
    environment.write_file(f"{HERE}/durations.py", patch)
    story.check("and pass with the patch", environment.run(["sh", "-c", TESTS], timeout=120).exit_code, 0)


if __name__ == "__main__":
    sys.exit(main(__doc__, tell))
