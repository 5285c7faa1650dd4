"""The outcomes of pages in Mooncake, and the measurement of its bandwidth, with a client that copies memory."""

import ctypes
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dps_sglang import mooncake_metrics
from dps_sglang.mooncake_metrics import (
    corrected,
    counted_reads,
    counted_writes,
    measure,
    noted,
    read_outcomes,
    write_outcomes,
)
from dps_sglang.sharing import SHARING
from tests.plugin.test_plugin_metrics import exported

PAGE_BYTES = 4096
NO_SPACE, NOT_FOUND, EXISTS, RPC_FAILED = -200, -704, -705, -900


class Client:
    """Mooncake's client, with the objects in this process."""

    def __init__(self, put: int = 0, get: int = 0, register: int = 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.registered: set[int] = set()
        self._put, self._get, self._register = put, get, register

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.add(address)
        return self._register

    def unregister_buffer(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def batch_put_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        self.objects |= {
            key: ctypes.string_at(address, size)
            for key, address, size in zip(keys, addresses, sizes, strict=True)
        }
        return [self._put] * len(keys)

    def batch_get_into(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            ctypes.memmove(address, self.objects[key], size)
        return [self._get or size for size in sizes]

    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]:
        assert force
        return [0 if self.objects.pop(key) else NOT_FOUND for key in keys]


def test_bandwidth_is_measured_and_neither_pages_nor_registered_memory_remain() -> None:
    client = Client()
    found = measure(client, PAGE_BYTES)
    assert found is not None
    assert min(found.read, found.write) > 0
    assert client.objects == {}
    assert client.registered == set()


def test_client_that_cannot_force_the_removal_is_measured() -> None:
    client = Client()
    client.batch_remove = lambda keys: []  # type: ignore[method-assign, assignment, misc]
    assert measure(client, PAGE_BYTES) is not None


@pytest.mark.parametrize(
    "client",
    [Client(put=NO_SPACE), Client(get=RPC_FAILED), Client(register=-1)],
    ids=["put", "get", "register"],
)
def test_failed_transfer_is_no_measurement(client: Client) -> None:
    assert measure(client, PAGE_BYTES) is None


@pytest.mark.parametrize("mla", [False, True])
def test_measurement_is_reported_in_the_log_and_in_the_metrics_of_the_backend(
    caplog: pytest.LogCaptureFixture, mla: bool
) -> None:
    """SGLang's bandwidth of fetches, which is that of the keys of pages, is corrected."""
    store = SimpleNamespace(
        store=Client(),
        is_mla_backend=mla,
        enable_storage_metrics=True,
        prefetch_bandwidth=[1.5],
        backup_bandwidth=[],
    )
    with caplog.at_level("INFO"):
        mooncake_metrics._measure(store, PAGE_BYTES, 64)
    stats = corrected(lambda made: SimpleNamespace(prefetch_bandwidth=made.prefetch_bandwidth), store)
    fetch, read = stats.prefetch_bandwidth
    (write,) = store.backup_bandwidth
    assert fetch == (1.5 if mla else 3.0)
    assert min(read, write) > 0
    assert f"the storage reads {read:.2f} GB/s" in caplog.text
    assert f"and writes {write:.2f} GB/s" in caplog.text


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
            code >= 0 for code in noted(lambda _: codes, self)
        ]

    store = SimpleNamespace(is_mla_backend=True, should_split_heads=False)
    before = Counter(exported())
    for begun in (False, True):
        monkeypatch.setattr(SHARING, "begun", begun)
        assert counted_writes(transfer([0, NO_SPACE]), store, ["a", "b"], None) == [True, False]
        assert counted_reads(transfer([9, NOT_FOUND]), store, ["a", "b"], None) == [True, False]
    assert Counter(exported()) - before == {"stored": 1, "full": 1, "read": 1, "missing": 1}
