from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "framework", ["programs", "mini_swe_agent", "deepagents", "openai_agents", "smolagents", "openhands"]
)
def test_adapter(framework: str, check: Callable[[str], None]) -> None:
    check(framework)
