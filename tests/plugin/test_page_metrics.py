"""The metric by which an engine states what happened to the pages of the shared store."""

from pathlib import Path

from prometheus_client import REGISTRY

from dps_sglang.page_metrics import NAME, PageMetrics
from tests.plugin.pages import files, payload, read, store


def exported() -> dict[str, float]:
    """The metric's values by outcome."""
    return {
        sample.labels["outcome"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == f"{NAME}_total"
    }


def test_outcomes_of_all_stores_of_the_process_are_added(tmp_path: Path) -> None:
    """A store is opened again if the storage of a running engine is detached and attached."""
    before = exported()
    for number in range(2):
        pages, metrics = store(tmp_path / str(number)), PageMetrics()
        metrics.export(pages.counts())
        pages.put("a", payload("a"))
        metrics.export(pages.counts())
        (page,) = files(tmp_path / str(number))
        page.write_bytes(page.read_bytes()[:-1])
        assert read(pages, "a") is None
        assert read(pages, "a") is None
        for _ in range(2):
            metrics.export(pages.counts())
    new = {outcome: value - before.get(outcome, 0) for outcome, value in exported().items()}
    assert {outcome: value for outcome, value in new.items() if value} == {
        "stored": 2,
        "rejected": 2,
        "missing": 2,
    }
