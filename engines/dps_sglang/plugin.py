"""The plugin's entry point for SGLang: installs the hooks for STANDALONE engines if this SGLang is supported."""

import logging
from importlib.metadata import version

from dps_sglang import compatibility

logger = logging.getLogger(__name__)


def register() -> None:
    """Called by SGLang in each of its processes, before the wrapped methods are used."""
    reason = compatibility.objection(version("sglang"), compatibility.REFILL_SIGNATURES)
    if reason is not None:
        logger.warning("dps prefix cache: not shared with STANDALONE engines: %s", reason)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from dps_sglang.draft_refill import refill, without_draft_pages

    HookRegistry.register(compatibility.BUILD_SIDECARS, without_draft_pages, HookType.AROUND)
    HookRegistry.register(compatibility.DRAFT_PREFILL, refill, HookType.AROUND)
