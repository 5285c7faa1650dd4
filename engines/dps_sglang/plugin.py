"""The plugin's entry point for SGLang: installs its hooks if this SGLang is supported."""

import logging
import multiprocessing
from collections.abc import Mapping
from importlib.metadata import version

from dps_sglang import compatibility
from dps_sglang.cache_salt import announced, salted
from dps_sglang.sharing import before_new_weights, not_shared, refuse_other_storage

logger = logging.getLogger(__name__)


def register() -> None:
    """Called by SGLang in each of its processes, before the wrapped methods are used."""
    if _supported("not shared with STANDALONE engines", compatibility.REFILL_SIGNATURES):
        from dps_sglang.draft_refill import refill, without_draft_pages

        _wrap(compatibility.BUILD_SIDECARS, without_draft_pages)
        _wrap(compatibility.DRAFT_PREFILL, refill)
    if _supported("not shared through Mooncake", compatibility.MOONCAKE_SIGNATURES):
        from dps_sglang.mooncake import not_cleared, tagged

        _wrap(compatibility.MOONCAKE_INIT, tagged)
        _wrap(compatibility.MOONCAKE_CLEAR, not_cleared)
    elif compatibility.exists(compatibility.MOONCAKE_INIT):
        reason = compatibility.objection(version("sglang"), compatibility.MOONCAKE_SIGNATURES)
        _wrap(compatibility.MOONCAKE_INIT, not_shared(str(reason)))
    if _supported("not shared", compatibility.SHARING_SIGNATURES):
        for update in compatibility.WEIGHT_UPDATES:
            _wrap(update, before_new_weights)
        _wrap(compatibility.ATTACH_STORAGE, refuse_other_storage)
    # HTTP is served by the main process. The others do not need the module, which is expensive to import.
    serves = multiprocessing.parent_process() is None
    if serves and _supported(
        "tenants are not separated on /v1/messages and /v1/score", compatibility.SALT_SIGNATURES
    ):
        _wrap(compatibility.GENERATE, salted)
        _wrap(compatibility.SERVER_INFO, announced)


def _supported(consequence: str, signatures: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether hooks that require these signatures can be installed. Logs the consequence and the reason if not."""
    reason = compatibility.objection(version("sglang"), signatures)
    if reason is not None:
        logger.warning("dps prefix cache: %s: %s", consequence, reason)
    return reason is None


def _wrap(target: str, hook: object) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)
