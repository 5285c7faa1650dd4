"""The documents' fragments of a DPSRouter's spec."""

from typing import Any

import pytest

from dps_operator.build import children
from dps_operator.build.pods import overlay
from dps_testkit.operator.fragments import fragments
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router

FRAGMENTS = fragments()


@pytest.mark.parametrize("fragment", FRAGMENTS.values(), ids=FRAGMENTS.keys())
def test_fragment_is_accepted_in_the_smallest_router(fragment: dict[str, Any]) -> None:
    children(router(overlay(SMALLEST, fragment)), SETTINGS, "")
