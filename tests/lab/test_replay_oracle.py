"""The oracle: Eq. 2 of the paper. tests/local/test_stack compares its decisions with those of gateways."""

import math

import pytest

from dps_lab.replay.oracle import delta_prefill_pool


@pytest.mark.parametrize(
    ("delta", "threshold", "pool"),
    [
        (1, 0, "greedy"),
        (0, 0, "speculative"),
        (127, 128, "speculative"),
        (128, 128, "speculative"),
        (129, 128, "greedy"),
        (10**9, math.inf, "speculative"),
    ],
)
def test_turn_is_routed_to_the_speculative_pool_up_to_the_threshold(
    delta: int, threshold: float, pool: str
) -> None:
    assert delta_prefill_pool(delta, threshold) == pool
