"""Adds the engine's geometry to the names of its pages in Mooncake, and prevents clearing them (SGLang 0.5.23).

SGLang's Mooncake backend checks neither the content of a page nor for which engine it was written. The operator's tag
cannot contain a fingerprint of the weights, because only an engine has them.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from dps_sglang.host_pages import TorchPages
from dps_sglang.identity import engine_geometry, speculates_with_draft_model
from dps_sglang.mooncake_metrics import measure_in_background
from dps_sglang.sharing import SHARING, TAG, NotShareable, refuse_to_clear, unique_name

logger = logging.getLogger(__name__)


def tagged_without_refill(reason: str) -> Callable[..., Any]:
    """`tagged` for an SGLang whose draft model cannot prefill what was fetched. reason: why it cannot.

    A STANDALONE engine then requires the draft model's KV for every page, which engines without one do not store.
    """

    def wrapper(original: Callable[..., Any], self: Any, storage_config: Any, mem_pool: Any) -> Any:
        result = tagged(original, self, storage_config, mem_pool)
        if speculates_with_draft_model():
            SHARING.only_write(reason)
        return result

    return wrapper


def tagged(original: Callable[..., Any], self: Any, storage_config: Any, mem_pool: Any) -> Any:
    """Wraps `MooncakeStore.__init__`: engines whose pages differ use different names."""
    settings = storage_config.extra_config or {}
    page_bytes = 0
    rename = partial(_rename_pages, self)
    try:
        if getattr(mem_pool, "kv_buffer", None) is None:
            raise NotShareable("the model has state other than attention KV")
        page_bytes = TorchPages(mem_pool).page_bytes
        geometry = engine_geometry(storage_config, mem_pool, page_bytes, settings.get("weights"))
        suffix = geometry.digest().hex()[:16]
        SHARING.begin(rename)
        SHARING.identify(suffix)
        logger.info("dps prefix cache: shared with the tag %s; geometry: %s", suffix, geometry)
    except NotShareable as error:
        suffix = unique_name()
        SHARING.on_new_weights(rename)
        SHARING.refuse(str(error))
    tag = f"{settings[TAG]}-{suffix}" if TAG in settings else suffix
    made = original(self, replace(storage_config, extra_config={**settings, TAG: tag}), mem_pool)
    if page_bytes:
        measure_in_background(self, page_bytes, mem_pool.page_size)
    return made


def not_cleared(original: Callable[..., Any], self: Any) -> None:
    """Wraps `MooncakeStore.clear`, which would remove the pages of all users of the master."""
    refuse_to_clear()


def _rename_pages(store: Any) -> None:
    """From the next page on, use names that neither this engine nor another one has used."""
    store.config_prefix = unique_name()
