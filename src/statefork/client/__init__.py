"""The library's environments over HTTP, from the daemon that `statefork serve` runs. Needs the extra: statefork[client].

    from statefork.client import Client

    with Client("https://forks.example:8470", token=token) as client:
        with client.create_env_manager("waypoint_build", rootfs="/srv/rootfs") as environment:
            environment.exec_command("cd /srv/app && make")

`AsyncClient` is the same to await. Nothing here reads environment variables: the caller says where and with which token.
"""

from statefork.client.awaiting import AsyncClient, AsyncRemoteEnvironment
from statefork.client.blocking import Client, RemoteEnvironment
from statefork.client.errors import Forbidden, Overloaded, Refused, Unauthenticated, Unreachable
from statefork.client.parsing import CommandInfo, EnvironmentInfo, TotalUsage
from statefork.client.streaming import AsyncRemoteStream, RemoteStream

__all__ = [
    "AsyncClient",
    "AsyncRemoteEnvironment",
    "AsyncRemoteStream",
    "Client",
    "CommandInfo",
    "EnvironmentInfo",
    "Forbidden",
    "Overloaded",
    "Refused",
    "RemoteEnvironment",
    "RemoteStream",
    "TotalUsage",
    "Unauthenticated",
    "Unreachable",
]
