"""The table of fault cases summarises the observed turns."""

import pytest

from dps_testkit.traffic.table import Observed, Row, markdown, percentile, row, undisturbed_median

CALM = [Observed(latency=second / 100, added=second / 100 - 0.5) for second in range(1, 101)]


def test_case_without_errors_is_unnoticed() -> None:
    calm = row("calm", CALM)
    assert calm.unnoticed
    assert calm == Row(
        case="calm",
        requests=100,
        retries=0,
        events=0,
        failures=0,
        forgotten=0,
        from_memory=0,
        p95=percentile([turn.latency for turn in CALM], 95),
        worst=1.0,
        worst_added=0.5,
    )


TROUBLES = {
    "a retry": Observed(0.2, 0.1, retries=1, troubles=("connection reset",)),
    "an error event": Observed(0.2, 0.1, retries=1, events=1, troubles=("error event: engine lost",)),
    "a failure": Observed(9.0, 8.9, retries=2, failed=True, troubles=("status 503",) * 3),
    "a forgotten turn": Observed(0.2, 0.1, lost="new turn 1"),
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_trouble_is_counted_and_described(trouble: Observed) -> None:
    summary = row("trouble", [*CALM, trouble])
    assert not summary.unnoticed
    assert (summary.requests, summary.retries, summary.events) == (
        101 + trouble.retries,
        trouble.retries,
        trouble.events,
    )
    assert (summary.failures, summary.forgotten) == (trouble.failed, trouble.lost is not None)
    assert summary.troubles == trouble.troubles + ((trouble.lost,) if trouble.lost else ())
    assert (summary.worst, summary.worst_added) == (max(1.0, trouble.latency), max(0.5, trouble.added))


def test_case_without_turns_raises_value_error() -> None:
    with pytest.raises(ValueError, match="gateway deleted: no turn ended"):
        row("gateway deleted", [])


def test_percentile_of_one_value_is_the_value_and_median_of_none_is_zero() -> None:
    assert percentile([0.3], 95) == 0.3
    assert undisturbed_median([]) == 0.0


def test_table_is_rendered_as_markdown() -> None:
    from_memory = Observed(0.2, 0.1, from_memory=True)
    assert row("Redis deleted", [from_memory]).unnoticed
    troubled = [*CALM * 20, TROUBLES["an error event"], from_memory]
    rows = [row("undisturbed", CALM), row("engines deleted", troubled)]
    assert markdown(rows) == (
        "| case | requests | retries | error events | failures | forgotten turns | turns without Redis "
        "| p95 s | worst s | worst added s |\n"
        "| :-- | --: | --: | --: | --: | --: | --: | --: | --: | --: |\n"
        "| undisturbed | 100 | 0 | 0 | 0 | 0 | 0 | 0.95 | 1.00 | 0.50 |\n"
        "| engines deleted | 2,003 | 1 | 1 | 0 | 0 | 1 | 0.95 | 1.00 | 0.50 |\n"
    )
    assert markdown([]) == ""
