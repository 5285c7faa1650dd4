"""What the gateway itself says, read from its Prometheus endpoint."""

import urllib.request
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, str], float]
"""Values by sample name and labels, the labels written `key=value,…`."""


def parse(text: str) -> Samples:
    """The samples of an exposition in Prometheus' text format."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[sample.name, labels] = sample.value
    return samples


def scrape(admin_port: int) -> Samples:
    """What 127.0.0.1:`admin_port`/metrics says now."""
    with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics", timeout=10) as answer:
        return parse(answer.read().decode())


def rise(before: Samples, after: Samples, name: str) -> dict[str, float]:
    """By labels, how far the samples of one name rose between two scrapes, where they did."""
    steps = {labels: value - before.get((n, labels), 0) for (n, labels), value in after.items() if n == name}
    return {labels: step for labels, step in sorted(steps.items()) if step}


def mean_between(before: Samples, after: Samples, histogram: str) -> float:
    """The mean of what a histogram observed between two scrapes, over all its labels; 0 if nothing."""
    count = sum(rise(before, after, f"{histogram}_count").values())
    return sum(rise(before, after, f"{histogram}_sum").values()) / count if count else 0.0


def add(totals: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """Two readings of `rise` taken together."""
    result = defaultdict(float, totals)
    for labels, value in more.items():
        result[labels] += value
    return dict(sorted(result.items()))
