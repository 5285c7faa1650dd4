"""Whether this process shares pages. The state is reported in the log and as a metric. If the weights of a running
engine are replaced, it stops sharing pages, because the names of its pages identify the earlier weights.
"""

import logging
import uuid
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

from dps_sglang.metrics import SharingMetric

logger = logging.getLogger(__name__)

TAG = "extra_backend_tag"
"""The setting of SGLang's backend that precedes the name of every page."""

REPLACED = "the weights were replaced while the engine was running; restart it with the new weights"


class NotShareable(Exception):
    """A configuration whose KV must not be shared; the message says why."""


class Sharing:
    """The state of one process. SGLang may open a storage more than once, if a request to an engine attaches it."""

    def __init__(self) -> None:
        self._metric = SharingMetric()
        self._ends: list[Callable[[], None]] = []
        self._pages = ""
        self._replaced = False

    def begin(self, pages: str, end: Callable[[], None]) -> None:
        """Report that this process shares pages. Raises NotShareable if the weights have been replaced.

        pages: identifies them. Engines with the same value read each other's. end: ends the sharing.
        """
        if self._replaced:
            raise NotShareable(REPLACED)
        self._ends.append(end)
        self._pages = pages
        self._metric.export(pages, "")

    def refuse(self, problem: str) -> None:
        """Report that this process shares no pages."""
        logger.warning("dps prefix cache: not shared: %s", problem)
        self._metric.export("", problem)

    def only_write(self, problem: str) -> None:
        """Report that other engines can read the pages of this one, which reads none."""
        logger.warning("dps prefix cache: prefixes are not read: %s", problem)
        self._metric.export(self._pages, problem)

    def end(self) -> None:
        """End the sharing, because the weights are about to be replaced."""
        self._replaced = True
        if self._ends:
            for end in self._ends:
                end()
            self._ends.clear()
            self.refuse(REPLACED)


def refuse_to_clear() -> None:
    """Log that an engine's admin endpoint does not remove the pages, because they belong to other engines as well."""
    logger.warning("dps prefix cache: an engine cannot clear the shared store")


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


def before_new_weights(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps the methods of SGLang's scheduler that replace weights."""
    SHARING.end()
    return original(self, *args, **kwargs)
