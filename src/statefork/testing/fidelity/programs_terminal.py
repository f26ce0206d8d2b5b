"""Programs in the terminal: a REPL, editors, pagers, tmux, a debugger."""

from __future__ import annotations

from statefork.testing.fidelity.case import Case, ShellCase, says
from statefork.testing.fidelity.shell_terminal import TerminalCase
from statefork.testing.fidelity.subject import Inside

__all__ = ["TERMINAL"]

_NEEDS = frozenset({"shell", "files", "processes", "memory"})


_CLEAR = ("clear\r", r"\Ahere>$")


class PythonRepl(TerminalCase):
    kind, name, summary = "programs", "python-repl", "a Python REPL with objects in memory and an open generator"
    programs, packages = ("python3",), ("python3",)
    start = (
        ("python3 -q\r", r"^>>>$"),
        ("def numbers():\r    n = 0\r    while True:\r        n += (yield n) or 1\r\r", r"^>>>$"),
        ("g = numbers(); box = {'list': [next(g), next(g)]}; f = open('/tmp/repl', 'w'); f.write('unflushed')\r", r"^9$"),
        ("g.send(10), box\r", r"^\(11, \{'list': \[0, 1\]\}\)$"),
    )
    spoil = (("box.clear(), g.close(), exit()\r", r"^here>$"), _CLEAR)
    use = (
        ("print(next(g), box['list'], _)\r", r"^12 \[0, 1\] \(11, .*\)$"),
        ("f.close(); open('/tmp/repl').read()\r", r"^'unflushed'$"),
    )


class Vim(TerminalCase):
    kind, name, summary = "programs", "vim", "vim with an unsaved buffer and its undo history"
    programs, packages = ("vim",), ("vim",)
    full_screen = True
    start = (
        ("rm -f /tmp/text; vim -u NONE -N -n /tmp/text\r", r"^~$"),
        ("ifirst line\rsecond line\x1b", r"^second line$"),
        ("ddothird line\x1b", r"^first line\nthird line$"),
    )
    spoil = ((":q!\r", r"^here>$"), _CLEAR)
    use = (
        ("u", r"^first line\n~"),
        ("u", r"^first line\nsecond line$"),
        ("\x12", r"^first line\n~"),
        (":w\r", r"written"),
        (":q\r", r"^here>$"),
        ("clear; cat /tmp/text\r", r"\Afirst line\nhere>$"),
    )


class Less(TerminalCase):
    kind, name, summary = "programs", "less", "less in the middle of a file, with a search"
    programs, packages = ("less",), ("less",)
    full_screen = True
    start = (("seq 5000 | sed 's/^/line /' >/tmp/long; less /tmp/long\r", r"^line 1$"), ("/2345\r", r"\Aline 2345$"))
    spoil = (("q", r"here>$"), _CLEAR)
    use = (("\x0c", r"\Aline 2345$"), ("j", r"\Aline 2346$"), ("G", r"^line 5000$"), ("g", r"\Aline 1$"), ("q", r"here>$"))


class Gdb(TerminalCase):
    """A debugger holds its program by ptrace, and so does CRIU: only one can."""

    kind, name, summary = "refused", "gdb-at-a-breakpoint", "gdb stopped at a breakpoint"
    expects = "refused"
    programs, packages = ("gdb",), ("gdb",)
    start = (
        ("gdb -q -nx --args sleep 100\r", r"^\(gdb\)$"),
        ("set pagination off\r", r"^\(gdb\)$"),
        ("set disable-randomization off\r", r"^\(gdb\) set disable.*\n\(gdb\)$"),
        ("starti\r", r"Program stopped"),
    )
    spoil = (("kill\r", r"y or n"), ("y\r", r"killed\]"), ("quit\r", r"^here>$"), _CLEAR)
    use = (("info program\r", r"Program stopped at|Last stopped"),)

    def refusal(self, inside: Inside, error: Exception) -> None:
        says(str(error), (r"process \d+ \(\S*sleep 100\) is being debugged by process \d+ \(gdb", "detach the debugger"))


TERMINAL: tuple[Case, ...] = (
    PythonRepl(),
    Vim(),
    Less(),
    ShellCase(
        "tmux",
        "tmux with two windows, a split and a running program",
        kind="programs",
        needs=_NEEDS,
        programs=("tmux",),
        packages=("tmux",),
        make="""
            tmux -f /dev/null -L fid new-session -d -s work -n first -x 90 -y 30 "PS1='one> ' bash --norc --noprofile"
            tmux -L fid new-window -n second "PS1='two> ' bash --norc --noprofile" \\; split-window "PS1='three> ' bash --norc"
            tmux -L fid send-keys -t work:first 'VALUE=kept; echo set' Enter
            tmux -L fid send-keys -t work:second.0 'while read -r l; do echo "<$l>"; done' Enter
            until tmux -L fid capture-pane -p -t work:first | grep -qx set; do sleep 0.02; done
        """,
        same="tmux -L fid list-panes -a -F '#{window_name} #{pane_index} #{pane_pid} #{pane_width}x#{pane_height}'; "
        "tmux -L fid capture-pane -p -t work:first | head -3",
        spoil="tmux -L fid kill-window -t work:second",
        use="""
            tmux -L fid send-keys -t work:first 'echo "value=$VALUE"' Enter
            until tmux -L fid capture-pane -p -t work:first | grep -qx value=kept; do sleep 0.02; done
            tmux -L fid send-keys -t work:second.0 'typed' Enter
            until tmux -L fid capture-pane -p -t work:second.0 | grep -qx '<typed>'; do sleep 0.02; done
            tmux -L fid new-window 'exec sleep 50'; [ $(tmux -L fid list-windows | wc -l) = 3 ]
        """,
    ),
    Gdb(),
)
