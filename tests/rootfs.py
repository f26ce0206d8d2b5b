"""Small real root filesystems, made from the programs of the host, for everybody's tests.

`busybox_rootfs` takes a few milliseconds and 2 MB; `bash_rootfs` has a real bash and coreutils, about 20 MB.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["bash_rootfs", "busybox_rootfs", "python_rootfs"]

_PASSWD = """\
root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/:/bin/sh
user:x:1000:1000:user:/home/user:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/sh
"""
_GROUP = "root:x:0:\ndaemon:x:1:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n"
# fmt: off
_PROGRAMS = (
    "bash", "sh", "dash", "basename", "cat", "chmod", "chown", "cp", "cut", "date", "dd", "df", "dirname", "du",
    "echo", "env", "expr", "false", "head", "id", "install", "ln", "ls", "md5sum", "mkdir", "mkfifo", "mknod",
    "mktemp", "mv", "nl", "nohup", "nproc", "od", "paste", "printf", "pwd", "readlink", "realpath", "rm", "rmdir",
    "seq", "sha256sum", "sleep", "sort", "split", "stat", "stty", "sync", "tail", "tee", "test", "timeout", "touch",
    "tr", "true", "truncate", "tty", "uname", "uniq", "wc", "whoami", "yes", "awk", "find", "free", "grep",
    "hostname", "kill", "mount", "nice", "ps", "sed", "setsid", "su", "tar", "umount", "xargs",
)
# fmt: on
_NEEDED = ("bash", "sh", "cat", "ls", "sleep", "ps", "grep", "sed")
_TERMINALS = ("d/dumb", "l/linux", "s/screen", "s/screen-256color", "t/tmux", "v/vt100", "x/xterm", "x/xterm-256color")


def busybox_rootfs(path: Path) -> Path:
    """A root of one static program under all its names; `path` is created. Needs the package busybox-static."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RuntimeError("busybox is not installed; apt-get install -y busybox-static")
    _skeleton(path)
    (path / "bin").mkdir()
    shutil.copy2(busybox, path / "bin/busybox")
    for name in subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split():
        if name != "busybox":
            (path / "bin" / name).symlink_to("busybox")
    return path


def bash_rootfs(path: Path) -> Path:
    """A merged-/usr root with bash, coreutils, grep, sed, find and ps, and their libraries; `path` is created."""
    _skeleton(path)
    for name in ("bin", "sbin", "lib", "lib64"):
        (path / "usr" / name).mkdir(parents=True)
        (path / name).symlink_to(f"usr/{name}")
    programs = {name: found for name in _PROGRAMS if (found := shutil.which(name))}
    if missing := [name for name in _NEEDED if name not in programs]:
        raise RuntimeError(f"the host has no {', '.join(missing)}")
    for name, program in programs.items():
        shutil.copy2(program, path / "usr/bin" / name)
    for library in _libraries(list(programs.values())):
        target = path / library.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
    for database in (Path("/lib/terminfo"), Path("/usr/share/terminfo")):
        for name in _TERMINALS:
            if (database / name).exists():
                target = path / database.relative_to("/") / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(database / name, target)
    return path


def python_rootfs(path: Path) -> Path:
    """The same with Debian's python3 and most of its library, 40 MB more."""
    bash_rootfs(path)
    version = Path("/usr/bin/python3").resolve()
    shutil.copy2(version, path / "usr/bin/python3")
    for library in _libraries([str(version)]):
        target = path / library.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
    unneeded = shutil.ignore_patterns("__pycache__", "test", "idlelib", "ensurepip", "distutils", "config-*", "lib2to3")
    shutil.copytree(Path("/usr/lib") / version.name, path / "usr/lib" / version.name, ignore=unneeded)
    return path


def _skeleton(path: Path) -> None:
    path.mkdir(parents=True)
    path.chmod(0o755)
    for name in ("dev", "etc", "home", "home/user", "mnt", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var"):
        (path / name).mkdir()
    (path / "var/tmp").mkdir()
    for name in ("tmp", "var/tmp"):
        (path / name).chmod(0o1777)
    (path / "root").chmod(0o700)
    shutil.chown(path / "home/user", 1000, 1000)
    (path / "etc/passwd").write_text(_PASSWD)
    (path / "etc/group").write_text(_GROUP)
    (path / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    (path / "etc/hosts").write_text("127.0.0.1 localhost\n")


def _libraries(programs: list[str]) -> list[Path]:
    """What `ldd` names, by the names that the programs look for; scripts and static programs have none."""
    said = subprocess.run(["ldd", *programs], check=False, capture_output=True, text=True).stdout
    return sorted({Path(found) for found in re.findall(r"(?:=> |^\t)(/\S+) \(0x", said, re.MULTILINE)})
