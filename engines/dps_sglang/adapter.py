"""The class that SGLang loads for the `dynamic` storage backend, whatever the version of SGLang.

If the class could not be imported, the engine would not start. The class with the page store imports names that only a
known version of SGLang has, so it is imported after the version has been checked.
"""

from importlib.metadata import version
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from dps_sglang import compatibility
from dps_sglang.sharing import SHARING, refuse_to_clear


def backend() -> Any:
    """The class of the page store, or one without pages if this SGLang is not supported."""
    reason = compatibility.objection(version("sglang"), compatibility.STORAGE_SIGNATURES)
    if reason is not None:
        return _without_pages(reason)
    from dps_sglang.page_storage import SharedPrefixCache

    return SharedPrefixCache


def _without_pages(reason: str) -> type[HiCacheStorage]:
    class WithoutPages(HiCacheStorage):
        """Stores and finds nothing. It has the methods of every version that supports the backend `dynamic`."""

        def __init__(self, *_: Any) -> None:
            SHARING.refuse(reason)

        def exists(self, *_: Any, **__: Any) -> bool:
            return False

        def batch_exists(self, *_: Any, **__: Any) -> int:
            return 0

        def batch_get_v1(self, keys: list[str], *_: Any, **__: Any) -> list[bool]:
            return [False] * len(keys)

        def batch_set_v1(self, keys: list[str], *_: Any, **__: Any) -> list[bool]:
            return [False] * len(keys)

        def batch_exists_v2(self, *_: Any, **__: Any) -> Any:
            from sglang.srt.mem_cache.hicache_storage import PoolTransferResult  # as old as this method

            return PoolTransferResult.empty()

        def batch_get_v2(self, transfers: Any, *_: Any, **__: Any) -> dict[str, list[bool]]:
            return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}

        def batch_set_v2(self, transfers: Any, *_: Any, **__: Any) -> dict[str, list[bool]]:
            return self.batch_get_v2(transfers)

        def get(self, *_: Any, **__: Any) -> None:
            return None

        def batch_get(self, keys: list[str], *_: Any, **__: Any) -> list[None]:
            return [None] * len(keys)

        def set(self, *_: Any, **__: Any) -> bool:
            return False

        def batch_set(self, *_: Any, **__: Any) -> bool:
            return False

        def clear(self) -> None:
            refuse_to_clear()

    return WithoutPages


SharedPrefixCache = backend()
