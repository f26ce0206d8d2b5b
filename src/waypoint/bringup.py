"""Bring a session's processes up: a new init, or a restored tree. Shared by new, restore, fork, resume and re-homing.

The result is live only when it has answered a handshake; until then nothing else has been touched.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from waypoint import faults
from waypoint.ahead import Stock
from waypoint.errors import BaseChanged, KernelError, SessionDead, WaypointError
from waypoint.guest import frames
from waypoint.guest.connection import Connection, connect
from waypoint.guest.layer import carry_command
from waypoint.identity import has_identity, write_identity
from waypoint.kernel import capabilities, cgroups, nat, network, processes, seccomp
from waypoint.kernel.criu_restore import Restorer
from waypoint.kernel.launch import IdmapRefused, Overlay, Surroundings, start_init
from waypoint.model import BaseRecord, Process, SnapshotRecord, Spec
from waypoint.reapply import reapply
from waypoint.store import locks
from waypoint.store.store import Store
from waypoint.verify import checker

__all__ = [
    "CHANGEABLE",
    "Live",
    "Restoring",
    "file_state",
    "go_on",
    "handshake",
    "incarnation",
    "next_upper",
    "overlay_for",
    "refuse_changed",
    "restore_processes",
    "restore_tree",
    "retire",
    "start_tree",
    "upper_numbers",
]

_INIT = "/.waypoint/init"
CHANGEABLE = ("host", "rootfs")
"""Kinds of bases that are used where they lie, so that others may change them."""


@dataclass(frozen=True, slots=True)
class Live:
    """One incarnation of a session: its PID 1 and the upper layer that it writes to."""

    init: Process
    upper: int
    layers: tuple[int, ...]
    spec: Spec
    shell: str = ""
    """What its init said of the shell when it first answered: idle, busy, starting, ..."""
    link: Connection | None = None
    """By which it did, if that was kept."""

    def columns(self) -> dict[str, Any]:
        """What the row of a session says that is this incarnation."""
        return {
            "init_pid": self.init.pid,
            "init_start": self.init.start,
            "upper": self.upper,
            "layers": self.layers,
            "spec": self.spec,
        }


Restoring = Generator[int, bool, Live]


def overlay_for(store: Store, base: BaseRecord, layers: tuple[int, ...], upper: int, idmap: int) -> Overlay:
    return Overlay(
        layers=store.paths.layers,
        lower=() if base.flat else tuple(f"{layer}/d" for layer in layers),
        base=tuple(Path(layer) for layer in base.layers),
        upper=f"{upper}/d",
        work=f"{upper}/w",
        idmap=idmap,
    )


def new_upper(store: Store, base: BaseRecord, layers: tuple[int, ...], number: int | None = None) -> int:
    """Where the base contains the store, the top layer is copied instead of stacked (docs/decisions/host-root.md)."""
    return store.make_upper(store.new_uppers(1)[0] if number is None else number, layers[0] if base.flat else None)


def next_upper(store: Store, base: BaseRecord, layers: tuple[int, ...], stock: Stock | None) -> int:
    """One that is made and filled before the restore over these layers begins: the topmost of them does not change any more."""
    upper = new_upper(store, base, layers, upper_numbers(store, base, 1, stock)[0])
    try:
        _fill(store, base, layers, upper)
    except BaseException:
        store.discard_layers([upper])
        raise
    return upper


def _fill(store: Store, base: BaseRecord, layers: tuple[int, ...], upper: int) -> None:
    """What a session's own layer has before any process of it runs."""
    if base.flat or not has_identity(store.paths.upper(upper)):  # a copy has the identity of what it is a copy of
        write_identity(store.paths.upper(upper))
    if not base.flat:
        carry_command(store.paths.upper(layers[0]), store.paths.upper(upper))


def upper_numbers(store: Store, base: BaseRecord, n: int, stock: Stock | None) -> list[int]:
    """For `new_upper`: those that are made already, as far as they go."""
    spare = stock.spares.take(n) if stock is not None and not base.flat else []
    return [*spare, *store.new_uppers(n - len(spare))] if len(spare) < n else spare


def incarnation(store: Store, upper: int) -> str:
    """Names one incarnation on the host: its network link, and in the same form its cgroups."""
    return f"{store.tag}-{upper}"


def start_tree(
    store: Store, base: BaseRecord, spec: Spec, layers: tuple[int, ...], upper: int, env: Mapping[str, str]
) -> Live:
    """Start a fresh init over the given layers."""
    groups = cgroups.make_groups(store.tag, str(upper), spec.limits, freezer=spec.files_only)
    surroundings = Surroundings(
        network=spec.network,
        hostname=spec.hostname,
        cgroups=groups,
        capabilities=capabilities.capability_mask(spec.capabilities),
        seccomp=_filter_file(store, spec),
        masked=capabilities.MASKED_PATHS,
        readonly=capabilities.READ_ONLY_PATHS,
        merge=spec.merge,
    )
    argv = [_INIT, spec.shell, spec.start.user, spec.start.workdir, store.tag]
    write_identity(store.paths.upper(upper))
    try:
        with locks.shared(store.paths.gate) as gate:  # the launcher keeps it: gc must not run before init can be seen
            try:
                overlay = overlay_for(store, base, layers, upper, spec.idmap)
                init = start_init(overlay, surroundings, argv, env, hold=[gate])
            except IdmapRefused:
                capabilities.require_shifted_ids(spec.capabilities)
                spec = replace(spec, idmap=0)
                overlay = overlay_for(store, base, layers, upper, 0)
                init = start_init(overlay, surroundings, argv, env, hold=[gate])
        faults.point("start-launched")
        live = Live(init, upper, layers, spec)
        try:
            if spec.network != "host":
                _network_up(init.pid, incarnation(store, upper), outside=spec.network == "nat")
            said = handshake(init, f"over layer {upper}")
        except BaseException:
            retire(store, live)
            raise
        return replace(live, shell=said.get("state", ""))
    except BaseException:
        cgroups.remove_groups(groups)
        raise


def _filter_file(store: Store, spec: Spec) -> Path | None:
    """The compiled system call filter, kept in the store: compiling takes tens of milliseconds."""
    if not spec.seccomp:
        return None
    path = store.paths.home / f"seccomp-{seccomp.filter_key(spec.capabilities)}"
    if not path.exists():
        fresh = path.with_name(f".{path.name}.{time.monotonic_ns()}")
        fresh.write_bytes(seccomp.filter_program(spec.capabilities))
        fresh.replace(path)
    return path


def restore_tree(
    store: Store,
    base: BaseRecord,
    snapshot: SnapshotRecord,
    spec: Spec,
    log_dir: Path,
    env: Mapping[str, str],
    *,
    verify: bool = False,
    upper: int | None = None,
    stock: Stock | None = None,
    filled: bool = False,
    beside: Callable[[], None] = lambda: None,
    begun: Restoring | None = None,
) -> Live:
    """Bring a snapshot's processes up over a new upper; a files-only snapshot starts a fresh shell over its files.

    On failure nothing of the attempt is left. `verify`: VerifyFailed when what came up differs from the snapshot's manifest.
    `log_dir`: where CRIU's log goes if it fails. `upper`: the number of the new upper, if it has one already; `filled`: see `next_upper`.
    `beside` is called while CRIU is busy, if it comes to that. `begun`: `restore_processes` of just this, which has been begun.
    """
    if snapshot.full:
        restoring = begun or restore_processes(
            store, base, snapshot, spec, log_dir, waits=verify, upper=upper, stock=stock, filled=filled, beside=beside
        )
        with contextlib.nullcontext() if stock is None else stock.undisturbed():
            return go_on(restoring, verify)
    upper = new_upper(store, base, snapshot.layers, upper)
    faults.point("up-layer")
    try:
        return start_tree(store, base, spec, snapshot.layers, upper, env)
    except BaseException:
        store.discard_layers([upper])
        raise


def go_on(restoring: Restoring, verify: bool) -> Live:
    """To the end, wherever it is."""
    try:
        if inspect.getgeneratorstate(restoring) == inspect.GEN_CREATED:
            next(restoring)
        while True:
            restoring.send(verify)
    except StopIteration as done:
        live: Live = done.value
        return live


def restore_processes(
    store: Store,
    base: BaseRecord,
    snapshot: SnapshotRecord,
    spec: Spec,
    log_dir: Path | None,
    *,
    waits: bool,
    guarded: bool = False,
    upper: int | None = None,
    stock: Stock | None = None,
    filled: bool = False,
    beside: Callable[[], None] = lambda: None,
    rooted: bool = True,
) -> Restoring:
    """It yields 0 when CRIU reads the images and the root is being mounted: nothing is made of them before it goes on.

    If the files are not there yet for it to be `rooted`, it also yields 0 before that, and goes on when they are.

    If it `waits`, it yields PID 1 when all is restored and nothing runs yet, and is sent whether to verify that; see Restorer.
    CRIU's log is beside the new upper, and goes with it: if the restore fails, it is moved to `log_dir` before, if there is one.
    `filled` and `beside`: see `restore_tree`.
    """
    layers = snapshot.layers
    groups: tuple[Path, ...] = ()
    init: Process | None = None
    outside = spec.network == "nat"
    upper = upper_numbers(store, base, 1, stock)[0] if upper is None else upper
    try:
        groups = cgroups.make_groups(store.tag, str(upper), spec.limits)
        with contextlib.ExitStack() as kept:
            new_upper(store, base, layers, upper)
            gate = kept.enter_context(locks.shared(store.paths.gate))  # CRIU keeps it: gc must not end what CRIU still works on
            restorer = kept.enter_context(
                Restorer(
                    store.paths.image(snapshot.image),
                    log_dir=store.paths.layer(upper),
                    own_network=spec.network != "host",
                    outside=outside,
                    checked=waits,
                    merge=spec.merge,
                    hold=[gate],
                    cgroups=groups,
                    template=None if stock is None else stock.template,
                )
            )
            faults.point("up-layer")
            if not rooted:
                yield 0
            if not filled:
                _fill(store, base, layers, upper)
            restorer.mount(overlay_for(store, base, layers, upper, spec.idmap))
            yield 0
            own_files = store.paths.upper(upper) if base.flat else None
            check = checker(snapshot, spec.idmap, store.paths.upper(layers[0]), own_files)

            def with_network(pid: int) -> None:
                _network_up(pid, incarnation(store, upper), outside)

            def meanwhile() -> None:
                faults.point("up-begun")
                beside()

            restoring = restorer.restore(
                with_network=with_network if outside else None,
                beside=meanwhile,
                check=check if waits else None,
                guarded=guarded,
            )
            hello = kept.enter_context(_Hello(f"from snapshot {snapshot.id}"))
            init = yield from _greeted(restoring, hello)
            faults.point("up-restored")
            reapply(init, snapshot, store.paths.image(snapshot.image))
            said = hello.answer(init)
            return Live(init, upper, layers, spec, said.get("state", ""), hello.keep() if stock is not None or guarded else None)
    except BaseException as error:
        if init is not None:
            processes.kill(init)
        if spec.network == "nat":
            nat.detach_nat(incarnation(store, upper))
        if log_dir is not None and isinstance(error, WaypointError) and "log" in error.details:
            error.details["log"] = str(_kept_log(Path(error.details["log"]), log_dir))
        store.discard_layers([upper])
        cgroups.remove_groups(groups)
        raise


def _kept_log(log: Path, directory: Path) -> Path:
    """There, if it can be moved: a full disk has no room for its name."""
    with contextlib.suppress(OSError):
        return log.replace(directory / log.name)
    return log


def _network_up(pid: int, key: str, outside: bool) -> None:
    path = f"/proc/{pid}/ns/net"
    network.loopback_up(path)
    if outside:
        nat.attach_nat(path, key)
    faults.point("up-network")


def handshake(init: Process, what: str, timeout: float = 20) -> dict[str, str]:
    """The new session answers, and its shell is there: only then may it take anybody's place."""
    with _Hello(what) as hello:
        return hello.answer(init, timeout)


class _Hello:
    """A handshake. It can be sent to an init that is held before its first instruction: that finds it when it goes on."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._connection: Connection | None = None

    def __enter__(self) -> _Hello:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def keep(self) -> Connection | None:
        """For whoever talks to it next."""
        kept, self._connection = self._connection, None
        return kept

    def say(self, init: Process, timeout: float) -> None:
        self._connection = connect(init, self._what, timeout)
        self._connection.send(frames.HELLO)

    def answer(self, init: Process, timeout: float = 20) -> dict[str, str]:
        if self._connection is None:
            self.say(init, timeout)
        assert self._connection is not None
        frame = self._connection.receive(time.monotonic() + timeout)
        if frame is None or frame.type != frames.STATE:
            raise SessionDead(f"the session {self._what} does not answer its handshake")
        lines = frame.payload.decode(errors="surrogateescape").splitlines()
        return dict(line.partition("=")[::2] for line in lines)


def _greeted(restoring: Generator[int, bool, Process], hello: _Hello) -> Generator[int, bool, Process]:
    """Say hello to what is held, so that it answers as soon as it goes on."""
    try:
        pid = next(restoring)
        try:
            with contextlib.suppress(SessionDead, OSError):  # then it is said later
                hello.say(processes.identify(pid), 1)
            verify = yield pid
        except BaseException as error:
            restoring.throw(error)
            raise
        restoring.send(verify)
    except StopIteration as done:
        init: Process = done.value
        return init
    raise AssertionError("a restore waits once at most")


def retire(store: Store, live: Live, *, wait: bool = False) -> None:
    """End an incarnation. The kernel takes its mounts down with its last process; layers are the caller's to drop."""
    processes.kill(live.init)
    if wait and not processes.wait_gone(live.init, 30):
        raise KernelError(f"process {live.init.pid} does not die")
    if live.spec.network == "nat":
        # a dying process closes its connections: with the link gone too early nobody outside would hear of it
        processes.wait_gone(live.init, 5)
        nat.detach_nat(incarnation(store, live.upper))
    groups = cgroups.groups_for(store.tag, str(live.upper), live.spec.limits, freezer=live.spec.files_only)
    cgroups.remove_groups(groups)


def file_state(base: BaseRecord, path: str) -> list[int] | None:
    """Size and time of a file of a base that is used where it lies."""
    root = "" if base.kind == "host" else base.layers[0]
    try:
        st = os.lstat(f"{root}{path}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return [st.st_size, st.st_mtime_ns]


def check_base(base: BaseRecord, snapshot: SnapshotRecord) -> None:
    """A program under a restored process must be the file that it was: the host's own root may have been upgraded."""
    if base.kind in CHANGEABLE and snapshot.full:
        refuse_changed(base, snapshot.id, snapshot.manifest.get("base_files", {}))


def refuse_changed(base: BaseRecord, snapshot: str, base_files: Mapping[str, list[int]]) -> None:
    """BaseChanged if one of these is another file than it was."""
    changed = [path for path, state in base_files.items() if file_state(base, path) != state]
    if changed:
        shown = ", ".join(sorted(changed)[:5])
        where = "on the host" if base.kind == "host" else f"in {base.source}"
        raise BaseChanged(
            f"snapshot {snapshot}: {len(changed)} programs or libraries that its processes run have changed {where} since "
            f"({shown}); they cannot be restored over other code. Undo the upgrade, or use an image as base for "
            "long-lived work (docs/bases.md)",
            files=sorted(changed),
        )
