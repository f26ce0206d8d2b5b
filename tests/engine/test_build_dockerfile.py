"""Dockerfiles through the real buildah: layers in place, the start state, and that failures leave nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rootfs import busybox_rootfs
from waypoint.build.base import Base, StartState
from waypoint.build.dockerfile import build_dockerfile, images, prune_images, remove_image
from waypoint.build.tarball import unpack_tarball
from waypoint.errors import BuildError, HostUnsupported, KernelError, NotFound, UsageError
from waypoint.kernel.buildah import Isolation, Storage
from waypoint.kernel.buildah_probe import isolation_of, try_isolation

SOURCES = str(Path(__file__).parents[2] / "src")
SCRATCH = "FROM scratch\nADD root.tar /\nENV PATH=/bin\n"


@pytest.fixture(scope="session")
def root_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("rootfs")
    root = busybox_rootfs(where / "root")
    subprocess.run(["tar", "-C", str(root), "-cf", str(where / "root.tar"), "."], check=True)
    return where / "root.tar"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One storage for tests that only add to it: the cache makes them quick."""
    return tmp_path_factory.mktemp("shared") / "images"


@pytest.fixture
def store(tmp_path: Path, shared: Path) -> Path:
    """An empty storage that need not be probed again."""
    Storage(shared).create()
    isolation_of(Storage(shared))
    fresh = Storage(tmp_path / "store")
    fresh.create()
    shutil.copy(shared / "probe.json", fresh.home)
    return fresh.home


@pytest.fixture
def context(tmp_path: Path, root_tar: Path) -> Path:
    (tmp_path / "context").mkdir()
    os.link(root_tar, tmp_path / "context/root.tar")
    return tmp_path / "context"


def write(context: Path, text: str) -> Path:
    (context / "Dockerfile").write_text(text)
    return context


@contextmanager
def mounted(layers: tuple[Path, ...], view: Path) -> Iterator[Path]:
    view.mkdir()
    options = f"lowerdir={':'.join(map(str, layers))}"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", str(view)], check=True)
    try:
        yield view
    finally:
        subprocess.run(["umount", str(view)], check=True)
        view.rmdir()


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Every name with its kind, mode, owner and content."""
    seen: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content: object = None
        if stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(status.st_mode):
            content = path.readlink()
        seen[str(path.relative_to(root))] = (oct(status.st_mode), status.st_uid, status.st_gid, content)
    return seen


def state(store: Path) -> tuple[object, ...]:
    """Everything that a build could leave: images, layers, containers, temporary files, mounts, cgroups, processes."""
    storage = Storage(store)
    mine = str(store)
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if mine in line]
    cgroups = [
        str(path / storage._cgroup) for path in Path("/sys/fs/cgroup").iterdir() if (path / storage._cgroup).exists()
    ]
    return (
        sorted((image.id, image.names) for image in storage.images()),
        sorted(path.name for path in (store / "r/overlay").iterdir()),
        sorted(path.name for path in (store / "r/overlay/l").iterdir()),
        sorted(path.name for path in (store / "r/overlay-layers").glob("*.gz")),
        json.loads((store / "r/overlay-containers/containers.json").read_text()),
        sorted(path.name for path in store.iterdir()),
        list((store / "t").iterdir()),
        mounts,
        cgroups,
        processes_about(mine),
    )


def processes_about(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text in line and int(path.parent.name) != os.getpid():
            found.append(line)
    return found


def until(condition: object, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


# -- what a build gives -----------------------------------------------------------------------------------------------


def test_layers_in_place_show_what_the_image_holds(context: Path, shared: Path, tmp_path: Path) -> None:
    write(
        context,
        SCRATCH
        + "RUN mkdir -p /d/sub /keep /moved && echo 1 >/d/a && echo 2 >/d/sub/b && echo x >/gone && echo m >/moved/m\n"
        + "RUN rm -r /gone /d && mkdir /d && echo new >/d/new && mv /moved /there && rmdir /keep && echo f >/keep\n"
        + "RUN chown 1000:1000 /d/new && chmod 4751 /d/new && ln -s /d/new /link && ln /keep /hard\n"
        + 'ENV NAME="a value" EMPTY= EQUAL=a=b\nWORKDIR /d/work\nUSER user:1000\n'
        + 'ENTRYPOINT ["/bin/sh", "-c"]\nCMD ["id", "-u"]\n',
    )
    base = build_dockerfile(context, store_dir=shared)
    assert base.kind == "dockerfile" and base.source == str(context) and base.notes == ()
    assert len(base.layers) == 4  # ADD and three times RUN; the directory of WORKDIR comes with the session
    assert all(layer.is_absolute() and layer.is_relative_to(shared) for layer in base.layers)
    assert base.start == StartState(
        env=(("PATH", "/bin"), ("NAME", "a value"), ("EMPTY", ""), ("EQUAL", "a=b")),
        workdir="/d/work",
        user="user:1000",
        argv=("/bin/sh", "-c", "id", "-u"),
    )
    with mounted(base.layers, tmp_path / "view") as view:
        assert sorted(path.name for path in (view / "d").iterdir()) == ["new"]
        assert not (view / "gone").exists() and not (view / "moved").exists()
        assert (view / "there/m").read_text() == "m\n"
        assert (view / "keep").read_text() == "f\n" and (view / "keep").stat().st_ino == (view / "hard").stat().st_ino
        new = (view / "d/new").stat()
        assert (new.st_uid, new.st_mode & 0o7777) == (1000, 0o4751)
        said = subprocess.run(["chroot", str(view), "/bin/sh", "-c", "cat /link"], capture_output=True, check=True)
        assert said.stdout == b"new\n"
        shown = tree(view)
    # The same image by another road: written out as an archive and unpacked with the marks converted by us.
    image = base.digest.removeprefix("sha256:")
    Storage(shared).run(["push", image, f"oci-archive:{tmp_path}/image.tar"]).check("push")
    (tmp_path / "into").mkdir()
    unpacked = unpack_tarball(tmp_path / "image.tar", tmp_path / "into")
    assert unpacked.start == base.start
    with mounted(unpacked.layers, tmp_path / "view") as view:
        assert tree(view) == shown


def test_a_rebuild_comes_from_the_cache(context: Path, shared: Path) -> None:
    write(context, SCRATCH + "RUN head -c 16 /dev/urandom | od >/random\n")
    first = build_dockerfile(context, store_dir=shared)
    said: list[bytes] = []
    again = build_dockerfile(context, store_dir=shared, on_output=said.append)
    assert again == first and b"Using cache" in b"".join(said)
    changed = build_dockerfile(write(context, SCRATCH + "RUN echo 2 >/random\n"), store_dir=shared)
    assert changed.digest != first.digest and changed.layers[-1] == first.layers[-1]


def test_from_an_earlier_image_by_name(context: Path, shared: Path, tmp_path: Path) -> None:
    write(context, SCRATCH + "RUN echo 1 >/one\nENV ONE=1\nUSER 1000\n")
    one = build_dockerfile(context, store_dir=shared, tag="family/one:v1")
    write(context, "FROM family/one:v1\nUSER root\nRUN test $ONE = 1 && rm /one\n")
    two = build_dockerfile(context, store_dir=shared, tag="two")
    assert two.layers[1:] == one.layers and two.start.user == "root" and ("ONE", "1") in two.start.env
    names = {image.digest: image.names for image in images(shared)}
    assert names[one.digest] == ("localhost/family/one:v1",) and names[two.digest] == ("localhost/two:latest",)
    with mounted(two.layers, tmp_path / "view") as view:
        assert not (view / "one").exists()


def test_from_an_archive_beside_the_dockerfile(context: Path, shared: Path, tmp_path: Path) -> None:
    base = build_dockerfile(write(context, SCRATCH + "RUN echo archived >/mark\n"), store_dir=shared)
    Storage(shared).run(["push", base.digest.removeprefix("sha256:"), f"oci-archive:{context}/a.tar"]).check("push")
    write(context, "FROM oci-archive:a.tar\nRUN cat /mark >/copy\n")
    again = build_dockerfile(context, store_dir=tmp_path / "fresh")
    assert (again.layers[0] / "copy").read_text() == "archived\n"


def test_stages_targets_and_arguments(context: Path, shared: Path) -> None:
    write(
        context,
        SCRATCH.replace("scratch", "scratch AS tools")
        + "ARG WORD=none\nRUN echo $WORD >/word\n"
        + SCRATCH
        + "COPY --from=tools /word /copied\n",
    )
    whole = build_dockerfile(context, store_dir=shared, build_args=[("WORD", "a b=c")])
    assert (whole.layers[0] / "copied").read_text() == "a b=c\n"
    tools = build_dockerfile(context, store_dir=shared, build_args=[("WORD", "a b=c")], target="tools")
    assert (tools.layers[0] / "word").read_text() == "a b=c\n"


def test_a_containerfile_serves_too(context: Path, shared: Path) -> None:
    (context / "Containerfile").write_text(SCRATCH + "CMD echo hello\n")
    assert build_dockerfile(context, store_dir=shared).start.argv == ("/bin/sh", "-c", "echo hello")


def test_device_nodes_of_an_added_archive_are_left_out(context: Path, shared: Path, tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    os.mknod(tmp_path / "nodes/disk", stat.S_IFBLK | 0o666, os.makedev(8, 0))
    os.mknod(tmp_path / "nodes/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    subprocess.run(["tar", "-C", str(tmp_path), "-cf", str(context / "nodes.tar"), "nodes"], check=True)
    base = build_dockerfile(write(context, SCRATCH + "ADD nodes.tar /\n"), store_dir=shared)
    assert base.notes == ("left out 1 device node(s) that a session may not have: /nodes/disk",)
    assert (base.layers[0] / "nodes/null").is_char_device()


def test_output_comes_while_it_runs_and_may_be_huge(context: Path, shared: Path) -> None:
    count = 0

    def add(data: bytes) -> None:
        nonlocal count
        count += len(data)

    write(context, SCRATCH + "RUN yes 0123456789 | head -c 20000000\n")
    build_dockerfile(context, store_dir=shared, on_output=add)
    assert count > 20_000_000


def test_two_builds_at_once_take_turns(context: Path, store: Path, tmp_path: Path, root_tar: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    os.link(root_tar, other / "root.tar")
    write(context, SCRATCH + "RUN echo 1 >/1\n")
    write(other, SCRATCH + "RUN echo 2 >/2\n")
    done: dict[Path, Base] = {}

    def build(directory: Path) -> None:
        done[directory] = build_dockerfile(directory, store_dir=store)

    threads = [threading.Thread(target=build, args=(directory,)) for directory in (context, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {image.digest for image in images(store)} == {base.digest for base in done.values()} and len(done) == 2


def test_the_hosts_own_container_storage_is_not_touched(context: Path, store: Path) -> None:
    """Where container programs keep their state lies an empty tmpfs, in a namespace that only this test sees."""
    script = f"""
set -e
mkdir -p /var/lib/containers
for place in /run /var/tmp /var/lib/containers; do mount -n -t tmpfs tmpfs $place; done
{sys.executable} -c '
from pathlib import Path
from waypoint.build.dockerfile import build_dockerfile
build_dockerfile(Path("{context}"), store_dir=Path("{store}"))'
find /run /var/tmp /var/lib/containers
"""
    write(context, SCRATCH + "RUN echo something >/something\n")
    said = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )
    assert sorted(said.stdout.split()) == ["/run", "/run/containers", "/var/lib/containers", "/var/tmp"]
    assert len(images(store)) == 1


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failing_step_shows_the_builders_words_and_leaves_nothing(context: Path, store: Path) -> None:
    build_dockerfile(write(context, SCRATCH + "RUN echo good >/good\n"), store_dir=store, tag="same")
    before = state(store)
    said: list[bytes] = []
    write(context, SCRATCH + "RUN echo good >/good\nRUN echo more >/more\nRUN echo why$((40+2)) >&2; exit 7\n")
    with pytest.raises(BuildError, match="why42") as caught:
        build_dockerfile(context, store_dir=store, tag="same", on_output=said.append)
    assert caught.value.details["exit_code"] == 7 and "STEP 6/6" in caught.value.message
    assert b"STEP 5/6" in b"".join(said) and b"why42" in b"".join(said)
    assert state(store) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM scratch\nNONSENSE\n", "NONSENSE"),
        ("", "."),
        ("FROM nowhere-to-be-found\n", "nowhere-to-be-found"),
        (SCRATCH + "COPY absent /\n", "absent"),
        (SCRATCH + "RUN absent-program\n", "absent-program"),
        (SCRATCH + "RUN rm -rf /bin/sh /bin/bash\n", "no /bin/bash or /bin/sh"),
        ("FROM scratch\nCOPY Dockerfile /\n", "no /bin/bash or /bin/sh"),
        ("FROM scratch\nENV A=b\n", "it is empty"),
    ],
)
def test_dockerfiles_that_cannot_work(text: str, words: str, context: Path, store: Path) -> None:
    build_dockerfile(write(context, SCRATCH), store_dir=store, tag="same")
    before = state(store)
    with pytest.raises(BuildError, match=words):
        build_dockerfile(write(context, text), store_dir=store, tag="same")
    assert state(store) == before


def test_wrong_arguments(context: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is not a directory"):
        build_dockerfile(tmp_path / "absent", store_dir=tmp_path / "store")
    with pytest.raises(BuildError, match="holds no Dockerfile"):
        build_dockerfile(context, store_dir=tmp_path / "store")
    write(context, SCRATCH)
    for tag in ("", "Upper", "a b", "--all", "../x", "a:", "a:b:c", "é"):
        with pytest.raises(UsageError):
            build_dockerfile(context, store_dir=tmp_path / "store", tag=tag)
    assert not (tmp_path / "store").exists()


def test_a_host_without_buildah_is_told_what_to_install(
    context: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostUnsupported, match="buildah is not installed") as caught:
        build_dockerfile(write(context, SCRATCH), store_dir=tmp_path / "store")
    assert caught.value.details["fix"].startswith("apt-get install")


def test_a_callback_that_raises_ends_the_build(context: Path, store: Path) -> None:
    build_dockerfile(write(context, SCRATCH), store_dir=store)
    before = state(store)
    said = bytearray()

    def stop(data: bytes) -> None:
        said.extend(data)
        if b"now42" in said:
            raise RuntimeError("enough")

    write(context, SCRATCH + "RUN echo layer >/layer\nRUN echo now$((40+2)); sleep 1000\n")
    with pytest.raises(RuntimeError, match="enough"):
        build_dockerfile(context, store_dir=store, on_output=stop)
    assert state(store) == before


def test_a_deadline_ends_the_build(context: Path, store: Path) -> None:
    build_dockerfile(write(context, SCRATCH), store_dir=store)
    before = state(store)
    write(context, SCRATCH + "RUN echo layer >/layer\nRUN sleep 4321.25 & sleep 4321.25\n")
    with pytest.raises(BuildError, match="within 4 s"):
        build_dockerfile(context, store_dir=store, timeout=4)
    assert state(store) == before
    until(lambda: not processes_about("sleep 4321.25"), "the step's processes live on")


@pytest.mark.parametrize("moment", ["STEP 2/6", "STEP 4/6", "now42", "COMMIT"])
def test_a_killed_caller_leaves_nothing_that_the_next_build_does_not_clear(
    moment: str, context: Path, store: Path, tmp_path: Path
) -> None:
    kept = build_dockerfile(write(context, SCRATCH), store_dir=store, tag="kept")
    before = state(store)
    slow = tmp_path / "slow"
    slow.mkdir()
    os.link(context / "root.tar", slow / "root.tar")
    write(
        slow, SCRATCH.replace("ENV", "ENV NEW=1") + "RUN echo 1 >/1\nRUN echo 2 >/2\nRUN echo now$((40+2)); sleep 1\n"
    )
    script = (
        "import sys; from pathlib import Path; from waypoint.build.dockerfile import build_dockerfile\n"
        "def show(data): sys.stdout.buffer.write(data); sys.stdout.buffer.flush()\n"
        f"build_dockerfile(Path({str(slow)!r}), store_dir=Path({str(store)!r}), tag='slow', on_output=show)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )
    assert child.stdout is not None
    said = b""
    while moment.encode() not in said:
        data = os.read(child.stdout.fileno(), 65536)
        assert data, f"the build ended before {moment}: {said!r}"
        said += data
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    until(lambda: not processes_about(str(store)), "processes of the build live on")
    assert not [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(store) in line]
    assert (store / "open.json").exists()
    again = build_dockerfile(write(context, SCRATCH), store_dir=store, tag="kept")
    assert again == kept and state(store) == before


# -- holding and letting go -------------------------------------------------------------------------------------------


def test_removing_an_image_keeps_the_layers_that_others_use(context: Path, store: Path, tmp_path: Path) -> None:
    lower = build_dockerfile(write(context, SCRATCH + "RUN echo 1 >/1\n"), store_dir=store, tag="lower")
    upper = build_dockerfile(write(context, "FROM lower\nRUN echo 2 >/2\n"), store_dir=store)
    sibling = build_dockerfile(write(context, SCRATCH + "RUN echo 3 >/3\n"), store_dir=store)
    remove_image(store, lower.digest)
    assert {image.digest for image in images(store)} == {upper.digest, sibling.digest}
    with mounted(upper.layers, tmp_path / "view") as view:
        assert (view / "1").exists() and (view / "2").exists()
    remove_image(store, upper.digest)
    assert sibling.layers[0].is_dir() and sibling.layers[-1].is_dir() and not upper.layers[0].exists()
    remove_image(store, sibling.digest)
    with pytest.raises(NotFound):
        remove_image(store, sibling.digest)
    prune_images(store)
    assert images(store) == () and Storage(store).images() == ()
    assert not [path for path in (store / "r/overlay").iterdir() if len(path.name) == 64]


def test_a_retagged_image_stays_while_it_is_held(context: Path, store: Path) -> None:
    old = build_dockerfile(write(context, SCRATCH + "RUN echo old >/f\n"), store_dir=store, tag="t")
    new = build_dockerfile(write(context, SCRATCH + "RUN echo new >/f\n"), store_dir=store, tag="t")
    prune_images(store)
    assert {image.digest: image.names for image in images(store)} == {
        old.digest: (),
        new.digest: ("localhost/t:latest",),
    }
    assert (old.layers[0] / "f").read_text() == "old\n"


def test_prune_frees_the_cache_that_no_held_image_stands_on(context: Path, store: Path, tmp_path: Path) -> None:
    stages = (
        SCRATCH.replace("scratch", "scratch AS tools") + "RUN echo big >/big\n" + SCRATCH + "COPY --from=tools /big /\n"
    )
    held = build_dockerfile(write(context, stages), store_dir=store)
    count = len(Storage(store).images())
    assert prune_images(store) > 0 and len(Storage(store).images()) < count
    assert all(layer.is_dir() for layer in held.layers) and [i.digest for i in images(store)] == [held.digest]
    used = {layer.parent.name for layer in held.layers}
    assert {path.name for path in (store / "r/overlay").iterdir() if len(path.name) == 64} == used
    assert prune_images(store) == 0
    assert prune_images(tmp_path / "absent") == 0 and images(tmp_path / "absent") == ()


# -- the probe --------------------------------------------------------------------------------------------------------


def test_the_probe_is_a_real_build_and_is_remembered(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "store")
    storage.create()
    found = isolation_of(storage)
    try_isolation(storage, Isolation("chroot"), 120)  # works wherever buildah does
    with pytest.raises(KernelError, match="no-such-runtime"):
        try_isolation(storage, Isolation("oci", "no-such-runtime"), 120)
    assert not (storage.home / "probe").exists()
    known = json.loads((storage.home / "probe.json").read_text())
    (storage.home / "probe.json").write_text(json.dumps({**known, "kind": "remembered"}))
    assert isolation_of(storage).kind == "remembered"
    (storage.home / "probe.json").write_text(json.dumps({**known, "host": "another boot"}))
    assert isolation_of(storage) == found
