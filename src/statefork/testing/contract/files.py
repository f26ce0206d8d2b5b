"""Files in and out."""

from __future__ import annotations

from pathlib import Path

import pytest

from statefork.environment import Environment
from statefork.errors import NotFound, UsageError
from statefork.testing.contract.subject import Contract, Subject

__all__ = ["FileContract"]

AWKWARD = ["plain", "with space", "-dash", "new\nline", "81a4 5 6 ", "quote'\"", "ünïcode", "trailing\n"]


class FileContract(Contract):
    def test_write_and_read(self, shared: Environment, subject: Subject) -> None:
        path = f"{subject.scratch}/made/on the way/data.bin"
        data = bytes(range(256)) * 4000
        shared.write_file(path, data, mode=0o640)
        assert shared.read_file(path) == data
        assert shared.run(["stat", "-c", "%a %s", path]).stdout == f"640 {len(data)}\n"
        shared.write_file(path, "text é")
        assert shared.read_file(path) == "text é".encode()
        assert shared.run(["stat", "-c", "%a", path]).stdout == "640\n"
        shared.write_file(path, b"")
        assert shared.read_file(path) == b""

    def test_the_shell_sees_them(self, shared: Environment, subject: Subject) -> None:
        shared.write_file(f"{subject.scratch}/greeting", "hello\n")
        assert (
            shared.exec_command(f"cat {subject.scratch}/greeting; echo back >{subject.scratch}/answer").stdout
            == "hello\n"
        )
        assert shared.read_file(f"{subject.scratch}/answer") == b"back\n"

    def test_listing_with_awkward_names(self, shared: Environment, subject: Subject) -> None:
        where = f"{subject.scratch}/awkward"
        for name in AWKWARD:
            shared.write_file(f"{where}/{name}", name, mode=0o600)
        shared.run(
            ["sh", "-c", f"cd {where} && mkdir directory && ln -s plain link && mkfifo fifo && chmod 711 directory"]
        )
        found = {info.name: info for info in shared.list_files(where)}
        assert sorted(found) == sorted([*AWKWARD, "directory", "link", "fifo"])
        assert [found[name].kind for name in ("plain", "directory", "link", "fifo")] == [
            "file",
            "directory",
            "symlink",
            "other",
        ]
        assert all(found[name].size_bytes == len(name.encode()) for name in AWKWARD)
        assert (found["plain"].mode, found["directory"].mode) == (0o600, 0o711)
        assert found["plain"].modified_at > 1_000_000_000
        shared.run(["mkdir", f"{where}/directory/empty"])
        assert shared.list_files(f"{where}/directory/empty") == []

    def test_upload_and_download_a_file(self, shared: Environment, subject: Subject, tmp_path: Path) -> None:
        (tmp_path / "script").write_bytes(b"#!/bin/sh\necho ran\n")
        (tmp_path / "script").chmod(0o755)
        shared.upload(tmp_path / "script", f"{subject.scratch}/new/ran")
        assert shared.run([f"{subject.scratch}/new/ran"]).stdout == "ran\n"
        shared.download(f"{subject.scratch}/new/ran", tmp_path / "deep" / "copy")
        assert (tmp_path / "deep/copy").read_bytes() == b"#!/bin/sh\necho ran\n"

    def test_upload_and_download_a_tree(self, shared: Environment, subject: Subject, tmp_path: Path) -> None:
        source = tmp_path / "tree"
        (source / "a/b").mkdir(parents=True)
        (source / "a/b/file one").write_bytes(b"1\0")
        (source / "empty").mkdir()
        (source / "link").symlink_to("a/b/file one")
        target = f"{subject.scratch}/copied"
        shared.upload(source, target)
        assert shared.run(["cat", f"{target}/link"]).stdout_bytes == b"1\0"
        shared.download(target, tmp_path / "back")
        assert (tmp_path / "back/a/b/file one").read_bytes() == b"1\0"
        assert (tmp_path / "back/empty").is_dir()
        assert str((tmp_path / "back/link").readlink()) == "a/b/file one"

    def test_a_download_cannot_write_outside(self, shared: Environment, subject: Subject, tmp_path: Path) -> None:
        where = f"{subject.scratch}/sly"
        shared.run(["sh", "-c", f"mkdir -p {where} && ln -s {tmp_path}/victim {where}/link && echo x >{where}/file"])
        shared.download(where, tmp_path / "taken")
        assert (tmp_path / "taken/link").is_symlink()
        assert not (tmp_path / "victim").exists()

    def test_what_is_not_there(self, shared: Environment, subject: Subject, tmp_path: Path) -> None:
        missing = f"{subject.scratch}/surely/not/there"
        for act in (
            lambda: shared.read_file(missing),
            lambda: shared.list_files(missing),
            lambda: shared.download(missing, tmp_path / "x"),
            lambda: shared.upload(tmp_path / "none", missing),
        ):
            with pytest.raises(NotFound):
                act()

    def test_the_wrong_kind(self, shared: Environment, subject: Subject) -> None:
        shared.write_file(f"{subject.scratch}/kind/file", "x")
        for act in (
            lambda: shared.read_file(f"{subject.scratch}/kind"),
            lambda: shared.write_file(f"{subject.scratch}/kind", "x"),
            lambda: shared.list_files(f"{subject.scratch}/kind/file"),
            lambda: shared.read_file("relative/path"),
            lambda: shared.write_file("", "x"),
        ):
            with pytest.raises(UsageError):
                act()
