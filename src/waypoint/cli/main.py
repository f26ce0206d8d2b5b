"""`waypoint`: finds the command and turns its errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["main"]

COMPLETION = "_WAYPOINT_COMPLETE"


def main() -> NoReturn:
    words = sys.argv[1:]
    try:
        if words[:1] in (["exec"], ["run"]) and COMPLETION not in os.environ:
            from waypoint.cli import quick

            code = quick.attempt(words[0], words[1:])
            if code is not None:
                # Nothing is left to do, and taking the interpreter down piece by piece would cost milliseconds.
                sys.stderr.flush()
                os._exit(code)
        sys.exit(_whole(words))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered has nowhere to go
        sys.exit(141)
    except Exception as error:  # noqa: BLE001  a mistake of ours: say so, and end as the contract says
        sys.exit(_mistake(error, _as_json(words)))


def _as_json(words: list[str]) -> bool:
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def _whole(words: list[str]) -> int:
    import click

    from waypoint.cli import output
    from waypoint.cli.commands import waypoint
    from waypoint.errors import UsageError, WaypointError

    try:
        if COMPLETION in os.environ:
            waypoint.main(words, prog_name="waypoint", complete_var=COMPLETION)
        with waypoint.make_context("waypoint", list(words)) as context:
            waypoint.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.UsageError as error:
        if _as_json(words):
            return output.fail(UsageError(error.format_message()), as_json=True)
        error.show()
        return 2
    except click.ClickException as error:
        return output.fail(WaypointError(error.format_message()), _as_json(words))
    except WaypointError as error:
        return output.fail(error, _as_json(words))
    except click.Abort:
        return 130


def _mistake(error: Exception, as_json: bool) -> int:
    import traceback

    from waypoint.cli import output
    from waypoint.errors import WaypointError

    trace = "".join(traceback.format_exception(error))
    if isinstance(error, OSError) and error.filename:
        message = f"{error.filename}: {error.strerror}"
    else:
        message = f"{type(error).__name__}: {error}; this is a mistake in Waypoint"
    if not as_json:
        sys.stderr.write(trace)
    return output.fail(WaypointError(message, traceback=trace), as_json)


if __name__ == "__main__":
    main()
