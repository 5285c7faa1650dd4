"""Single HTTP requests: a status, or a value from a Prometheus endpoint."""

import aiohttp
from prometheus_client.parser import text_string_to_metric_families


async def status_of(url: str) -> int | None:
    """The status of a GET, or None if the connection fails."""
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return response.status
    except (aiohttp.ClientError, OSError):
        return None


async def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels at `url`/metrics; 0 if there are none."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        text = await response.text()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
