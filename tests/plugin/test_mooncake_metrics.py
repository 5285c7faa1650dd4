"""The outcomes of pages in Mooncake, and the bandwidth of fetches."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from dps_sglang.metrics import PAGES
from dps_sglang.mooncake_metrics import (
    corrected,
    counted_reads,
    counted_writes,
    read_outcomes,
    record_codes,
    write_outcomes,
)
from dps_sglang.sharing import SHARING

NO_SPACE, NOT_FOUND, EXISTS, RPC_FAILED = -200, -704, -705, -900


def exported() -> dict[str, float]:
    """The number of pages by outcome."""
    return {
        sample.labels["outcome"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == f"{PAGES}_total"
    }


@pytest.mark.parametrize(("mla", "expected"), [(False, 3.0), (True, 1.5)])
def test_bandwidth_of_fetches_includes_the_values_of_pages(mla: bool, expected: float) -> None:
    """SGLang's counts only the keys."""
    store = SimpleNamespace(is_mla_backend=mla)
    stats = corrected(lambda _: SimpleNamespace(prefetch_bandwidth=[1.5]), store)
    assert stats.prefetch_bandwidth == [expected]


@pytest.mark.parametrize(
    ("results", "codes", "outcomes"),
    [
        ([True, True], [9, 9, 9, 9], {"read": 2}),
        ([True, False], [9, 9, 9, NOT_FOUND], {"read": 1, "missing": 1}),
        ([False, False], [RPC_FAILED, NOT_FOUND, 9, NOT_FOUND], {"read_error": 2}),
    ],
)
def test_reads_are_counted_by_the_codes_of_their_objects(
    results: list[bool], codes: list[int], outcomes: dict[str, int]
) -> None:
    assert +Counter(read_outcomes(results, codes)) == outcomes


@pytest.mark.parametrize(
    ("results", "codes", "outcomes"),
    [
        ([True, True], [0, 0, 0, 0], {"stored": 2}),
        ([True, True], [], {"present": 2}),
        ([True, True, False], [0, 0, 0, NO_SPACE], {"stored": 1, "present": 1, "full": 1}),
        ([True, False], [0, 0, RPC_FAILED, 0], {"stored": 1, "write_error": 1}),
        ([True, False], [0, 0, EXISTS, EXISTS], {"stored": 1, "present": 1}),
    ],
)
def test_writes_are_counted_by_the_codes_of_their_objects(
    results: list[bool], codes: list[int], outcomes: dict[str, int]
) -> None:
    assert +Counter(write_outcomes(results, codes, objects_per_page=2)) == outcomes


def test_wrapped_backend_counts_pages_while_they_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def transfer(codes: list[int]) -> Any:
        return lambda self, keys, host_indices, extra_info: [
            code >= 0 for code in record_codes(lambda _: codes, self)
        ]

    store = SimpleNamespace(is_mla_backend=True, should_split_heads=False)
    before = Counter(exported())
    for begun in (False, True):
        monkeypatch.setattr(SHARING, "begun", begun)
        assert counted_writes(transfer([0, NO_SPACE]), store, ["a", "b"], None) == [True, False]
        assert counted_reads(transfer([9, NOT_FOUND]), store, ["a", "b"], None) == [True, False]
    assert Counter(exported()) - before == {"stored": 1, "full": 1, "read": 1, "missing": 1}
