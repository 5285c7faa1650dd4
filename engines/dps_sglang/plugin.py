"""The plugin's entry point for SGLang: installs its hooks if this SGLang is supported."""

import logging
import multiprocessing
import pkgutil
from collections.abc import Mapping
from importlib.metadata import version

from dps_sglang import compatibility
from dps_sglang.cache_salt import announced, salted
from dps_sglang.mooncake_metrics import corrected, counted_reads, counted_writes, record_codes
from dps_sglang.sharing import (
    flushing,
    not_cleared,
    not_shared,
    refuse_other_storage,
    releasing_weights,
    replacing_weights,
    resetting_weights,
)

logger = logging.getLogger(__name__)


def register() -> None:
    """Called by SGLang in each of its processes, before the wrapped methods are used."""
    reason = _objection("not shared", compatibility.SIGNATURES)
    if reason is None:
        _share()
    elif _exists(compatibility.MOONCAKE_INIT):
        _wrap(compatibility.MOONCAKE_INIT, not_shared(reason))
    # HTTP is served by the main process. The others do not need the module, which is expensive to import.
    serves = multiprocessing.parent_process() is None
    not_separated = "tenants are not separated on /v1/messages and /v1/score"
    if serves and _objection(not_separated, compatibility.SALT_SIGNATURES) is None:
        _wrap(compatibility.GENERATE, salted)
        _wrap(compatibility.SERVER_INFO, announced)


def _share() -> None:
    from dps_sglang.draft_refill import refill, without_draft_pages
    from dps_sglang.mooncake import tagged

    _wrap(compatibility.BUILD_SIDECARS, without_draft_pages)
    _wrap(compatibility.DRAFT_PREFILL, refill)
    _wrap(compatibility.MOONCAKE_INIT, tagged)
    _wrap(compatibility.MOONCAKE_CLEAR, not_cleared)
    _wrap(compatibility.MOONCAKE_READ, counted_reads)
    _wrap(compatibility.MOONCAKE_WRITE, counted_writes)
    _wrap(compatibility.MOONCAKE_STATS, corrected)
    _wrap(compatibility.MOONCAKE_GET, record_codes)
    _wrap(compatibility.MOONCAKE_PUT, record_codes)
    for update in compatibility.WEIGHT_UPDATES:
        _wrap(update, replacing_weights)
    _wrap(compatibility.WEIGHT_CHECK, resetting_weights)
    _wrap(compatibility.MEMORY_RELEASE, releasing_weights)
    _wrap(compatibility.FLUSH, flushing)
    _wrap(compatibility.ATTACH_STORAGE, refuse_other_storage)


def _objection(consequence: str, signatures: Mapping[str, tuple[str, ...]]) -> str | None:
    """Why hooks that require these signatures cannot be installed; None if they can. Logs it with the consequence."""
    reason = compatibility.objection(version("sglang"), signatures)
    if reason is not None:
        logger.warning("dps prefix cache: %s: %s", consequence, reason)
    return reason


def _exists(target: str) -> bool:
    """Whether this SGLang has a function of this name."""
    try:
        return callable(pkgutil.resolve_name(target))
    except (AttributeError, ImportError, ValueError):
        return False


def _wrap(target: str, hook: object) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)
