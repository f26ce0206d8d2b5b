"""What the async adapters share: programs as any user, on a Debian and on a busybox, and their end with their caller."""

from __future__ import annotations

import anyio
import pytest

from statefork import Environment, create_env_manager
from statefork.integrations.programs import NO_SUCH_USER, run_program
from statefork.testing.images import busybox_archive

pytestmark = pytest.mark.anyio
SHOW = "id -u; id -g; echo $HOME $USER; echo $PATH; echo $0; echo $1"


async def _as(environment: Environment, user: str | int, *argv: str) -> list[str]:
    path = {"PATH": "/opt/bin:/usr/bin:/bin"}
    result = await run_program(environment, argv or ["sh", "-c", SHOW, "a b", "$c"], user=user, env=path)
    assert result.ok, result.stderr
    return result.stdout.splitlines()


async def test_users_of_a_debian(environment: Environment) -> None:
    rest = ["/opt/bin:/usr/bin:/bin", "a b", "$c"]
    environment.exec_command("useradd -m -u 4321 -G users tester")
    assert await _as(environment, "tester") == ["4321", "4321", "/home/tester tester", *rest]
    assert await _as(environment, 4321) == ["4321", "4321", "/home/tester tester", *rest]
    assert (await _as(environment, "tester", "id", "-nG"))[0].split() == ["tester", "users"]
    assert await _as(environment, "54321") == ["54321", "54321", "/ 54321", *rest]
    assert (await _as(environment, "root"))[:2] == ["0", "0"]
    missing = await run_program(environment, ["true"], user="nobody-of-that-name")
    assert missing.exit_code == NO_SUCH_USER
    assert "nobody-of-that-name" in missing.stderr


async def test_programs_of_a_user_are_not_found_before_they_are_that_user(environment: Environment) -> None:
    """A directory that the user can write to comes first on PATH: nothing in it may run as root."""
    environment.exec_command("mkdir /opt/bin; chown nobody /opt/bin")
    for name in ("setpriv", "env", "id", "su", "grep"):
        environment.write_file(f"/opt/bin/{name}", "#!/bin/sh\n/usr/bin/id -u >> /opt/bin/ran\n", 0o755)
    await _as(environment, "nobody", "true")
    assert environment.run(["sh", "-c", "cat /opt/bin/ran"]).stdout == ""


async def test_users_of_a_busybox(home: str) -> None:
    with create_env_manager("waypoint_build", home=home, rootfs=busybox_archive()) as small:
        assert await _as(small, "user") == ["1000", "1000", "/home/user user", "/opt/bin:/usr/bin:/bin", "a b", "$c"]
        assert (await _as(small, "root"))[:2] == ["0", "0"]
        assert (await run_program(small, ["true"], user="nobody-of-that-name")).exit_code == NO_SUCH_USER


async def test_a_cancelled_program_ends(environment: Environment) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(run_program, environment, ["sh", "-c", "touch /tmp/begun; sleep 1000"])
        with anyio.fail_after(60):
            while not environment.run(["test", "-e", "/tmp/begun"]).ok:
                await anyio.sleep(0.02)
        group.cancel_scope.cancel()
    with anyio.fail_after(60):
        while environment.run(["pgrep", "-x", "sleep"]).ok:
            await anyio.sleep(0.02)
