from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.timeout(900)
def test_harbor(check: Callable[[str], None]) -> None:
    check("harbor")
