"""Init's socket is not part of a layer; what somebody in a session has put in its place is."""

from __future__ import annotations

import socket
from pathlib import Path

from waypoint.guest.layer import forget_socket


def listening(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    return path


def test_it_is_taken_out_of_a_layer(tmp_path: Path) -> None:
    made = listening(tmp_path / ".waypoint" / "run" / "sock")
    forget_socket(tmp_path)
    assert not made.exists() and made.parent.is_dir()
    forget_socket(tmp_path)


def test_a_layer_without_it_is_left_as_it_is(tmp_path: Path) -> None:
    forget_socket(tmp_path)
    (tmp_path / ".waypoint").mkdir()
    forget_socket(tmp_path)
    (tmp_path / ".waypoint" / "run").mkdir()
    (tmp_path / ".waypoint" / "run" / "sock").write_text("a file of somebody's")
    forget_socket(tmp_path)
    assert (tmp_path / ".waypoint" / "run" / "sock").read_text() == "a file of somebody's"


def test_no_link_leads_out_of_the_layer(tmp_path: Path) -> None:
    outside = listening(tmp_path / "outside" / "sock")
    layer = tmp_path / "layer"
    (layer / ".waypoint").mkdir(parents=True)
    (layer / ".waypoint" / "run").symlink_to(outside.parent)
    forget_socket(layer)
    assert outside.exists()
