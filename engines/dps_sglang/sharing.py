"""Whether this process shares pages. The state is reported in the log and as a metric. If the weights of a running
engine are replaced, it stops sharing pages, because the names of its pages identify the earlier weights.
"""

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

from dps_sglang.metrics import SharingMetric

logger = logging.getLogger(__name__)

TAG = "extra_backend_tag"
"""The setting of SGLang's backend that precedes the name of every page."""

REPLACED = "the weights were replaced or released while the engine was running; restart it"


class NotShareable(Exception):
    """A configuration whose KV must not be shared; the message says why."""


class Sharing:
    """The state of one process. SGLang may open a storage more than once, if a request to an engine attaches it."""

    def __init__(self) -> None:
        self.begun = False
        """Whether this process has shared pages. Then its storage has no pages of a draft model."""
        self.configured = False
        """Whether this process was started with a common prefix cache, even if it has shared no pages."""
        self._metric = SharingMetric()
        self._ends: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._shares = False
        self._replaced = False

    def on_new_weights(self, end: Callable[[], None]) -> None:
        """Call `end` each time that the weights are replaced or released, even if this process shares no pages.

        Afterwards, also call it each time that the engine's own memory is flushed.
        """
        with self._lock:
            self._ends.append(end)

    def begin(self, pages: str) -> None:
        """Begin to share pages. Engines with the same value of `pages` read each other's pages.

        Raises NotShareable if the weights have been replaced.
        """
        with self._lock:
            if self._replaced:
                raise NotShareable(REPLACED)
            self.begun = self.configured = self._shares = True
            self._metric.export(pages, "")

    def refuse(self, problem: str) -> None:
        """Report that this process shares no pages."""
        logger.warning("dps prefix cache: not shared: %s", problem)
        with self._lock:
            self.configured = True
            self._shares = False
            self._metric.export("", problem)

    def end(self) -> None:
        """End the sharing, because the weights are about to be replaced or released, or have just been.

        An engine may still store pages in Mooncake for itself. Each further call gives them other names.
        """
        self._replaced = True
        for end in self._ends:
            end()
        if self._shares:
            self.refuse(REPLACED)

    def flushed(self) -> None:
        """The engine has removed all KV from its own memory, which may include that of earlier weights."""
        if self._replaced:
            self.end()


SHARING = Sharing()
"""The state of this process."""


def not_shared(reason: str) -> Callable[..., Any]:
    """A wrapper for the constructor of a storage backend of SGLang with which no pages are to be shared.

    It depends on no signature: it reports the reason, and gives the pages names that no other engine uses, if an
    argument has the settings of the backend.
    """

    def wrapper(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        SHARING.refuse(reason)
        separate = {name: _with_unique_tag(value) for name, value in kwargs.items()}
        return original(self, *map(_with_unique_tag, args), **separate)

    return wrapper


def unique_name() -> str:
    """A name of pages that no other engine uses."""
    return uuid.uuid4().hex


def _with_unique_tag(argument: Any) -> Any:
    settings = getattr(argument, "extra_config", None)
    if not is_dataclass(type(argument)) or not isinstance(settings, dict | None):
        return argument
    return replace(argument, extra_config={**(settings or {}), TAG: unique_name()})


def replacing_weights(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps the methods of SGLang's scheduler that replace weights.

    Meanwhile, other threads may write pages of the earlier weights, so their names must not be used afterwards.
    """
    SHARING.end()
    try:
        return original(self, *args, **kwargs)
    finally:
        SHARING.end()


def resetting_weights(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Wraps the scheduler's `check_weights`, one of whose actions replaces the weights by random numbers."""
    if recv_req.action == "reset_tensors":
        return replacing_weights(original, self, recv_req)
    return original(self, recv_req)


def releasing_weights(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Wraps the scheduler's `release_memory_occupation`.

    If it releases the weights, their memory may have any content when it is resumed.
    """
    if not recv_req.tags or "weights" in recv_req.tags:
        return replacing_weights(original, self, recv_req)
    return original(self, recv_req)


def not_cleared(original: Callable[..., Any], self: Any) -> None:
    """Wraps `MooncakeStore.clear`, which would remove the pages of all users of the master."""
    logger.warning("dps prefix cache: an engine cannot clear the shared store")


def flushing(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps the scheduler's `flush_cache`, which returns whether the KV in the engine's own memory was removed.

    If it refuses to, for example because pages are being written, the engine keeps and stores KV of earlier weights.
    """
    done = original(self, *args, **kwargs)
    if done:
        SHARING.flushed()
    return done


def refuse_other_storage(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Wraps the scheduler's method with which a request to an admin endpoint attaches a storage.

    Through a storage with other settings, an engine could share pages under names that do not identify its weights.
    """
    if not SHARING.configured:
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    problem = "this engine has a prefix cache in common with others; restart it to use another storage"
    logger.warning("dps prefix cache: a request to attach a storage was refused: %s", problem)
    return AttachHiCacheStorageReqOutput(success=False, message=problem)
