"""`statefork completion`: the script that makes a shell complete commands, options and backends."""

from __future__ import annotations

import json

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.pass_context
def completion(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print the completion script of a shell.

    \b
    bash:  source <(statefork completion bash)       in ~/.bashrc
    zsh:   source <(statefork completion zsh)        in ~/.zshrc
    fish:  statefork completion fish | source        in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(ctx.find_root().command, {}, "statefork", "_STATEFORK_COMPLETE").source()
    click.echo(json.dumps({"shell": shell, "script": script}) if as_json else script)
