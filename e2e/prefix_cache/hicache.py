"""What SGLang's HiCache needs on this machine, besides SGLang."""

import os
import subprocess
from pathlib import Path

from dps_local.assets import cached
from e2e.real_sglang.local_sglang import PYTHON
from e2e.real_sglang.local_sglang import install as install_sglang

PACKAGES_SECONDS = 600.0
COMPILE_SECONDS = 300.0
COMPILE = "from sglang.srt.mem_cache.cpp_utils.native_hash import _load_native_hash_module as load; load()"


def install() -> None:
    """Install SGLang, and the compiler with which HiCache compiles its hash function, unless they are installed."""
    install_sglang()
    subprocess.run([Path(__file__).with_name("install-compiler")], check=True, timeout=PACKAGES_SECONDS)


def hash_function() -> Path:
    """A folder with HiCache's compiled hash function, for the PYTHONPATH of engines in pods, which have no compiler.

    Needs `install`.
    """

    def compile_it(_scratch: Path, target: Path) -> None:
        environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(target)}
        subprocess.run([PYTHON, "-c", COMPILE], env=environment, check=True, timeout=COMPILE_SECONDS)

    return cached("hicache-hash-0.5.23", compile_it) / "hicache_hash_cpp"
