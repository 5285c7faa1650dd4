"""Detect this machine's GPUs, and the SGLang and Mooncake that a Python interpreter has installed."""

import os
import subprocess
from collections.abc import Mapping
from itertools import takewhile

TIMEOUT_SECONDS = 60.0
_VERSION = "from importlib.metadata import version; print(version('sglang'))"


class SGLangNotFound(Exception):
    """The interpreter cannot be run, or lacks SGLang or Mooncake. The message says what to do."""


def gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The ids of the usable NVIDIA GPUs: CUDA_VISIBLE_DEVICES if it is set, otherwise all that the driver lists.

    CUDA ignores the variable from the first negative or empty id on, so `-1` disables all GPUs.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = (name.strip() for name in visible.split(","))
        return list(takewhile(lambda name: name and not name.startswith("-"), names))
    try:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=TIMEOUT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()


def sglang_version(python: str) -> str:
    """The version of SGLang that `python` has installed; SGLang is not imported.

    Raises SGLangNotFound if the interpreter cannot be run or lacks SGLang.
    """
    done = _run(python, _VERSION)
    if done.returncode != 0:
        raise SGLangNotFound(
            f"SGLang is not installed for {python}: run '{python} -m pip install sglang', or pass an interpreter "
            "that has it as --engine-python"
        )
    return done.stdout.strip()


def check_mooncake(python: str) -> None:
    """Raises SGLangNotFound if the interpreter cannot be run or lacks Mooncake, with which SGLang shares its cache."""
    done = _run(python, "import mooncake.cli")
    if done.returncode != 0:
        raise SGLangNotFound(
            f"--prefix-cache common: Mooncake is not installed for {python}: run '{python} -m pip install "
            f"mooncake-transfer-engine' ({(done.stderr.strip().splitlines() or [''])[-1]})"
        )


def _run(python: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter. Raises SGLangNotFound if the interpreter cannot be run."""
    try:
        return subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SGLangNotFound(f"cannot run --engine-python {python}: {error}") from error
