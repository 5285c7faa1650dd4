"""SGLang's host memory, page by page (SGLang 0.5.23)."""

from typing import Any

import torch


class TorchPages:
    """Pages of SGLang's host pool as bytes. Implements dps_sglang.shared_cache.HostPages."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        page = pool.get_data_page(0, flat=True)
        self.page_bytes = page.numel() * page.element_size()
        self._dtype = page.dtype

    def load(self, slot: int) -> memoryview:
        page = self._pool.get_data_page(slot, flat=True).contiguous()
        return memoryview(page.view(torch.uint8).numpy())

    def buffer(self) -> memoryview:
        return memoryview(torch.empty(self.page_bytes, dtype=torch.uint8).numpy())

    def save(self, slot: int, page: memoryview) -> None:
        self._pool.set_from_flat_data_page(slot, torch.frombuffer(page, dtype=self._dtype))
