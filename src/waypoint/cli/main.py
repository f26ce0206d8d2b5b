"""`waypoint`: finds the command and turns its errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["main"]

COMPLETION = "_WAYPOINT_COMPLETE"


def main() -> NoReturn:
    words = sys.argv[1:]
    if words[:1] == ["exec"] and COMPLETION not in os.environ:
        from waypoint.cli import quick

        code = quick.attempt(words[1:])
        if code is not None:
            # Nothing is left to do, and taking the interpreter down piece by piece would cost milliseconds.
            sys.stderr.flush()
            os._exit(code)
    sys.exit(_whole(words))


def _whole(words: list[str]) -> int:
    import click

    from waypoint.cli import output
    from waypoint.cli.commands import waypoint
    from waypoint.errors import UsageError, WaypointError

    options = words[: words.index("--")] if "--" in words else words
    as_json = "--json" in options
    try:
        code = waypoint.main(words, prog_name="waypoint", standalone_mode=False, complete_var=COMPLETION)
        sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.UsageError as error:
        if as_json:
            return output.fail(UsageError(error.format_message()), as_json)
        error.show()
        return 2
    except click.ClickException as error:
        return output.fail(WaypointError(error.format_message()), as_json)
    except WaypointError as error:
        return output.fail(error, as_json)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads: what is still buffered has nowhere to go
        return 141
    except OSError as error:
        return output.fail(WaypointError(f"{error.filename or 'the system'}: {error.strerror or error}"), as_json)


if __name__ == "__main__":
    main()
