"""Polls the gateways of the DPSRouters that use a feature."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from dps_operator.api.spec import Spec, parse
from dps_operator.errors import GatewaysUnreachableError, SpecError
from dps_operator.gateway_metrics import gateway_addresses
from dps_operator.observe import Key, Observations
from dps_operator.work_queue import WorkQueue

Sample = TypeVar("Sample")


async def at_intervals(seconds: float, once: Callable[[float], Awaitable[None]]) -> None:
    """Call `once` with the monotonic time in seconds, every `seconds`, until cancelled."""
    while True:
        await asyncio.sleep(seconds)
        await once(time.monotonic())


def specs_with(observations: Observations, uses: Callable[[Mapping[str, Any]], bool]) -> dict[Key, Spec]:
    """The specs of the DPSRouters that use a feature. Invalid specs are left out; the reconciler reports them.

    uses: whether a spec uses the feature, decided before it is parsed, so that only the specs of these are parsed.
    """
    specs = {}
    for key, body in observations.routers.items():
        if uses(body["spec"]):
            try:
                specs[key] = parse(body["spec"])
            except SpecError:
                continue
    return specs


class GatewayPoll(Generic[Sample]):
    """Reads a sample from the gateways of a DPSRouter, and reports when there is none."""

    def __init__(
        self,
        observations: Observations,
        queue: WorkQueue,
        read: Callable[[list[str]], Awaitable[Sample]],
        unmeasured: dict[Key, str],
    ) -> None:
        """read: reads from the gateways at some addresses; raises GatewaysUnreachableError.

        unmeasured: receives the reason why there is no sample, or an empty string. A change queues the DPSRouter.
        """
        self._observations = observations
        self._queue = queue
        self._read = read
        self._unmeasured = unmeasured

    async def sample(self, key: Key) -> Sample | None:
        """The sample of one DPSRouter; None if one of its gateways cannot be read, or none is ready."""
        try:
            sample = await self._read(gateway_addresses(self._observations.pods(key)))
        except GatewaysUnreachableError as error:
            self._report(key, str(error))
            return None
        self._report(key, "")
        return sample

    def _report(self, key: Key, problem: str) -> None:
        if self._unmeasured.get(key) != problem:
            self._unmeasured[key] = problem
            self._queue.add(key)
