"""The state of a process that may share pages."""

from collections.abc import Iterator

import pytest

from dps_sglang import metrics, sharing
from dps_sglang.sharing import Sharing


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sharing]:
    """The state of a process that has just started."""
    state = Sharing()
    monkeypatch.setattr(sharing, "SHARING", state)
    yield state
    metrics._sharing().clear()
