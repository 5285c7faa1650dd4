# mypy: disable-error-code="import-not-found"
"""Lets SGLang 0.5.23 use HiCache and LoRA adapters without a GPU, and HiCache and NGRAM without a compiler.

SGLang's hashing, radix tree, host pools, storage backends, adapters and scheduling are not changed.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _host_pools(module: Any) -> None:
    """Host memory cannot be pinned, and the machine may have less than the 10 GiB that SGLang reserves."""
    original = module.HostKVCache.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options | {"pin_memory": False})

    module.HostKVCache.__init__ = init
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _host_copies(module: Any) -> None:
    """SGLang imports these operators only if it has a GPU."""
    from sgl_kernel.kvcacheio import transfer_kv_all_layer_lf_pf, transfer_kv_per_layer_pf_lf

    module.transfer_kv_all_layer_lf_pf = transfer_kv_all_layer_lf_pf
    module.transfer_kv_per_layer_pf_lf = transfer_kv_per_layer_pf_lf


def _page_allocation(module: Any) -> None:
    """For pages of several tokens and the backend intel_amx, SGLang selects its Triton kernel, which needs a GPU."""
    module.get_last_loc_triton = module.get_last_loc_torch


def _hash_function(module: Any) -> None:
    """A pod has no compiler, but may have the function that SGLang has compiled on another machine."""
    if find_spec("hicache_hash_cpp") is not None:
        module._load_native_hash_module = partial(import_module, "hicache_hash_cpp")


def _ngram_corpus(module: Any) -> None:
    """The same for the index of the text from which NGRAM drafts. It is a library, not a Python module."""
    library = find_spec("ngram_corpus")
    if library is not None:

        def load_jit(*_: Any, **__: Any) -> Any:
            from tvm_ffi import load_module

            return load_module(library.origin)

        module.load_jit = load_jit


class Unpinned:
    """The module torch, with functions that allocate memory which is not pinned."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.tensor = self._without_pinning(torch.tensor)
        self.zeros = self._without_pinning(torch.zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    @staticmethod
    def _without_pinning(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def unpinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
            return allocate(*arguments, **options)

        return unpinned


def _lora(module: Any) -> None:
    """The backend torch_native runs on a CPU, but pins host memory."""
    module.torch.Tensor.pin_memory = lambda tensor: tensor
    module.torch = Unpinned(module.torch)


CHANGES: Mapping[str, Callable[[Any], None]] = {
    "sglang.srt.mem_cache.pool_host.base": _host_pools,
    "sglang.srt.mem_cache.pool_host.mha": _host_copies,
    "sglang.srt.mem_cache.allocation": _page_allocation,
    "sglang.srt.mem_cache.cpp_utils.native_hash": _hash_function,
    "sglang.srt.lora.layers": _lora,
    "sglang.srt.lora.backend.torch_backend": _lora,
    "sglang.kernels.ops.speculative.ngram_corpus": _ngram_corpus,
}
"""What to change in a module after it was imported."""


class ChangingFinder(PathFinder):
    """Finds the modules in CHANGES, and changes each after its import."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = CHANGES.get(fullname)
        spec = super().find_spec(fullname, path, target) if change is not None else None
        if change is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # the loader of this module only
        return spec


sys.meta_path.insert(0, ChangingFinder)
