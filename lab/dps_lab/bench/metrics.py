"""The gateway's own metrics, read from its Prometheus endpoint."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, str], float]
"""Values by sample name and labels. Labels are written as `key=value,…`."""


def parse(text: str) -> Samples:
    """Parse Prometheus' text format."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[sample.name, labels] = sample.value
    return samples


def scrape(admin_port: int) -> Samples:
    """The current samples of 127.0.0.1:`admin_port`/metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics", timeout=10) as answer:
        return parse(answer.read().decode())


def rise(before: Samples, after: Samples, name: str) -> dict[str, float]:
    """The increase of one metric between two scrapes, by labels. Series without an increase are omitted."""
    steps = {labels: value - before.get((n, labels), 0) for (n, labels), value in after.items() if n == name}
    return {labels: step for labels, step in sorted(steps.items()) if step}


def mean_between(before: Samples, after: Samples, histogram: str) -> float:
    """The mean of a histogram's observations between two scrapes, over all labels; 0 if there are none."""
    count = sum(rise(before, after, f"{histogram}_count").values())
    return sum(rise(before, after, f"{histogram}_sum").values()) / count if count else 0.0
