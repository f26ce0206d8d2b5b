"""Every recipe, as a newcomer would start it; and the pytest plugin that one of them is about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from waypoint.session import Session
from waypoint.testing import database

ROOT = Path(__file__).parents[2]
RECIPES = sorted(script.stem for script in (ROOT / "examples/recipes").glob("*.py"))

pytestmark = pytest.mark.timeout(400)


def started(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "WAYPOINT_HOME"}
    environment["STATEFORK_HOME"] = str(home)
    argv = [sys.executable, "-m", *words]
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380, check=False)


def test_none_is_missing() -> None:
    wanted = ["browser_page", "jupyter_kernel", "parallel_pytest", "three_patches", "undo_upgrade", "warm_numpy"]
    assert wanted == RECIPES
    page = (ROOT / "docs/recipes.md").read_text()
    assert [name for name in (*RECIPES, "warm_database") if f"examples/recipes/{name}" not in page] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe(recipe: str, tmp_path: Path) -> None:
    done = started(tmp_path, f"examples.recipes.{recipe}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n   ok ") >= 3
    assert done.stdout.endswith("\nall as it should be\n")
    assert list((tmp_path / "trees").iterdir()) == []


def test_each_test_has_its_own_copy_of_the_warm_database(tmp_path: Path) -> None:
    """By the plugin as it is installed: nobody names it."""
    before = set(Path("/var/tmp").glob("waypoint-db-*"))
    done = started(tmp_path, "pytest", "-p", "no:cacheprovider", "-o", "timeout=300", "examples/recipes/warm_database")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout
    assert set(Path("/var/tmp").glob("waypoint-db-*")) <= before


def test_a_root_without_postgresql_is_told(session: Session) -> None:
    with pytest.raises(database.DatabaseError, match="PostgreSQL is not installed; on Debian: apt-get install postgresql"):
        database._start(database.Database(session))
