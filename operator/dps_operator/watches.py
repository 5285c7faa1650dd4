"""Kopf's watches of DPSRouters, pods and children, restarted after failures and when kinds are installed."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

import kopf

from dps_operator.errors import ClusterError
from dps_operator.handlers import kopf_settings, registry
from dps_operator.observe import Observations
from dps_operator.resync import Resync
from dps_operator.settings import Settings
from dps_operator.task_scope import task_scope
from dps_operator.work_queue import WorkQueue

RETRY_SECONDS: Final = 5.0
"""Seconds between a failure of all watches and their restart."""
STOP_SECONDS: Final = 3.0
"""Time for Kopf to close its connections, in seconds, before its tasks are cancelled."""

log = logging.getLogger(__name__)


class Watches:
    """Runs Kopf within the operator's event loop."""

    def __init__(
        self,
        observations: Observations,
        queue: WorkQueue,
        resync: Resync,
        settings: Settings,
        install_signal_handlers: Callable[[], None],
    ) -> None:
        """install_signal_handlers: called after Kopf has replaced the operator's own."""
        self._observations = observations
        self._queue = queue
        self._resync = resync
        self._settings = settings
        self._install_signal_handlers = install_signal_handlers
        self.established = asyncio.Event()
        """Set while all watches are established."""

    async def run(self) -> None:
        """Watch until cancelled."""
        # Watching starts after the first complete listing, because a reconcile requires all children in the cache.
        await self._resync.complete.wait()
        while True:
            try:
                await self._watch()
                log.info("restarting watches: the set of installed kinds has changed")
            except Exception as error:
                # The API server failed while Kopf resolved the kinds to watch, or one of them was removed.
                log.warning("watching failed: %s; retrying in %.0f s", error, RETRY_SECONDS)
                await asyncio.sleep(RETRY_SECONDS)
                with contextlib.suppress(ClusterError):
                    await self._resync.once()

    async def _watch(self) -> None:
        """Run Kopf until the set of installed kinds changes."""
        self._resync.changed.clear()
        async with task_scope():
            tasks = await kopf.spawn_tasks(
                registry=registry(self._observations, self._queue, self._resync.installed),
                settings=kopf_settings(self._settings),
                standalone=True,
                clusterwide=not self._settings.namespaces,
                namespaces=self._settings.namespaces,
                stop_flag=self._resync.changed,
                ready_flag=self.established,
            )
            # kopf.spawn_tasks() has replaced the operator's signal handlers.
            self._install_signal_handlers()
            # kopf.run_tasks() would cancel tasks of other parts of the operator, too, and it may wait forever for
            # watches that continued after the failure of another one.
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                self.established.clear()
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=STOP_SECONDS)
