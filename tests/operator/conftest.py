"""An operator that has reconciled the smallest DPSRouter."""

import pytest

from dps_testkit.operator.harness import OperatorHarness
from dps_testkit.operator.routers import SMALLEST


@pytest.fixture
async def harness() -> OperatorHarness:
    result = OperatorHarness(SMALLEST)
    await result.reconcile()
    return result
