"""`statefork shell`: branch an environment by hand."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import click

from statefork.cli.loop import Loop
from statefork.cli.main import fail, home, note
from statefork.errors import UsageError, WaypointError
from statefork.factory import create_env_manager
from statefork.registry import backends

__all__ = ["shell"]


@click.command()
@click.option("--backend", required=True, help="A backend's name, as `statefork backends` lists them.")
@click.option("--attach", is_flag=True, help="Attach to something that exists, instead of making it.")
@click.argument("arguments", nargs=-1, metavar="[NAME=VALUE]...")
def shell(backend: str, attach: bool, arguments: tuple[str, ...]) -> None:
    """Make an environment and branch it by hand: snapshot, restore, fork, step, cmd, tree, stats, history, storage.

    The arguments are those of the method, such as: statefork shell --backend docker base_image=busybox

    Reads commands from a terminal with completion, or from a pipe; then the first error ends it.
    """
    method = _method(backend, attach)
    given = dict(_pair(argument) for argument in arguments)
    with create_env_manager(method, home=home(), **given) as environment:
        loop = Loop(environment)
        try:
            sys.exit(_talk(loop) if sys.stdin.isatty() else _obey(loop))
        finally:
            loop.close()


def _method(backend: str, attach: bool) -> str:
    """`firecracker` and `ckpt` are methods of backends with other names."""
    suffix = "attach" if attach else "build"
    names = [method.name for found in backends().values() for method in found.methods if method.attach == attach]
    if f"{backend}_{suffix}" in names:
        return f"{backend}_{suffix}"
    known = ", ".join(name.removesuffix(f"_{suffix}") for name in names)
    raise UsageError(f"no backend {backend!r} to {suffix} with; there are: {known}")


def _pair(argument: str) -> tuple[str, Any]:
    name, equals, value = argument.partition("=")
    if not equals or not name:
        raise UsageError(f"{argument!r}: write arguments as NAME=VALUE")
    return name, value


def _obey(loop: Loop) -> int:
    for line in sys.stdin:
        try:
            if not loop.handle(line.rstrip("\n")):
                break
        except WaypointError as error:
            return fail(error)
    return 0


def _talk(loop: Loop) -> int:
    note(f"{loop.current.id} on {loop.current.backend}; `help` lists the commands")
    with _completion(loop):
        while True:
            try:
                line = input(f"{loop.current.id}> ")
            except EOFError:
                click.echo()
                return 0
            except KeyboardInterrupt:
                click.echo()
                continue
            try:
                if not loop.handle(line):
                    return 0
            except WaypointError as error:
                fail(error)
            except KeyboardInterrupt:
                note("interrupted; the command in the environment goes on until its end")


@contextlib.contextmanager
def _completion(loop: Loop) -> Iterator[None]:
    import readline

    def complete(text: str, state: int) -> str | None:
        found = loop.complete(readline.get_line_buffer()[: readline.get_begidx()], text)
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(None)
