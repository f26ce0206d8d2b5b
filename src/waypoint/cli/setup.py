"""`waypoint setup`: bring what Waypoint does not carry, once for the host; a second run finds it there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import click

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel import tools

__all__ = ["setup"]


@dataclass(frozen=True, slots=True)
class _Done:
    """One thing that setup looks after; `changed` says that this run brought it."""

    what: str
    detail: str
    changed: bool


@click.command()
@click.option("--system-packages", is_flag=True, help="Also install the Debian packages that Waypoint uses.")
@click.option("--all-packages", is_flag=True, help="Also those of the other backends and of the tests.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def setup(system_packages: bool, all_packages: bool, as_json: bool) -> None:
    """Get a CRIU that works on this kernel and compile Waypoint's own two programs.

    Both go into one directory for the whole host: $WAYPOINT_TOOLS, else /opt/waypoint.
    The host's packages are not touched unless --system-packages or --all-packages is given.
    """
    packages = [_packages(everything=all_packages)] if system_packages or all_packages else []
    done = [*packages, _criu(), *(_program(program) for program in tools.PROGRAMS), _quick()]
    if as_json:
        own = tools.quick_criu()
        document = {
            "prefix": str(tools.prefix()),
            "criu": {"version": tools.criu_version(), "argv": tools.criu_argv()},
            "own_criu": None if own is None else list(own.argv),
            "programs": {program.name: str(tools.program_path(program)) for program in tools.PROGRAMS},
            "done": [asdict(one) for one in done],
            "changed": any(one.changed for one in done),
        }
        click.echo(json.dumps(document))
        return
    for one in done:
        click.echo(f"{one.what:<10} {'ready now' if one.changed else 'was ready'}   {one.detail}")


def _packages(*, everything: bool) -> _Done:
    """A package that this release lacks is named and left out: `waypoint doctor` then says which feature lacks it."""
    from waypoint.kernel.packages import install_packages, listed_packages

    try:
        new = install_packages(listed_packages(everything=everything), _progress)
    except HostUnsupported as error:
        if "missing" not in error.details:
            raise
        _progress(error.message)
        return _Done("packages", f"could not be installed: {' '.join(error.details['missing'])}", changed=True)
    return _Done("packages", " ".join(new) or "all installed", changed=bool(new))


def _criu() -> _Done:
    try:
        ready = tools.current_criu()
        changed = False
    except HostUnsupported as error:
        if error.details.get("feature") != "criu":
            raise
        from waypoint.kernel.fetch import fetch_criu, locked_prefix

        _progress(f"no CRIU works on this kernel: {error.details['why']}")
        with locked_prefix() as where:
            try:
                return _Done("criu", _shown(tools.current_criu()), changed=False)  # another setup was faster
            except HostUnsupported:
                ready = fetch_criu(where, _progress)
            tools.remember_criu(ready)
        changed = True
    return _Done("criu", _shown(ready), changed)


def _quick() -> _Done:
    """The engine's own CRIU. One that cannot be built costs time and nothing else."""
    ready = tools.quick_criu()
    if ready is not None:
        return _Done("own criu", _shown(ready), changed=False)
    from waypoint.kernel.build_criu import build_criu
    from waypoint.kernel.fetch import locked_prefix

    try:
        with locked_prefix() as where:
            ready = tools.quick_criu()  # another setup may have been faster
            if ready is None:
                build_criu(where, _progress)
                ready = tools.quick_criu()
    except (HostUnsupported, KernelError) as error:
        _progress(f"no CRIU of our own, the plain one is used, which is slower: {error.message}")
        return _Done("own criu", "could not be built", changed=False)
    if ready is None:
        return _Done("own criu", "was built and does not work here", changed=False)
    return _Done("own criu", _shown(ready), changed=True)


def _shown(criu: tools.Criu) -> str:
    return f"{criu.version} at {criu.argv[-1]}"


def _program(program: tools.Program) -> _Done:
    try:
        path = tools.program_path(program)
        changed = False
    except HostUnsupported as error:
        if error.details.get("fix") != tools.SETUP:
            raise
        from waypoint.kernel.compile import compile_program
        from waypoint.kernel.fetch import locked_prefix

        _progress(f"compiling {program.source.name}")
        with locked_prefix():
            path = compile_program(program)
        tools.program_path(program)
        changed = True
    return _Done(program.name, str(path), changed)


def _progress(line: str) -> None:
    click.echo(f"setup: {line}", err=True)
