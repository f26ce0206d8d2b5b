"""The commands of `statefork shell`, one method each. Several environments may be alive; one of them is the current one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable

import click

from statefork.environment import Environment
from statefork.errors import ExecTimeout, NotFound, UsageError
from statefork.model import ExecResult, Stream

__all__ = ["HELP", "Loop"]

HELP = {
    "cmd": ("LINE", "evaluate a command in the persistent shell; so does !LINE"),
    "step": ("LINE", "the same, and take a snapshot afterwards"),
    "snapshot": ("[NAME]", "store the present state"),
    "restore": ("SNAPSHOT", "go back to a snapshot, by id, name or prefix"),
    "fork": ("[N [SNAPSHOT]]", "live copies of the present state, or of a snapshot; `use` goes to one"),
    "use": ("ENVIRONMENT", "go on in another environment"),
    "envs": ("", "list the environments"),
    "pause": ("", "stand still, and free what the backend can free"),
    "resume": ("", "go on after a pause"),
    "destroy": ("ENVIRONMENT", "end one of the forks"),
    "tree": ("", "draw the snapshots and who stands where"),
    "diff": ("A [B]", "files that differ between two snapshots, or between one and now"),
    "stats": ("", "time by operation, and what snapshots stored"),
    "history": ("[FILE]", "what was done; with FILE, as JSON lines into it"),
    "storage": ("", "what the snapshots hold on to"),
    "help": ("", "this list"),
    "exit": ("", "leave, and destroy everything"),
}


class Loop:
    def __init__(self, environment: Environment) -> None:
        self.current = environment
        self._environments = {environment.id: environment}
        self._commands: dict[str, Callable[[str], None]] = {
            "cmd": self.cmd,
            "step": self.step,
            "snapshot": self.snapshot,
            "restore": self.restore,
            "fork": self.fork,
            "use": self.use,
            "envs": self.envs,
            "pause": self.pause,
            "resume": self.resume,
            "destroy": self.destroy,
            "tree": self.tree,
            "diff": self.diff,
            "stats": self.stats,
            "history": self.history,
            "storage": self.storage,
            "help": self.help,
        }

    def handle(self, line: str) -> bool:
        """Do what a line says; False if it says to end. Raises what the environment raises."""
        verb, _, rest = line.strip().partition(" ")
        if verb in ("exit", "quit"):
            return False
        if not verb or verb.startswith("#"):
            return True
        if verb.startswith("!"):
            verb, rest = "cmd", line.strip()[1:]
        if verb not in self._commands:
            raise UsageError(f"no command {verb!r}; `help` lists them, `cmd {line.strip()}` runs it inside")
        self._commands[verb](rest.strip())
        return True

    def complete(self, before: str, text: str) -> list[str]:
        """What may stand where `text` does, after `before`."""
        words = before.split()
        if not words:
            choice = [*self._commands, "exit"]
        elif words[0] in ("restore", "diff"):
            choice = [word for snapshot in self.current.snapshots() for word in (snapshot.name, snapshot.id) if word]
        elif words[0] in ("use", "destroy"):
            choice = list(self._environments)
        else:
            choice = []
        return [word + " " for word in choice if word.startswith(text)]

    def close(self) -> None:
        """End the forks; the first environment belongs to the caller."""
        for environment in list(self._environments.values())[1:]:
            environment.destroy()

    # -- commands ---------------------------------------------------------------------------------------------------

    def cmd(self, line: str) -> None:
        self._run(line)

    def step(self, line: str) -> None:
        self._run(line)
        self.snapshot("")

    def snapshot(self, name: str) -> None:
        identifier = self.current.snapshot(name or None)
        taken = next(snapshot for snapshot in self.current.snapshots() if snapshot.id == identifier)
        lost = f"; without {', '.join(taken.not_captured)}" if taken.not_captured else ""
        click.echo(f"{identifier}  {taken.duration_ms:.0f} ms{lost}")

    def restore(self, snapshot: str) -> None:
        if not snapshot:
            raise UsageError("restore what? `tree` shows the snapshots")
        result = self.current.restore(snapshot)
        anew = "; the shell started anew" if result.shell_restarted else ""
        click.echo(f"{result.snapshot}  {result.duration_ms:.0f} ms  {', '.join(result.restored)}{anew}")

    def fork(self, rest: str) -> None:
        words = rest.split()
        if len(words) > 2 or (words and not words[0].isdigit()):
            raise UsageError("fork [N [SNAPSHOT]]")
        made = self.current.fork(int(words[0]) if words else 1, from_snapshot=words[1] if len(words) > 1 else None)
        for environment in made:
            self._environments[environment.id] = environment
            click.echo(environment.id)

    def use(self, reference: str) -> None:
        self.current = self._find(reference)
        click.echo(self.current.id)

    def envs(self, rest: str) -> None:
        for environment in self._environments.values():
            mark = "*" if environment is self.current else " "
            click.echo(f"{mark} {environment.id}  {environment.state}  {environment.description}")

    def pause(self, rest: str) -> None:
        self.current.pause()

    def resume(self, rest: str) -> None:
        self.current.resume()

    def destroy(self, reference: str) -> None:
        environment = self._find(reference)
        if environment is next(iter(self._environments.values())):
            raise UsageError("this is the first environment: `exit` ends it")
        environment.destroy()
        del self._environments[environment.id]
        if environment is self.current:
            self.current = next(iter(self._environments.values()))
            click.echo(self.current.id)

    def tree(self, rest: str) -> None:
        click.echo(str(self.current.tree()))

    def diff(self, rest: str) -> None:
        words = rest.split()
        if len(words) not in (1, 2):
            raise UsageError("diff A [B]")
        found = self.current.diff(*words)
        for sign, paths in (("+", found.added), ("~", found.changed), ("-", found.removed)):
            for path in paths:
                click.echo(f"{sign} {path}")
        for sign, lines in (("+", found.processes_added), ("-", found.processes_removed)):
            for line in lines:
                click.echo(f"{sign} process {line}")

    def stats(self, rest: str) -> None:
        for name, entry in self.current.stats.operations.items():
            spread = f"{entry.min_ms:.1f} / {entry.mean_ms:.1f} / {entry.max_ms:.1f} ms"
            errors = f"  {entry.errors} failed" if entry.errors else ""
            stored = f"  files {entry.files_bytes} B  memory {entry.memory_bytes} B" if name == "snapshot" else ""
            click.echo(f"{name:<16} {entry.count:>5} x  {spread}{stored}{errors}")

    def history(self, rest: str) -> None:
        if rest:
            self.current.history.export(rest)
            return
        for record in self.current.history:
            outcome = record.error or record.snapshot or ""
            click.echo(f"{record.started_at:%H:%M:%S}  {record.operation:<16} {record.duration_ms:>9.1f} ms  {outcome}")

    def storage(self, rest: str) -> None:
        for snapshot in self.current.snapshots():
            name = f" ({snapshot.name})" if snapshot.name else ""
            click.echo(f"{snapshot.id}{name}  files {snapshot.files_bytes} B  memory {snapshot.memory_bytes} B")
        stats = self.current.stats
        click.echo(f"{stats.snapshots} snapshots  files {stats.files_bytes} B  memory {stats.memory_bytes} B")

    def help(self, rest: str) -> None:
        for name, (arguments, text) in HELP.items():
            click.echo(f"{name:<9} {arguments:<16} {text}")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _run(self, line: str) -> None:
        if not line:
            raise UsageError("which command?")
        try:
            result = self.current.exec_command(line, on_output=_show)
        except ExecTimeout as error:
            result = error.result
        _conclude(result)

    def _find(self, reference: str) -> Environment:
        words = shlex.split(reference)
        fits = [e for key, e in self._environments.items() if words and key.startswith(words[0])]
        if len(fits) != 1:
            raise NotFound(f"no single environment {reference!r}; there are: {', '.join(self._environments)}")
        return fits[0]


def _show(stream: Stream, data: bytes) -> None:
    target = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
    target.write(data)
    target.flush()


def _conclude(result: ExecResult) -> None:
    if result.shell_restarted:
        click.echo("statefork: this shell is a new one", err=True)
    if result.exit_code:
        click.echo(f"statefork: exit code {result.exit_code}", err=True)
