"""The daemon's process: one per state directory, its address, and how it comes and goes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import uvicorn

from statefork.errors import Busy, HostUnsupported, StoreError, UsageError
from statefork.server.app import create_app
from statefork.server.guard.limits import Limits
from statefork.server.guard.listening import TlsFiles, bind_unix, uvicorn_config
from statefork.server.guard.logs import configure_logs
from statefork.server.guard.tokens import TokenStore
from statefork.server.settings import Settings

__all__ = ["Place", "chosen_settings", "limits_help", "serve"]

DEFAULT_PORT = 8470
_SWITCH_SECONDS = 0.0005
"""Many threads that each compute for a moment: Python's own 5 ms would be added to every second answer."""
_FOR_OTHERS = ("home", "unix_socket", "limits", "otlp_endpoint", "ttl_seconds", "idle_pause_seconds", "dialects")


@dataclass(frozen=True, slots=True)
class Place:
    """Where to listen: a unix socket, or TCP."""

    path: Path | None
    host: str = ""
    port: int = 0
    tls: TlsFiles | None = None

    @classmethod
    def chosen(
        cls, home: Path, path: Path | None, host: str | None, port: int | None, cert: Path | None, key: Path | None
    ) -> Place:
        if host is None and port is None:
            if cert or key:
                raise UsageError("TLS is for TCP: give --host and --port, too")
            return cls((path or home / "statefork.sock").absolute())
        if path is not None:
            raise UsageError("give either --socket, or --host and --port")
        if (cert is None) != (key is None):
            raise UsageError("give --tls-cert and --tls-key together")
        chosen = DEFAULT_PORT if port is None else port
        return cls(None, host or "127.0.0.1", chosen, TlsFiles(cert, key) if cert and key else None)


def chosen_settings(
    home: Path,
    place: Place,
    given: Sequence[str],
    ttl: float | None,
    idle: float | None,
    otlp: str | None,
    dialects: Sequence[str] = ("e2b", "swe-rex"),
) -> Settings:
    limits: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        target, kind = _setting(name)
        try:
            (limits if target == "limits" else own)[name] = kind(value)
        except ValueError:
            raise UsageError(f"--set {text}: {name} is a number") from None
    return Settings(
        home=home,
        unix_socket=place.path is not None,
        limits=Limits(**limits),
        otlp_endpoint=otlp or None,
        ttl_seconds=ttl,
        idle_pause_seconds=idle,
        dialects=tuple(dialects),
        **own,
    )


def _setting(name: str) -> tuple[str, type]:
    for target, owner in (("limits", Limits), ("settings", Settings)):
        for one in dataclasses.fields(owner):
            if one.name == name and not (target == "settings" and name in _FOR_OTHERS):
                return target, float if "float" in str(one.type) else int
    raise UsageError(f"there is no setting {name!r}; `statefork serve --set help` lists them")


def limits_help() -> str:
    lines = []
    for owner in (Settings, Limits):
        for one in dataclasses.fields(owner):
            if owner is Limits or one.name not in _FOR_OTHERS:
                value = one.default if one.default is not dataclasses.MISSING else "by the number of processors"
                lines.append(f"{one.name} ({value})")
    return "\n".join(lines)


def serve(
    settings: Settings, place: Place, *, log: IO[str], log_level: str = "info", ready: Callable[[str], None]
) -> None:
    """Until SIGTERM or SIGINT. `ready` is told the address when /readyz will say 200."""
    settings.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    _need_a_token(settings, place)
    _raise_limits()
    sys.setswitchinterval(_SWITCH_SECONDS)
    configure_logs(log, log_level)
    app = create_app(settings)  # refuses a second daemon over one state directory
    listening = _listen(place)
    config = uvicorn_config(app, settings.limits, place.tls)
    server = _Server(config, lambda: ready(_address(place, listening)))
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
        if place.path is not None:
            place.path.unlink(missing_ok=True)
    if not server.started:
        raise StoreError("the daemon could not start; its log, above, tells why")
    _leave_threads_behind(log)


def _leave_threads_behind(log: IO[str]) -> None:
    """Those that wait for commands which go on without us would keep this process from ending."""
    if any(thread is not threading.current_thread() and not thread.daemon for thread in threading.enumerate()):
        log.flush()
        sys.stdout.flush()
        os._exit(0)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with self.capture_signals():
            await self._serve(sockets)
            self._captured_signals.clear()  # it would kill itself with them again, after all is in order

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._ready()


def _need_a_token(settings: Settings, place: Place) -> None:
    if place.path is not None:
        return
    tokens = TokenStore(settings.directory / "server.db")
    try:
        if not tokens.any_active():
            raise UsageError(
                "on TCP every request needs a token, and there is none yet: `statefork token create --scope admin`"
            )
    finally:
        tokens.close()


def _listen(place: Place) -> socket.socket:
    if place.path is None:
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((place.host, place.port))
        except OSError as error:
            made.close()
            raise HostUnsupported(f"cannot listen on {place.host} port {place.port}: {error.strerror}") from error
        return made
    _not_in_use(place.path)
    return bind_unix(place.path)


def _not_in_use(path: Path) -> None:
    """A socket that a dead daemon left is replaced, one that somebody listens on is not."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
    raise Busy(f"something listens on {path} already")


def _address(place: Place, listening: socket.socket) -> str:
    if place.path is not None:
        return str(place.path)
    name = listening.getsockname()
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'https' if place.tls else 'http'}://{host}:{name[1]}"


def _raise_limits() -> None:
    """Each client, each command and each thread's view of the store is a descriptor or three."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

