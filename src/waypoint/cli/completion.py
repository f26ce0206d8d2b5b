"""`waypoint completion`: the script that makes a shell complete commands, options, sessions and snapshots."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from waypoint.cli.main import COMPLETION
from waypoint.cli.options import json_option
from waypoint.cli.output import print_json

__all__ = ["completion"]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
@click.pass_context
def completion(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print the completion script of a shell.

    \b
    bash:  source <(waypoint completion bash)       in ~/.bashrc
    zsh:   source <(waypoint completion zsh)        in ~/.zshrc
    fish:  waypoint completion fish | source        in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(ctx.find_root().command, {}, "waypoint", COMPLETION).source()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
