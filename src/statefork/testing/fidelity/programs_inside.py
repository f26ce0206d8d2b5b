"""Cases whose state lives in a process: a probe of `guest/` is sent in, started in the background and asked."""

from __future__ import annotations

import io
import tarfile
from importlib import resources
from types import ModuleType

from statefork.testing.fidelity.case import Case, slug
from statefork.testing.fidelity.guest.probe import Probe
from statefork.testing.fidelity.subject import CaseFailed, Inside, Options

__all__ = ["ProbeCase", "probe_cases"]

_ROOT = "${STATEFORK_DIR:-/var/tmp}/fidelity"
"""Expanded by the shell inside. Where forks share the host's files, each has that directory for itself."""


class ProbeCase(Case):
    """One probe class. The program is started as a plain background job, detached from terminal and output."""

    def __init__(self, kind: str, probe: type[Probe], options: Options | None = None) -> None:
        self.kind = kind
        self.name = slug(probe.__name__)
        self.summary = (probe.__doc__ or "").strip().splitlines()[0].rstrip(".")
        self.needs = frozenset(probe.needs)
        self.programs = ("python3", *probe.programs)
        self.packages = ("python3", *probe.packages)
        self.modules = probe.modules
        self.options = options or Options()
        self._module = probe.__module__.rpartition(".")[2]
        self._class = probe.__name__
        self.directory = f"{_ROOT}/{self.name}"

    def setup(self, inside: Inside) -> None:
        where = self.directory
        inside.sh(f"mkdir -p {where} && tar xf - -C {where}", stdin=_archive(self._module))
        python = inside.python(self.modules) or "python3"
        inside.sh(
            f"mkfifo {where}/ask {where}/answer; (cd {where} && exec env FIDELITY_PATIENCE={inside.patience:g} {python} -m guest.probe "
            f"{self._module} {self._class} {where} >{where}/log 2>&1 </dev/null) & echo $! >{where}/pid; disown"
        )

    def observe(self, inside: Inside) -> str:
        return self.ask(inside, "observe")

    def perturb(self, inside: Inside) -> None:
        self.ask(inside, "perturb")

    def works(self, inside: Inside) -> None:
        self.ask(inside, "works")

    def ask(self, inside: Inside, word: str) -> str:
        """`read`: were the program to die, its end of a FIFO would stay shut for ever; so its pid is watched."""
        where = self.directory
        script = (
            f"cd {where}; kill -0 $(cat pid) 2>/dev/null || {{ echo '-the program has ended:'; cat log; exit; }}; "
            f"echo {word} >ask; exec timeout {115 * inside.patience:.0f} cat answer"
        )
        answer = inside.run("timeout", f"{120 * inside.patience:.0f}", "/bin/sh", "-c", script, timeout=130)
        if not answer.startswith("+"):
            raise CaseFailed(f"{word}: {answer[1:].strip() or 'no answer'}")
        return answer[1:]


def probe_cases(kind: str, module: ModuleType, options: Options | None = None) -> list[Case]:
    """A case for every probe that the module defines, in the order in which it does."""
    found = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Probe) and thing.__module__ == module.__name__
    ]
    return [ProbeCase(kind, probe, options) for probe in found if not probe.__name__.startswith("_")]


def _archive(module: str) -> bytes:
    guest = resources.files("statefork.testing.fidelity.guest")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in ("__init__", "probe", module):
            source = (guest / f"{name}.py").read_bytes()
            info = tarfile.TarInfo(f"guest/{name}.py")
            info.size = len(source)
            info.mode = 0o644
            tar.addfile(info, io.BytesIO(source))
    return data.getvalue()
