"""Files: every change that a file system can hold, and every way in which a process can hold a file."""

from __future__ import annotations

from statefork.testing.fidelity.case import Case, ShellCase
from statefork.testing.fidelity.guest import filelocks, openfiles
from statefork.testing.fidelity.programs_inside import probe_cases
from statefork.testing.fidelity.subject import DEADLINE_SECONDS, Options

__all__ = ["CASES"]

_FILES = frozenset({"files"})
_MOUNTS = frozenset({"files", "processes"})
_D = "/var/tmp/case"


def _files(
    name: str,
    summary: str,
    *,
    make: str,
    same: str,
    spoil: str,
    use: str = "",
    programs: tuple[str, ...] = (),
    packages: tuple[str, ...] = (),
    timeout: float = DEADLINE_SECONDS,
) -> Case:
    """A case in a directory of its own. The paths are absolute: a backend that restores files only has a new shell."""
    here = f"cd {_D} && "
    return ShellCase(
        name,
        summary,
        make=f"mkdir -p {_D} && {here}{{ {make}; }}",
        same=f"{here}{{ {same}; }}",
        spoil=f"{here}{{ {spoil}; }}",
        use=f"{here}{{ {use}; }}" if use else "",
        kind="files",
        needs=_FILES,
        programs=programs,
        packages=packages,
        timeout=timeout,
    )


_PLAIN = (
    _files("create", "a new file", make="printf 'new\\n' >new", same="cat new; stat -c '%s %a %u:%g' new", spoil="rm new",
           use="echo more >>new; [ $(wc -l <new) = 2 ]"),
    _files("modify", "a changed file of the base", make="echo '# mark' >>/etc/profile",
           same="md5sum /etc/profile; tail -1 /etc/profile", spoil="echo other >/etc/profile"),
    _files("overwrite-in-place", "bytes written into the middle", make="head -c 100000 /dev/zero >f; printf HERE | dd of=f bs=1 seek=50000 conv=notrunc status=none",
           same="md5sum f", spoil="printf THEN | dd of=f bs=1 seek=50000 conv=notrunc status=none"),
    _files("append", "appended lines", make="echo one >log; echo two >>log", same="cat log", spoil="echo three >>log",
           use="echo 3 >>log; [ \"$(tail -1 log)\" = 3 ]"),
    _files("truncate", "a truncated file", make="seq 1000 >f; truncate -s 10 f", same="cat f; stat -c %s f", spoil="truncate -s 0 f"),
    _files("delete", "a deleted file of the base, and one of the session's own", make="rm /etc/profile; touch gone; rm gone",
           same="ls -A . /etc/profile 2>&1 || :", spoil="echo back >/etc/profile; touch gone", use="! [ -e /etc/profile ]"),
    _files("delete-and-make-again", "a file of the base replaced by a directory", make="rm /etc/profile; mkdir /etc/profile; touch /etc/profile/in",
           same="ls -A /etc/profile; stat -c %F /etc/profile", spoil="rm -r /etc/profile; echo f >/etc/profile"),
    _files("rename", "renamed files, also of the base", make="echo 1 >a; mv a b; mv /etc/profile /etc/profile.old",
           same="ls; cat b; ls /etc/profile*; md5sum /etc/profile.old", spoil="mv b c; rm /etc/profile.old"),
    _files("rename-directory", "a renamed directory of the base, with its content", make="mv /usr/share/zoneinfo/Europe /usr/share/zoneinfo/There 2>/dev/null || mv /etc/default /etc/there",
           same="find /usr/share/zoneinfo/Europe /usr/share/zoneinfo/There /etc/default /etc/there 2>/dev/null | sort | md5sum",
           spoil="rm -r /usr/share/zoneinfo/There /etc/there 2>/dev/null; mkdir -p /usr/share/zoneinfo/Europe /etc/default"),
    _files("directories", "directories, empty and nested", make="mkdir -p a/b/c/d empty; chmod 1777 empty; touch a/b/f",
           same="find . -printf '%p %y %m\\n' | sort", spoil="rm -r a/b; rmdir empty"),
    _files("hard-links", "hard links stay one file", make="echo x >a; ln a b; mkdir d; ln a d/c", same="stat -c '%h' a b d/c; [ a -ef d/c ] && cat b",
           spoil="cp a t; mv t b", use="echo y >>d/c; [ \"$(cat a)\" = $'x\\ny' ]; rm a; [ $(stat -c %h b) = 2 ]"),
    _files("symlinks", "symlinks, also dangling ones", make="ln -s /etc/passwd ok; ln -s ../nowhere bad; ln -s ok two",
           same="readlink ok bad two; head -1 two", spoil="ln -sfn /etc/group ok; rm bad"),
    _files("permissions", "permissions, set-uid and sticky bits", make="for m in 000 644 4755 2711 1777; do touch f$m; chmod $m f$m; done; chmod 600 /etc/profile",
           same="stat -c '%n %a' f* /etc/profile", spoil="chmod 644 f*; chmod 777 /etc/profile"),
    _files("ownership", "owner and group", make="touch a b; chown 1234:4321 a; chown -h nobody b; chown 33:33 /etc/profile",
           same="stat -c '%n %u:%g' a b /etc/profile", spoil="chown 0:0 a b /etc/profile"),
    _files("xattrs", "extended attributes and ACLs", programs=("setfattr", "getfattr"), packages=("attr",),
           make="touch f; setfattr -n user.colour -v blue f; setfattr -n user.bin -v 0x00ff00 f; mkdir d; setfattr -n user.d -v 1 d",
           same="getfattr -d -m 'user\\.' -e hex f d", spoil="setfattr -n user.colour -v red f; setfattr -x user.d d"),
    _files("file-capabilities", "capabilities on a file", programs=("setcap", "getcap"), packages=("libcap2-bin",),
           make="cp /bin/true t; setcap cap_net_raw+ep t", same="getcap t", spoil="setcap -r t"),
    _files("sparse-files", "sparse files stay sparse", make="truncate -s 3G holes; printf data | dd of=holes bs=1 seek=1G conv=notrunc status=none",
           same="stat -c %s holes; [ $(stat -c %b holes) -lt 64 ] && echo sparse; dd if=holes bs=4 skip=256M count=1 status=none",
           spoil="truncate -s 1M holes"),
    _files("large-files", "large files", make="for i in 1 2 3; do head -c 48M /dev/urandom >big; cat big big >bigger; done", same="md5sum big bigger",
           spoil="head -c 1M big >t; mv t bigger; printf x >>big"),
    _files("times", "modification times to the nanosecond", make="touch -d '2001-02-03 04:05:06.123456789 UTC' f; mkdir d; touch -d '1999-01-01 UTC' d; ln -s x l; touch -h -d '2010-10-10 UTC' l",
           same="stat -c '%n %y' f d l", spoil="touch f; touch d/new; touch -h l"),
    _files("special-files", "FIFOs and sockets on disk", programs=("python3",), packages=("python3",),
           make="mkfifo -m 640 pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'",
           same="stat -c '%n %F %a' pipe sock", spoil="rm pipe sock", use="(echo through >pipe) & [ \"$(cat pipe)\" = through ]"),
    _files("odd-names", "names with newlines, quotes and bytes that are no UTF-8",
           make="echo 1 >$'new\\nline'; echo 2 >$'\\xff\\xfe'; echo 3 >'-rf'; echo 4 >' '; echo 5 >'\"`$'; mkdir $'d\\n\\t'; touch $'d\\n\\t/\\x80'; touch $(printf 'n%.0s' {1..255})",
           same="find . -print0 | sort -z | md5sum; cat $'\\xff\\xfe' ./-rf", spoil="rm -- $'new\\nline' -rf ' '", use="cat $'new\\nline' ' '"),
    _files("deep-trees", "20,000 files and a path 200 directories deep",
           make="mkdir t; (cd t; for i in {1..100}; do mkdir d$i; (cd d$i; printf '%s\\0' f{1..200} | xargs -0 touch); done); p=.; for i in {1..200}; do p=$p/d; done; mkdir -p $p; echo end >$p/end",
           same="find . | wc -l; find . -printf '%p %y %s\\n' | sort | md5sum", spoil="rm -r t/d7; touch t/d8/new", timeout=300),
    _files("tmp", "/tmp", make="echo t >/tmp/t; mkdir -p /tmp/sub; stat -c %a /tmp >mode", same="cat /tmp/t mode; ls -d /tmp/sub; stat -c '%a' /tmp", spoil="rm -r /tmp/t /tmp/sub"),
    _files("dev-shm", "/dev/shm", make="echo s >/dev/shm/s; chmod 600 /dev/shm/s", same="cat /dev/shm/s; stat -c %a /dev/shm/s", spoil="echo x >/dev/shm/s"),
    _files("run", "/run", make="mkdir -p /run/app; echo 123 >/run/app/pid", same="cat /run/app/pid", spoil="rm -r /run/app"),
)  # fmt: skip

_ADMIN = Options(capabilities=("+SYS_ADMIN",))

_MOUNTED = (
    ShellCase(
        "tmpfs-mount",
        "a tmpfs mounted inside, with its files",
        make="mkdir -p /mnt/t && mount -t tmpfs -o size=8m,mode=750 none /mnt/t && echo in >/mnt/t/f && mkfifo /mnt/t/p && exec 7</mnt/t/f",
        same="cat /mnt/t/f; ls -A /mnt/t; stat -f -c %T /mnt/t; stat -c %a /mnt/t; findmnt -n -o OPTIONS /mnt/t | grep -o size=[0-9a-z]*",
        spoil="exec 7<&-; umount /mnt/t",
        use="read -r x <&7; [ $x = in ]; exec 7<&-; echo more >/mnt/t/g; umount /mnt/t",
        kind="files",
        needs=_MOUNTS,
        programs=("mount", "findmnt"),
        packages=("mount", "util-linux"),
        options=_ADMIN,
    ),
    ShellCase(
        "bind-mount",
        "a bind mount made inside",
        make="mkdir -p /var/tmp/from /mnt/to && echo x >/var/tmp/from/f && mount --bind /var/tmp/from /mnt/to && mount -o remount,bind,ro /mnt/to",
        same="cat /mnt/to/f; findmnt -n -o TARGET,OPTIONS /mnt/to | cut -d, -f1",
        spoil="umount /mnt/to",
        use="echo y >>/var/tmp/from/f; [ \"$(tail -1 /mnt/to/f)\" = y ]; ! touch /mnt/to/g; umount /mnt/to",
        kind="files",
        needs=_MOUNTS,
        programs=("mount", "findmnt"),
        packages=("mount", "util-linux"),
        options=_ADMIN,
    ),
)

CASES: tuple[Case, ...] = (*_PLAIN, *_MOUNTED, *probe_cases("files", openfiles), *probe_cases("files", filelocks))
