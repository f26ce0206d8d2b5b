"""The systemd unit says what the daemon relies on."""

from __future__ import annotations

import configparser
from pathlib import Path

UNIT = Path(__file__).parents[2] / "packaging/statefork.service"


def test_stopping_the_daemon_leaves_environments_alone() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert (service["Type"], service["KillMode"], service["Delegate"]) == ("notify", "process", "yes")
    assert service["ExecStart"].endswith("statefork serve")
    own_namespace = {"PrivateTmp", "PrivateMounts", "ProtectSystem", "ProtectHome", "PrivateDevices", "ReadOnlyPaths"}
    assert not own_namespace & set(service), "these take the file systems of environments along when the daemon stops"
