"""What this machine has for SGLang: GPUs, and an interpreter that has it."""

import os
import subprocess
from collections.abc import Mapping

SECONDS = 60.0
_VERSION = "from importlib.metadata import version; print(version('sglang'))"


class NoSGLang(Exception):
    """The interpreter cannot be run, or has no SGLang; the message says what to do."""


def gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The ids of the NVIDIA GPUs that may be used: CUDA_VISIBLE_DEVICES if that is set, else the driver's."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    try:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()


def sglang_version(python: str) -> str:
    """The version of the SGLang that an interpreter has, without importing it. Raises NoSGLang."""
    try:
        asked = subprocess.run(
            [python, "-c", _VERSION], capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoSGLang(f"--engine-python {python} cannot be run: {error}") from error
    if asked.returncode != 0:
        raise NoSGLang(
            f"{python} has no SGLang: install it with '{python} -m pip install sglang', or name an interpreter "
            "that has it by --engine-python"
        )
    return asked.stdout.strip()
