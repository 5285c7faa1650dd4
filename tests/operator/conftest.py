"""An operator that has reconciled the smallest DPSRouter."""

import pytest

from dps_testkit.operator.routers import SMALLEST
from tests.operator.harness import OperatorHarness


@pytest.fixture
async def harness() -> OperatorHarness:
    result = OperatorHarness(SMALLEST)
    await result.reconcile()
    return result
