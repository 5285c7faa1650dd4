"""The shared page store as a storage backend of HiCache (SGLang 0.5.23)."""

import logging
import threading
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.srt.observability.metrics_collector import StorageMetrics

from dps_sglang.host_pages import TorchPages
from dps_sglang.identity import engine_geometry
from dps_sglang.metrics import PageMetrics
from dps_sglang.settings import Settings, SettingsError
from dps_sglang.shared_cache import THREADS, SharedCache, Transfer
from dps_sglang.sharing import SHARING, NotShareable, refuse_to_clear
from dps_sglang.storage.directory import directory_id
from dps_sglang.storage.page import PageFormat
from dps_sglang.storage.probe import Bandwidth, measure
from dps_sglang.storage.store import PageStore

logger = logging.getLogger(__name__)

IDENTIFY_SECONDS = 60.0
"""The interval at which the directory's identifier is read, in seconds."""


class SharedPrefixCache(HiCacheStorage):
    """Stores pages of target KV. Sidecar pools (draft models, Mamba, sliding windows) are not shared."""

    def __init__(self, storage_config: Any, _options: Any = None) -> None:
        self._config = storage_config
        self._settings = Settings.parse(storage_config.extra_config)
        self._store: PageStore | None = None
        self._cache: SharedCache | None = None
        self._metrics = PageMetrics()
        self._page_tokens = 1
        self._page_bytes = 0
        self._warned_of_sidecars = False
        self._closed = threading.Event()
        self._measured: list[Bandwidth] = []
        """The bandwidth at start, until SGLang collects it."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        try:
            self._cache = self._open(mem_pool_host)
        except (NotShareable, SettingsError) as error:
            SHARING.refuse(str(error))

    def _open(self, pool: Any) -> SharedCache:
        pages = TorchPages(pool)
        geometry = engine_geometry(self._config, pool, pages.page_bytes, self._settings.weights)
        page_format = PageFormat.of(geometry, self._settings.secret())
        SHARING.begin(self._stop)
        self._page_tokens = pool.page_size
        self._page_bytes = pages.page_bytes
        logger.info(
            "dps prefix cache: shared in folder %s of each shard of %s; geometry: %s",
            page_format.folder,
            self._settings.directory,
            geometry,
        )
        # In a thread, because a directory of a network file system can hang.
        threading.Thread(
            target=self._watch, args=(page_format.folder,), name="dps-prefix-cache-watch", daemon=True
        ).start()
        self._store = PageStore(self._settings.directory, page_format, self._settings.limits)
        return SharedCache(self._store, pages)

    def _watch(self, folder: str) -> None:
        """Measure the directory's bandwidth once, and report which directory it is until the storage is closed.

        The directory may be deleted and created again.
        """
        self._identify(folder)
        self._measure()
        while not self._closed.wait(IDENTIFY_SECONDS):
            self._identify(folder)

    def _identify(self, folder: str) -> None:
        try:
            SHARING.identify(f"{folder}@{directory_id(self._settings.directory)}")
        except OSError as error:
            logger.warning("dps prefix cache: the directory cannot be identified: %s", error)

    def _measure(self) -> None:
        """Measure the directory's bandwidth, and log how many tokens per second the storage can deliver."""
        settings = self._settings
        try:
            found = measure(settings.directory, self._page_bytes, THREADS, settings.limits.minimum_free_bytes)
        except OSError as error:
            logger.warning("dps prefix cache: %s cannot be used: %s", settings.directory, error.strerror)
            return
        if found is None:
            logger.warning("dps prefix cache: %s has too little free space", settings.directory)
            return
        self._measured.append(found)
        logger.info(
            "dps prefix cache: the storage reads %.2f GB/s, which is the KV of %.0f tokens/s, and writes %.2f GB/s",
            found.read / 1e9,
            found.read / self._page_bytes * self._page_tokens,
            found.write / 1e9,
        )

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._cache.prefix_pages(keys) if self._cache is not None else 0

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        if self._cache is None:
            return [False] * len(keys)
        return self._cache.read(keys, self._slots(host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        if self._cache is None:
            return [False] * len(keys)
        return self._cache.write(keys, self._slots(host_indices))

    def _slots(self, host_indices: Any) -> list[int]:
        slots: list[int] = host_indices[:: self._page_tokens].tolist()
        return slots

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        if pool_transfers:
            if not self._warned_of_sidecars:
                names = ", ".join(sorted({transfer.name.value for transfer in pool_transfers}))
                SHARING.only_write(f"the engine also requires pages of {names}, which are not shared")
                self._warned_of_sidecars = True
            return PoolTransferResult.empty()
        return PoolTransferResult(self.batch_exists(keys, extra_info), {})

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}

    def get_stats(self) -> Any:
        """The pages and the bandwidth in GB/s of each fetch and write since the last call, for SGLang's metrics.

        The first call after the bandwidth has been measured at start returns it as well. Each call updates the plugin's
        own metric.
        """
        if self._store is not None:
            self._metrics.export(self._store.counts())
        fetches = self._cache.take_fetches() if self._cache is not None else []
        writes = self._cache.take_writes() if self._cache is not None else []
        measured, self._measured = self._measured, []
        return StorageMetrics(
            prefetch_pgs=[fetch.pages for fetch in fetches],
            backup_pgs=[write.pages for write in writes],
            prefetch_bandwidth=[*map(self._rate, fetches), *(each.read / 1e9 for each in measured)],
            backup_bandwidth=[*map(self._rate, writes), *(each.write / 1e9 for each in measured)],
        )

    def _rate(self, transfer: Transfer) -> float:
        """The bandwidth of a transfer, in GB/s."""
        return transfer.pages * self._page_bytes / transfer.seconds / 1e9

    def clear(self) -> None:
        refuse_to_clear()

    def close(self) -> None:
        """SGLang calls this when a request to its admin endpoint detaches the storage."""
        self._stop()
        SHARING.refuse("the storage was detached")

    def _stop(self) -> None:
        self._closed.set()
        if self._cache is not None:
            self._cache.close()

    # SGLang's older interface, which interface_v1 replaces.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False
