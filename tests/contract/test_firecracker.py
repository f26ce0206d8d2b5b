"""Firecracker: the contract, where a real one can run; and, everywhere, what we ask of its API.

The second part runs against a server that takes Firecracker's requests, notes them and writes the files that it would
write. It is not a virtual machine, and shows nothing about one: only that we speak the API as it is documented.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rootfs import busybox_rootfs
from statefork import create_env_manager
from statefork.backends.firecracker import BACKEND
from statefork.backends.microvm.fc_machine import Firecracker, FirecrackerMachine
from statefork.backends.microvm.fc_network import TAP, TapNetwork
from statefork.backends.microvm.kernel import elf_image, fetch_kernel
from statefork.backends.microvm.memory import PAGE
from statefork.backends.microvm.vmm import Spec, machine_processes
from statefork.errors import HostUnsupported, KernelError, NotFound, SessionDead, StoreError, UsageError
from statefork.testing.contract import BackendContract, Subject
from waypoint.kernel.nat import nat_keys
from waypoint.kernel.netns import in_netns
from waypoint.kernel.programs import run_program

STAND_IN = """#!{python}
import json, os, socket, socketserver, sys, threading
from http.server import BaseHTTPRequestHandler
FILES = {{"Full": {{0: b"A", 2: b"C"}}, "Diff": {{2: b"c"}}}}

class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer(200, {{"id": sys.argv[-1], "state": "Not started"}})
    def do_PUT(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("requests", "a") as file:
            file.write(json.dumps([self.command, self.path, body]) + "\\n")
        if "track_dirty_pages" in body and self.path == "/snapshot/load" and os.path.exists("../old-version"):
            return self.answer(400, {{"fault_message": "unknown field `track_dirty_pages`, expected one of ..."}})
        if os.path.exists("../refuse" + self.path.replace("/", "-")):
            return self.answer(400, {{"fault_message": "the reason"}})
        if self.path == "/vsock" or self.path == "/snapshot/load":
            threading.Thread(target=vsock, daemon=True).start()
        if self.path == "/snapshot/create":
            open(body["snapshot_path"], "w").write("devices")
            with open(body["mem_file_path"], "wb") as file:
                file.truncate(4 * 4096)
                for page, letter in FILES[body["snapshot_type"]].items():
                    file.seek(page * 4096)
                    file.write(letter * 4096)
        self.answer(204, None)
    do_PATCH = do_PUT
    def answer(self, code, body):
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def address_string(self):
        return "client"
    def log_message(self, *_):
        pass

def vsock():
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("vsock.socket")
    listening.listen()
    for turn in range(100):
        connection, _ = listening.accept()
        asked = connection.recv(64)
        if turn:  # the guest does not listen at once
            connection.sendall(b"OK 1073741824\\nhello from " + asked)
        connection.close()

print("a stand-in for firecracker", flush=True)
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
Server(sys.argv[sys.argv.index("--api-sock") + 1], Api).serve_forever()
"""


def reason_to_skip() -> str | None:
    try:
        BACKEND.probe()
    except HostUnsupported as error:
        return error.message
    return None


class TestFirecracker(BackendContract):
    """The same suite as for every other backend."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Subject:
        if (reason := reason_to_skip()) is not None:
            pytest.skip(reason)
        root = busybox_rootfs(tmp_path_factory.mktemp("machine") / "root")
        kernel = fetch_kernel(print).image
        return Subject("firecracker_build", {"rootfs": root, "kernel": kernel, "disk_mib": 64}, machines)


def machines(home: Path) -> list[str]:
    return [f"machine in {tree}, process {pid}" for pid, tree in machine_processes("firecracker", home / "trees")]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A PATH with the stand-in on it, and directories for machines and states."""
    program = tmp_path / "bin" / "firecracker"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    work = tmp_path / "machines"
    for name in ("first", "second", "third", "state", "later"):
        (work / name).mkdir(parents=True)
    (work / "root.img").write_bytes(b"root" * PAGE)
    yield work
    assert [pid for pid in Path("/proc").glob("[0-9]*") if works_below(pid, tmp_path)] == []


def works_below(process: Path, directory: Path) -> bool:
    try:
        return (process / "cwd").readlink().is_relative_to(directory)
    except OSError:
        return False


def spec(network: Any = "none") -> Spec:
    return Spec(memory_mib=128, vcpus=2, network=network, kernel=Path("/k/vmlinux"), initrd=Path("/k/initrd"))


def requests(directory: Path) -> list[tuple[str, str, dict[str, Any]]]:
    return [tuple(json.loads(line)) for line in (directory / "requests").read_text().splitlines()]


class TestWhatWeAsk:
    def test_a_boot(self, places: Path) -> None:
        machine = Firecracker().boot(spec(), [places / "root.img"], places / "first")
        try:
            asked = requests(places / "first")
            assert [(method, path) for method, path, _ in asked] == [
                ("PUT", "/machine-config"),
                ("PUT", "/boot-source"),
                ("PUT", "/drives/root"),
                ("PUT", "/vsock"),
                ("PUT", "/actions"),
            ]
            bodies = {path: body for _, path, body in asked}
            assert bodies["/machine-config"] == {
                "vcpu_count": 2,
                "mem_size_mib": 128,
                "smt": False,
                "track_dirty_pages": True,
            }
            assert "statefork.agent=vsock" in bodies["/boot-source"]["boot_args"]
            assert bodies["/drives/root"]["path_on_host"] == "disk.img"
            assert (places / "first/disk.img").read_bytes() == (places / "root.img").read_bytes()
            with machine.connect(10) as connection:
                assert connection.recv(64) == b"hello from CONNECT 1024\n"
        finally:
            machine.end()
        with pytest.raises(SessionDead):
            machine.api.get("/")

    def test_snapshots_whole_and_different_and_loads(self, places: Path) -> None:
        vmm = Firecracker()
        machine = vmm.boot(spec(), [places / "root.img"], places / "first")
        try:
            whole = machine.save(places / "state", memory=True)
            (places / "first/disk.img").write_bytes(b"new!" * PAGE)
            later = machine.save(places / "later", memory=True)
        finally:
            machine.end()
        taken = [(path, body) for _, path, body in requests(places / "first")][5:]
        assert [(path, body.get("state") or body.get("snapshot_type")) for path, body in taken] == [
            ("/vm", "Paused"),
            ("/snapshot/create", "Full"),
            ("/vm", "Resumed"),
            ("/vm", "Paused"),
            ("/snapshot/create", "Diff"),
            ("/vm", "Resumed"),
        ]
        assert whole.memory is not None and later.memory is not None
        assert [whole.memory.read_bytes()[at * PAGE : at * PAGE + 1] for at in range(4)] == [b"A", b"\0", b"C", b"\0"]
        assert [later.memory.read_bytes()[at * PAGE : at * PAGE + 1] for at in range(4)] == [b"A", b"\0", b"c", b"\0"]
        assert [saved.disks[0].read_bytes()[:4] for saved in (whole, later)] == [b"root", b"new!"]
        copies = [vmm.revive(later, places / name) for name in ("second", "third")]
        try:
            for name in ("second", "third"):
                assert requests(places / name) == [
                    (
                        "PUT",
                        "/snapshot/load",
                        {
                            "snapshot_path": str(places / "later/devices"),
                            "mem_backend": {"backend_type": "File", "backend_path": str(later.memory)},
                            "resume_vm": False,
                            "track_dirty_pages": True,
                        },
                    ),
                    ("PATCH", "/vm", {"state": "Resumed"}),
                ]
                assert (places / name / "disk.img").read_bytes()[:4] == b"new!"
        finally:
            for copy in copies:
                copy.end()

    def test_an_older_version(self, places: Path) -> None:
        machine = Firecracker().boot(spec(), [places / "root.img"], places / "first")
        try:
            saved = machine.save(places / "state", memory=True)
        finally:
            machine.end()
        (places / "old-version").touch()
        Firecracker().revive(saved, places / "second").end()
        assert "enable_diff_snapshots" in requests(places / "second")[1][2]

    def test_refusals(self, places: Path) -> None:
        vmm = Firecracker()
        (places / "refuse-boot-source").touch()
        with pytest.raises(KernelError, match="refused PUT /boot-source: the reason"):
            vmm.boot(spec(), [places / "root.img"], places / "first")
        (places / "refuse-boot-source").unlink()
        machine = vmm.boot(spec(), [places / "root.img"], places / "second")
        try:
            (places / "refuse-snapshot-create").touch()
            with pytest.raises(KernelError, match="the reason"):
                machine.save(places / "state", memory=True)
            assert requests(places / "second")[-1] == ("PATCH", "/vm", {"state": "Resumed"})
            (places / "refuse-snapshot-create").unlink()
            saved = machine.save(places / "later", memory=True)
            assert requests(places / "second")[-2][2]["snapshot_type"] == "Full"
            attached = FirecrackerMachine.attach(places / "second")
            attached.end()
            assert machine.api.get("/")["state"]
        finally:
            machine.end()
        shutil.rmtree(places / "later")
        with pytest.raises(StoreError, match="missing"):
            vmm.revive(saved, places / "third")
        with pytest.raises(NotFound, match="booted in"):
            vmm.attach(places / "second")

    def test_a_machine_that_does_not_come_up(self, places: Path, tmp_path: Path) -> None:
        (tmp_path / "bin/firecracker").write_text("#!/bin/sh\necho 'no KVM here' >&2; exit 1\n")
        with pytest.raises(KernelError, match="no KVM here"):
            Firecracker().boot(spec(), [places / "root.img"], places / "first")

    def test_every_machine_has_its_own_tap(self, places: Path) -> None:
        before = nat_keys()
        vmm = Firecracker()
        copies = [vmm.boot(spec("tap"), [places / "root.img"], places / name) for name in ("first", "second")]
        try:
            for name, copy in zip(("first", "second"), copies, strict=True):
                assert ("PUT", "/network-interfaces/eth0") in [
                    (method, path) for method, path, _ in requests(places / name)
                ]
                inside = f"/proc/{copy._process.pid}/ns/net"
                show = in_netns(inside, lambda: run_program(["ip", "-br", "address", "show", TAP], timeout=30).text)
                assert "172.30.0.1/30" in show
            spaces = {os.readlink(f"/proc/{copy._process.pid}/ns/net") for copy in copies}  # noqa: PTH115
            assert len(spaces) == 2
        finally:
            for copy in copies:
                copy.end()
        assert nat_keys() == before


class TestAround:
    def test_the_probe_says_what_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        with pytest.raises(HostUnsupported) as caught:
            create_env_manager("firecracker_build", home=tmp_path, rootfs=tmp_path, kernel=tmp_path / "k")
        assert "firecracker/releases" in caught.value.details["fix"]
        with pytest.raises(UsageError, match="needs kernel"):
            create_env_manager("firecracker_build", home=tmp_path, rootfs=tmp_path)

    def test_a_packed_kernel_is_unpacked(self) -> None:
        if shutil.which("lz4") is None:
            pytest.skip("lz4 is not installed, and Debian's kernel is packed with it")
        assert elf_image(fetch_kernel(print)).read_bytes()[:4] == b"\x7fELF"

    def test_a_network_that_fails_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = nat_keys()
        monkeypatch.setattr("statefork.backends.microvm.fc_network.TAP", "a-name-that-is-too-long")
        with pytest.raises(KernelError):
            TapNetwork("test")
        assert nat_keys() == before
