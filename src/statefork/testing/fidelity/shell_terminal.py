"""The terminal: what a person had typed, and what was on the screen."""

from __future__ import annotations

from statefork.testing.fidelity.case import Case, ShellCase
from statefork.testing.fidelity.subject import CaseFailed, Inside
from statefork.testing.fidelity.terminal import Terminal

__all__ = ["CASES"]

NEEDS = frozenset({"shell", "processes", "memory", "terminal"})


class TerminalCase(Case):
    """Something is going on in the terminal. Keys are sent when the screen shows that they are waited for, as a person does."""

    kind = "shell"
    needs = NEEDS
    start: tuple[tuple[str, str], ...]
    """Keys, and what the screen then shows; the last is the state itself."""
    spoil: tuple[tuple[str, str], ...]
    use: tuple[tuple[str, str], ...]
    full_screen = False

    def setup(self, inside: Inside) -> None:
        with Terminal(inside.subject) as terminal:
            terminal.line("PS1='here> '; clear")
            terminal.expect(r"^here>$")
            _type(terminal, self.start)

    def observe(self, inside: Inside) -> str:
        with Terminal(inside.subject) as terminal:
            return terminal.expect(f"{self.start[-1][1]}|{self.spoil[-1][1]}")

    def perturb(self, inside: Inside) -> None:
        with Terminal(inside.subject) as terminal:
            self._attend(terminal)
            _type(terminal, self.spoil)

    def works(self, inside: Inside) -> None:
        with Terminal(inside.subject) as terminal:
            self._attend(terminal)
            _type(terminal, self.use)

    def _attend(self, terminal: Terminal) -> None:
        terminal.expect(self.start[-1][1])
        if self.full_screen:
            terminal.settle()


def _type(terminal: Terminal, steps: tuple[tuple[str, str], ...]) -> None:
    for keys, shown in steps:
        terminal.send(keys)
        terminal.expect(shown)


class HalfTyped(TerminalCase):
    name, summary = "half-typed-input", "a half-typed command line"
    start = (("echo unfini", r"^here> echo unfini"),)
    spoil = (("\x15clear\r", r"\Ahere>$"),)
    use = (("shed-business\r", r"^unfinished-business$"),)


class ReadPrompt(TerminalCase):
    name, summary = "read-at-a-prompt", "a `read` that waits for an answer"
    start: tuple[tuple[str, str], ...] = (("read -p 'your name? ' who; echo \"hello <$who>\"\r", r"^your name\?$"),)
    spoil = (("nobody\r", r"^hello <nobody>$"),)
    use = (("Alice\r", r"^hello <Alice>$"),)


class HalfTypedAnswer(ReadPrompt):
    """Until Enter is pressed these bytes lie in the kernel's line buffer, and backspace must still reach them."""

    name, summary = "half-typed-answer", "an answer half typed to a program that reads lines"
    start = (*ReadPrompt.start, ("Alex", r"^your name\? Alex$"))
    spoil = (("\x15nobody\r", r"^hello <nobody>$"),)
    use = (("\x7f\x7fice\r", r"^hello <Alice>$"),)


class TypedAhead(TerminalCase):
    name, summary = "typed-ahead", "lines typed ahead while a command runs"
    start = (
        ("mkfifo /tmp/gate; read -r go </tmp/gate; read -r a; read -r b; echo \"<$a|$b>\"\r", r"b>\"$"),
        ("one\rtwo\r", r"^one\ntwo$"),
    )
    spoil = (("\x03", r"\^C\nhere>$"), ("clear\r", r"\Ahere>$"))

    def works(self, inside: Inside) -> None:
        with Terminal(inside.subject) as terminal:
            inside.beside("echo go >/tmp/gate")
            terminal.expect(r"^<one\|two>$")
            if terminal.text.count("one\n") != 1:
                raise CaseFailed(f"what was typed ahead is echoed again:\n{terminal.text}")


class CtrlZ(TerminalCase):
    name, summary = "suspended-with-ctrl-z", "a program suspended with Ctrl-Z comes back with fg"
    start = (
        ("(read -r a; echo got $a; read -r b; echo \"<$a|$b>\")\r", r"b>\"\)$"),
        ("first\r", r"^got first$"),
        ("\x1a", r"Stopped .*$"),
    )
    spoil = (("kill -9 %1; wait; clear; jobs; echo none\r", r"^none$"),)
    use = (("fg\r", r"here> fg\n\( read.*$"), ("second\r", r"^<first\|second>$"))


class NestedShell(TerminalCase):
    name, summary = "nested-shell", "a shell in the shell"
    start = (("bash --norc\r", r"^bash-.*#$"), ("PS1='inner> '; depth=$SHLVL; cd /usr; clear; echo in $depth\r", r"^in 2\ninner>$"))
    spoil = (("exit\r", r"^exit\nhere>$"),)
    use = (("echo $PWD $depth\r", r"^/usr 2$"), ("exit\r", r"^exit\nhere>$"), ("echo back at $SHLVL\r", r"^back at 1$"))


class NestedJobControl(NestedShell):
    """Only the first process of a terminal session gets the terminal back as its controlling one."""

    name, summary = "nested-job-control", "job control in a shell in the shell"
    needs = NEEDS | {"controlling-terminal"}
    use = (("sleep 100\r", r"sleep 100$"), ("\x1a", r"Stopped"), ("jobs; kill %1\r", r"Stopped.*sleep 100"))


class NestedDash(TerminalCase):
    """It holds /dev/tty open, which CRIU does not carry."""

    name, summary = "nested-dash", "another shell in the shell, which holds /dev/tty open"
    programs, packages = ("dash",), ("dash",)
    start = (("PS1='dash> ' ENV= dash -i\r", r"^dash>$"), ("kept=7; clear; echo in dash\r", r"^in dash\ndash>$"))
    spoil = (("exit\r", r"^here>$"),)
    use = (("echo is $((kept + 1))\r", r"^is 8$"), ("exit\r", r"^here>$"))


class OtherUser(TerminalCase):
    name, summary = "su-to-another-user", "su to another user"
    programs, packages = ("su",), ("util-linux",)
    start = (
        ("su nobody -s /bin/bash -c 'exec bash --norc'\r", r"^bash.*\$$"),
        ("PS1='guest> '; clear; id -un\r", r"^nobody\nguest>$"),
    )
    spoil = (("exit\r", r"^exit\nhere>$"),)
    use = (
        ("touch /root/x; echo $? $(id -u)\r", r"Permission denied\n1 65534$"),
        ("exit\r", r"^exit\nhere>$"),
        ("echo back as $(id -un)\r", r"^back as root$"),
    )


class WindowSize(Case):
    name, kind, summary = "window-size", "shell", "the terminal's window size"
    needs = NEEDS

    def setup(self, inside: Inside) -> None:
        with Terminal(inside.subject, rows=41, columns=133) as terminal:
            terminal.line("clear; stty size")
            terminal.expect(r"^41 133$")

    def observe(self, inside: Inside) -> str:
        return inside.beside("stty -F /dev/pts/0 size")

    def perturb(self, inside: Inside) -> None:
        inside.beside("stty -F /dev/pts/0 rows 10 cols 20")

    def works(self, inside: Inside) -> None:
        """A program in the terminal hears of a new size."""
        with Terminal(inside.subject, rows=41, columns=133) as terminal:
            terminal.line("clear; trap 'stty size' WINCH; echo ready")
            terminal.expect(r"^ready$")
            terminal.resize(20, 70)
            terminal.line("")
            terminal.expect(r"20 70$")


class Screen(Case):
    """What was printed before the snapshot is on the screen of whoever attaches afterwards."""

    name, kind, summary = "screen", "shell", "what is on the screen"
    needs = NEEDS

    def setup(self, inside: Inside) -> None:
        with Terminal(inside.subject) as terminal:
            terminal.line("PS1='here> '; clear; printf '\\033[31mred\\033[0m %s\\n' one two three")
            terminal.expect(r"^red three\nhere>$")

    def observe(self, inside: Inside) -> str:
        with Terminal(inside.subject) as terminal:
            terminal.expect(r"^here>$")
            return terminal.text

    def perturb(self, inside: Inside) -> None:
        with Terminal(inside.subject) as terminal:
            terminal.line("clear")
            terminal.expect(r"\Ahere>$")

    def works(self, inside: Inside) -> None:
        with Terminal(inside.subject) as terminal:
            terminal.line("echo still; tty")
            found = terminal.expect(r"^still\n.*$")
            if "/dev/pts/0" not in found:
                raise CaseFailed(f"the terminal is {found!r}")


CASES: tuple[Case, ...] = (
    ShellCase(
        "terminal-settings",
        "terminal settings (stty)",
        kind="shell",
        needs=NEEDS,
        make="stty -F /dev/pts/0 -echo -icanon min 3 time 7 erase ^H intr ^T",
        same="stty -F /dev/pts/0 -a",
        spoil="stty -F /dev/pts/0 sane",
        use="stty -F /dev/pts/0 sane echo",
    ),
    WindowSize(),
    Screen(),
    HalfTyped(),
    ReadPrompt(),
    HalfTypedAnswer(),
    TypedAhead(),
    CtrlZ(),
    NestedShell(),
    NestedJobControl(),
    NestedDash(),
    OtherUser(),
)
