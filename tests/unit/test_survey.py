"""The program that looks at big layers says the same of them as Python does of small ones."""

from __future__ import annotations

import os
from pathlib import Path

from waypoint.kernel import moved, trees
from waypoint.kernel.survey import Survey, Surveyed

SKIPPED = ".private"


def by_hand(layer: Path) -> Surveyed:
    return Surveyed(trees.digest(layer, SKIPPED), trees.allocated_bytes(layer))


def test_all_kinds_of_entries_and_names(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    (layer / "a/b/c").mkdir(parents=True)
    for name in (b"\xff\xfe", b"\x80", "€".encode(), "\U0001f600".encode(), b"new\nline", b"a b", b".dot", b"z"):
        Path(os.fsdecode(os.fsencode(layer) + b"/a/" + name)).write_bytes(name * 3000)
    (layer / "sparse").write_bytes(b"")
    os.truncate(layer / "sparse", 1 << 30)
    (layer / "old").write_text("old")
    os.utime(layer / "old", ns=(-5_000_000_123, -5_000_000_123))
    (layer / "a/link").symlink_to("../nowhere/" + "x" * 3000)
    os.link(layer / "a/z", layer / "a/b/z")
    os.mkfifo(layer / "fifo")
    os.mknod(layer / "gone", 0o20000, os.makedev(0, 0))
    os.chown(layer / "a/z", 1234, 70_000)
    (layer / "a/z").chmod(0o4711)
    (layer / "link_remap.7").write_text("")
    found = Survey(layer, SKIPPED).result()
    assert found == by_hand(layer)
    (layer / "a/b/c/new").write_text("")
    assert Survey(layer, SKIPPED).result().digest != found.digest


def test_what_is_ours_is_left_out(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    (layer / "below").mkdir(parents=True)
    empty = Survey(layer, SKIPPED).result()
    (layer / SKIPPED).mkdir()
    (layer / SKIPPED / "socket").write_text("")
    assert Survey(layer, SKIPPED).result() == empty
    (layer / "below" / SKIPPED).mkdir()
    assert Survey(layer, SKIPPED).result().digest == trees.digest(layer, SKIPPED) != empty.digest


def test_what_it_cannot_do_is_done_more_slowly(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    layer.mkdir()
    here = os.open(layer, os.O_RDONLY)
    try:
        for _ in range(40):  # a path that is longer than a path may be
            os.mkdir("d" * 250, dir_fd=here)
            below = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
    finally:
        os.close(here)
    survey = Survey(layer, SKIPPED)
    try:
        survey.result()
    except OSError as error:  # neither can Python
        assert "long" in str(error)
    else:
        raise AssertionError("it is longer than the kernel takes")


def test_cancel(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    Survey(tmp_path, SKIPPED).cancel()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_layer_may_be_moved_meanwhile(tmp_path: Path) -> None:
    layer = tmp_path / "layer" / "d"
    for top in range(40):
        for below in range(20):
            (layer / f"top{top}" / f"below{below}").mkdir(parents=True)
            (layer / f"top{top}" / f"below{below}" / "file").write_text(f"{top}.{below}")
    (layer / "top1" / "link").symlink_to("nowhere")
    wanted = by_hand(layer)
    survey = Survey(layer, SKIPPED)
    survey.held()
    moved.move(layer.parent)
    assert survey.result() == wanted == by_hand(layer)


def test_with_many_directories_at_the_top_it_is_held_at_the_end(tmp_path: Path) -> None:
    layer = tmp_path / "layer" / "d"
    for top in range(300):
        (layer / f"top{top}" / "below").mkdir(parents=True)
    survey = Survey(layer, SKIPPED)
    survey.held()
    moved.move(layer.parent)
    assert survey.result() == by_hand(layer)
