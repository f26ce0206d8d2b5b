"""What `explore` and `promote` do with a winner: the options, and the doing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from statefork.environment import Environment
from statefork.errors import UsageError

__all__ = ["Wishes", "wishes_options"]

F = TypeVar("F", bound=Callable[..., Any])
_FILE = click.Path(dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Wishes:
    path: str | None
    apply: Path | None
    force: bool
    patch: Path | None
    oci: Path | None
    name: str
    keep: str | None

    def checked(self) -> Wishes:
        if (self.apply or self.patch) and self.path is None:
            raise UsageError("--apply and --patch need --path: which directory of the environment?")
        return self

    def __bool__(self) -> bool:
        return bool(self.apply or self.patch or self.oci or self.keep)

    def fulfil(self, environment: Environment, began: str, steps: Sequence[str]) -> dict[str, str]:
        """Returns what was written, by the option that asked for it."""
        from statefork.explore.changes import changed_files
        from statefork.explore.oci import write_image
        from statefork.explore.promoting import keep

        done: dict[str, str] = {}
        if self.apply or self.patch:
            assert self.path is not None
            with changed_files(environment, began, self.path) as changes:
                if self.patch:
                    self.patch.write_bytes(changes.patch())
                    done["patch"] = str(self.patch)
                if self.apply:
                    changes.apply(self.apply, force=self.force)
                    done["applied"] = str(self.apply)
        if self.oci:
            write_image(environment, began, self.oci, name=self.name, history=steps)
            done["oci"] = str(self.oci)
        if self.keep:
            done["kept"] = keep(environment, self.keep)
        return done


def wishes_options(command: F) -> F:
    options = [
        click.option(
            "--path", metavar="DIR", help="The directory in the environment that --apply and --patch are about."
        ),
        click.option(
            "--apply",
            type=click.Path(file_okay=False, exists=True, path_type=Path),
            help="Apply the winner's changes of --path to this directory, unless it has others.",
        ),
        click.option("--force", is_flag=True, help="With --apply: overwrite what differs."),
        click.option("--patch", type=_FILE, help="Write them as a patch for `git apply`."),
        click.option("--oci", type=_FILE, help="Write the winner's files as an OCI image archive."),
        click.option(
            "--name",
            default="localhost/statefork-winner:latest",
            show_default=True,
            help="With --oci: the image's name.",
        ),
        click.option("--keep", metavar="NAME", help="Keep the winner as a session or container of this name."),
    ]
    for option in reversed(options):
        command = option(command)
    return command
