from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.timeout(900)
def test_inspect(check: Callable[[str], None]) -> None:
    check("inspect")
