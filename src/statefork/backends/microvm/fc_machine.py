"""Firecracker, by its public API: boot, pause, full and diff snapshots, load with a private mapping of the memory.

This has been written against the API's documentation and tested against a server that speaks it; it has not run with
a real Firecracker yet, because no host with a usable KVM was at hand (docs/decisions/microvm.md).

A snapshot holds the paths of the disk and of the socket as they were given. They are given relative to the directory
that Firecracker is started in, so every copy of a machine has its own disk and its own socket.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from statefork.backends.microvm import fc_network
from statefork.backends.microvm.fc_api import Api
from statefork.backends.microvm.memory import overlay_data, sparse_copy, stored_bytes
from statefork.backends.microvm.vmm import Machine, Process, Saved, Spec, Vmm, connected_socket
from statefork.errors import KernelError, NotFound, SessionDead, StoreError

__all__ = ["PROGRAM", "Firecracker"]

PROGRAM = "firecracker"
AGENT_PORT = 1024
_API, _VSOCK, _DISK = "api.socket", "vsock.socket", "disk.img"
_NOTE, _LOG = "machine.json", "firecracker.log"
_START_TIMEOUT = 30.0
_COMMON = "console=ttyS0 quiet loglevel=1 panic=1 reboot=k pci=off audit=0 mitigations=off statefork.agent=vsock"


class FirecrackerMachine(Machine):
    keeps_connection = False

    def __init__(self, spec: Spec, directory: Path, process: Process, network: fc_network.TapNetwork | None) -> None:
        self.directory = directory
        self.api = Api(directory, _API)
        self._spec = spec
        self._process = process
        self._network = network
        self._reference: Path | None = None
        self._owned = True
        self._still = threading.Lock()

    @classmethod
    def start(cls, spec: Spec, disk: Path, directory: Path) -> FirecrackerMachine:
        """A Firecracker that has been told nothing yet, beside a copy of the disk."""
        sparse_copy(disk, directory / _DISK)
        argv = [PROGRAM, "--api-sock", _API, "--id", directory.name]
        network = fc_network.TapNetwork(directory.name) if spec.network == "tap" else None
        descriptors = []
        if network is not None:
            descriptors.append(network.namespace)
            argv = ["nsenter", f"--net=/proc/self/fd/{network.namespace}", *argv]
        try:
            process = Process.start(argv, directory, directory / _LOG, descriptors)
        except BaseException:
            if network is not None:
                network.close()
            raise
        machine = cls(spec, directory, process, network)
        with ended_on_failure(machine):
            try:
                machine.api.wait(lambda: process.alive, _START_TIMEOUT)
            except SessionDead as error:
                raise KernelError(f"Firecracker did not come up: {process.said() or error.message}") from error
            if network is not None:
                network.let_go()
            (directory / _NOTE).write_text(json.dumps({"spec": spec.row(), "pid": process.pid}))
        return machine

    @classmethod
    def attach(cls, directory: Path) -> FirecrackerMachine:
        try:
            row = json.loads((directory / _NOTE).read_text())
            running = Path(f"/proc/{row['pid']}/cwd").samefile(directory)
        except (OSError, ValueError, KeyError):
            running = False
        if not running:
            raise NotFound(f"no machine of Firecracker runs in {directory}; give the directory that one was booted in")
        machine = cls(Spec.of(row["spec"]), directory, Process(row["pid"], directory / _LOG), None)
        machine._owned = False
        return machine

    def configure(self) -> None:
        words = [_COMMON, *([fc_network.KERNEL_WORDS] if self._spec.network == "tap" else [])]
        self.api.put(
            "/machine-config",
            vcpu_count=self._spec.vcpus,
            mem_size_mib=self._spec.memory_mib,
            smt=False,
            track_dirty_pages=True,
        )
        self.api.put(
            "/boot-source",
            kernel_image_path=str(self._spec.kernel),
            initrd_path=str(self._spec.initrd),
            boot_args=" ".join(words),
        )
        self.api.put("/drives/root", drive_id="root", path_on_host=_DISK, is_root_device=False, is_read_only=False)
        self.api.put("/vsock", guest_cid=3, uds_path=_VSOCK)
        if self._spec.network == "tap":
            self.api.put(
                "/network-interfaces/eth0",
                iface_id="eth0",
                guest_mac=fc_network.GUEST_MAC,
                host_dev_name=fc_network.TAP,
            )
        self.api.put("/actions", action_type="InstanceStart")

    def load(self, saved: Saved) -> None:
        """It maps the memory file privately: forks share what they have not written to."""
        request = {
            "snapshot_path": saved.state["devices"],
            "mem_backend": {"backend_type": "File", "backend_path": str(saved.memory)},
            "resume_vm": False,
        }
        try:
            self.api.put("/snapshot/load", **request, track_dirty_pages=True)
        except KernelError as error:
            if "track_dirty_pages" not in error.message:
                raise
            self.api.put("/snapshot/load", **request, enable_diff_snapshots=True)  # as it was called before 1.13
        self._reference = saved.memory

    def connect(self, timeout: float) -> socket.socket:
        """Firecracker closes the connection as long as nobody in the guest listens."""
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(OSError):
                connection = connected_socket(self.directory, _VSOCK)
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    connection.sendall(f"CONNECT {AGENT_PORT}\n".encode())
                    if _line(connection).startswith(b"OK "):
                        return connection
                except OSError:
                    pass
                connection.close()
            if time.monotonic() > deadline or not self._process.alive:
                raise SessionDead(f"machine {self.directory.name}: its agent cannot be reached")
            time.sleep(0.01)

    def save(self, into: Path, *, memory: bool) -> Saved:
        with self._still:
            began = time.perf_counter()
            self.stand_still()
            try:
                kept = into / _DISK
                state = self._save_memory(into) if memory else {}
                sparse_copy(self.directory / _DISK, kept)
            except BaseException:
                self._reference = None  # what was written since it is not known any more
                raise
            finally:
                self.go_on()
            paused_ms = (time.perf_counter() - began) * 1000
        stored = into / "memory" if memory else None
        if stored is not None and (difference := into / "difference").exists():
            # The machine goes on already: only the snapshot itself waits until it is whole.
            assert self._reference is not None
            sparse_copy(self._reference, stored)
            overlay_data(difference, stored)
            difference.unlink()
        if stored is not None:
            self._reference = stored
        memory_bytes = stored_bytes(stored) if stored else 0
        return Saved(self._spec, (kept,), stored, state, stored_bytes(kept), memory_bytes, paused_ms)

    def _save_memory(self, into: Path) -> dict[str, str]:
        """What was written since the last snapshot, where that is known; otherwise everything."""
        whole = self._reference is None or not self._reference.exists()
        target = into / ("memory" if whole else "difference")
        kind = "Full" if whole else "Diff"
        devices = into / "devices"
        self.api.put("/snapshot/create", snapshot_type=kind, snapshot_path=str(devices), mem_file_path=str(target))
        return {"devices": str(devices)}

    def stand_still(self) -> None:
        self.api.patch("/vm", state="Paused")

    def go_on(self) -> None:
        self.api.patch("/vm", state="Resumed")

    def end(self) -> None:
        if self._owned:
            self._process.kill()
        self._process.close()
        if self._network is not None:
            self._network.close()

    def last_words(self) -> str:
        return self._process.said()


class Firecracker(Vmm):
    name = "firecracker"
    program = PROGRAM
    transport = "vsock"

    def boot(self, spec: Spec, disks: Sequence[Path], directory: Path) -> FirecrackerMachine:
        machine = FirecrackerMachine.start(spec, disks[0], directory)
        with ended_on_failure(machine):
            machine.configure()
        return machine

    def revive(self, saved: Saved, directory: Path) -> FirecrackerMachine:
        if saved.memory is None:
            return self.boot(saved.spec, saved.disks, directory)
        missing = [path for path in (saved.memory, *saved.disks) if not path.exists()]
        if missing:
            raise StoreError(f"the stored state is damaged: {missing[0]} is missing")
        machine = FirecrackerMachine.start(saved.spec, saved.disks[0], directory)
        with ended_on_failure(machine):
            try:
                machine.load(saved)
                machine.go_on()
            except SessionDead as error:
                said = machine.last_words() or error.message
                raise StoreError(f"Firecracker does not take the stored state back: {said}") from error
        return machine

    def attach(self, directory: Path) -> FirecrackerMachine:
        return FirecrackerMachine.attach(directory)


def _line(connection: socket.socket) -> bytes:
    """Byte by byte: what follows the line belongs to the agent."""
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            raise ConnectionResetError("closed")
        line += piece
    return line


@contextlib.contextmanager
def ended_on_failure(machine: FirecrackerMachine) -> Iterator[None]:
    try:
        yield
    except BaseException:
        machine.end()
        raise
