"""`statefork token`: make, list and revoke the tokens of the daemon. A running daemon knows at once."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from statefork.cli.extras import need
from statefork.cli.main import home, note
from statefork.errors import UsageError
from statefork.home import default_home

if TYPE_CHECKING:
    from statefork.server.guard.audit import AuditLog
    from statefork.server.guard.tokens import Token, TokenStore

__all__ = ["token"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@click.group()
def token() -> None:
    """Tokens for the daemon: who may use it over TCP, and for what."""


@token.command()
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    type=click.Choice(["read", "exec", "admin", "metrics"]),
    help="admin may all; exec implies read; metrics opens /metrics only.",
)
@click.option("--name", default="", help="Whose it is, for the list and the audit log.")
@click.option("--expires", metavar="TIME", help="30d, 12h, 90m, or a date such as 2030-01-31T12:00Z. Default: never.")
@click.option("--environment", "environments", multiple=True, metavar="ID", help="One of others' that it may use too.")
@click.option("--max-environments", type=click.IntRange(0), help="How many it may own at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def create(
    scopes: tuple[str, ...],
    name: str,
    expires: str | None,
    environments: tuple[str, ...],
    max_environments: int | None,
    as_json: bool,
) -> None:
    """Make a token and print it. It is shown this once: only a hash of it is kept."""
    expires_in = _seconds_until(expires) if expires else None
    with _opened() as (tokens, audit):
        made, secret = tokens.create(
            scopes,
            name=name,
            expires_in=expires_in,
            environments=environments or None,
            max_environments=max_environments,
        )
        _record(audit, "token.create", made)
    if as_json:
        click.echo(json.dumps({**_told(made), "token": secret}))
        return
    click.echo(secret)
    note(f"token {made.id}; it is not shown again, `statefork token revoke {made.id}` ends it")


@token.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def list_tokens(as_json: bool) -> None:
    """All tokens, those that are no good any more too; never the secrets."""
    with _opened() as (tokens, _):
        found = tokens.all()
    if as_json:
        click.echo(json.dumps({"tokens": [_told(one) for one in found]}))
        return
    if not found:
        note("there are no tokens; make one with `statefork token create --scope exec`")
        return
    rows = [["id", "name", "scopes", "state", "created", "expires", "environments"], *(_row(one) for one in found)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@token.command()
@click.argument("identifier", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def revoke(identifier: str, as_json: bool) -> None:
    """Refuse a token from now on, given by id, unique beginning of it, or name. Its environments stay."""
    with _opened() as (tokens, audit):
        gone = tokens.revoke(identifier)
        _record(audit, "token.revoke", gone)
    if as_json:
        click.echo(json.dumps(_told(gone)))
    else:
        click.echo(gone.id)


@contextmanager
def _opened() -> Iterator[tuple[TokenStore, AuditLog]]:
    need("server")
    from statefork.server.guard.audit import AuditLog
    from statefork.server.guard.tokens import TokenStore

    directory = (home() or default_home()) / "server"
    tokens = TokenStore(directory / "server.db")
    try:
        audit = AuditLog(directory)
        try:
            yield tokens, audit
        finally:
            audit.close()
    finally:
        tokens.close()


def _record(audit: AuditLog, action: str, subject: Token) -> None:
    facts: dict[str, Any] = {"token": subject.id, "token_name": subject.name, "scopes": list(subject.scopes)}
    audit.append(action=action, principal="local", name=getpass.getuser(), outcome="ok", durable=True, facts=facts)


def _seconds_until(text: str) -> float:
    if match := re.fullmatch(r"(\d+)([smhdw])", text):
        return int(match[1]) * float(_UNITS[match[2]])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--expires {text}: give a span such as 30d or 12h, or a date such as 2030-01-31") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - datetime.now(UTC)).total_seconds()


def _told(one: Token) -> dict[str, Any]:
    return {
        "id": one.id,
        "name": one.name,
        "scopes": list(one.scopes),
        "state": one.state(),
        "environments": None if one.environments is None else list(one.environments),
        "max_environments": one.max_environments,
        "created_at": _iso(one.created_at),
        "expires_at": _iso(one.expires_at),
        "revoked_at": _iso(one.revoked_at),
    }


def _row(one: Token) -> list[str]:
    listed = "own" if one.environments is None else f"own and {', '.join(one.environments)}"
    limit = "" if one.max_environments is None else f", {one.max_environments} at most"
    when = [(_iso(moment) or "never")[:16] for moment in (one.created_at, one.expires_at)]
    return [one.id, one.name, ",".join(one.scopes), one.state(), *when, listed + limit]


def _iso(moment: float | None) -> str | None:
    return None if moment is None else datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
