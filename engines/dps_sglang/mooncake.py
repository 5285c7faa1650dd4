"""Adds what determines the bytes of an engine's pages to their names in Mooncake (SGLang 0.5.23).

SGLang's Mooncake backend checks neither the content of a page nor for which engine it was written. The operator's tag
cannot contain a fingerprint of the weights, because only an engine has them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from dps_sglang.identity import pages_digest
from dps_sglang.sharing import SHARING, TAG, NotShareable, unique_name


def tagged(original: Callable[..., Any], self: Any, storage_config: Any, mem_pool: Any) -> Any:
    """Wraps `MooncakeStore.__init__`: engines whose pages differ use different names."""
    settings = storage_config.extra_config or {}
    SHARING.on_new_weights(partial(_rename_pages, self))
    try:
        if getattr(mem_pool, "kv_buffer", None) is None:
            raise NotShareable("the model has state other than attention KV")
        suffix = pages_digest(storage_config, mem_pool, settings.get("weights"))[:16]
        SHARING.begin(suffix)
    except NotShareable as error:
        suffix = unique_name()
        SHARING.refuse(str(error))
    tag = f"{settings[TAG]}-{suffix}" if TAG in settings else suffix
    return original(self, replace(storage_config, extra_config={**settings, TAG: tag}), mem_pool)


def _rename_pages(store: Any) -> None:
    """From the next page on, use names that neither this engine nor another one has used."""
    store.config_prefix = unique_name()
