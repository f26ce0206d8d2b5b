"""`statefork audit`: check what the daemon wrote down."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from statefork.cli.extras import need
from statefork.cli.main import home
from statefork.errors import UsageError
from statefork.home import default_home

__all__ = ["audit"]


@click.group()
def audit() -> None:
    """The audit log: who did what, on which environment."""


@audit.command()
@click.option("--head", "known", metavar="NUMBER:HASH", help="A line noted earlier, which has to be there, unchanged.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def verify(known: str | None, as_json: bool) -> None:
    """Find lines that were changed, removed or put in since they were written. Ends in 1 if there are any."""
    need("server")
    from statefork.server.guard.verify import verify as judge

    directory = (home() or default_home()) / "server"
    verdict = judge(directory, known=_known(known) if known else None)
    if as_json:
        document = {
            "ok": verdict.ok,
            "lines": verdict.lines,
            "head": {"seq": verdict.seq, "hash": verdict.hash},
            "healed": verdict.healed,
            "findings": [asdict(finding) for finding in verdict.findings],
        }
        click.echo(json.dumps(document))
    else:
        for finding in verdict.findings:
            click.echo(f"line {finding.line}: {finding.kind}: {finding.message}")
        healed = f", {verdict.healed} torn by a crash and cut off" if verdict.healed else ""
        state = "whole" if verdict.ok else "NOT whole"
        click.echo(f"{directory / 'audit.jsonl'}: {verdict.lines} lines{healed}; {state}")
        click.echo(f"last line: {verdict.seq}:{verdict.hash}")
    sys.exit(0 if verdict.ok else 1)


def _known(text: str) -> tuple[int, str]:
    number, _, digest = text.partition(":")
    if not number.isdigit() or len(digest) != 64:
        raise UsageError(f"--head {text}: give number and hash as `statefork audit verify` prints them, 17:ab3f…")
    return int(number), digest
