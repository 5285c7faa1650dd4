"""What SGLang compiles on this machine for HiCache and for NGRAM, besides SGLang itself."""

import os
import shutil
import subprocess
from pathlib import Path

from dps_local.assets import cached
from e2e.real_sglang.local_sglang import PYTHON
from e2e.real_sglang.local_sglang import install as install_sglang

PACKAGES_SECONDS = 600.0
COMPILE_SECONDS = 600.0
COMPILE = """
from sglang.kernels.ops.speculative.ngram_corpus import get_ngram_corpus_cls
from sglang.srt.mem_cache.cpp_utils.native_hash import _load_native_hash_module
_load_native_hash_module()
get_ngram_corpus_cls()
"""
MODULES = ("hicache_hash_cpp", "ngram_corpus")
"""HiCache's hash function and NGRAM's index of the text. SGLang compiles each when an engine that needs it starts."""


def install() -> None:
    """Install SGLang, and the compiler for these modules, unless they are installed."""
    install_sglang()
    subprocess.run([Path(__file__).with_name("install-compiler")], check=True, timeout=PACKAGES_SECONDS)


def compiled_modules() -> Path:
    """A folder with the compiled modules, for the PYTHONPATH of engines in pods, which have no compiler.

    Needs `install`.
    """

    def compile_them(scratch: Path, target: Path) -> None:
        folders = {"TORCH_EXTENSIONS_DIR": str(scratch), "SGLANG_JIT_CACHE_DIR": str(scratch)}
        subprocess.run([PYTHON, "-c", COMPILE], env=os.environ | folders, check=True, timeout=COMPILE_SECONDS)
        for module in MODULES:
            (library,) = scratch.rglob(f"*{module}.so")
            shutil.copy(library, target / f"{module}.so")

    return cached("sglang-modules-0.5.23", compile_them)
