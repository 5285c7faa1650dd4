"""SGLang on this machine: its installation and a tiny model to serve."""

import os
import subprocess
from pathlib import Path

from dps_local.assets import cached, qwen_tokenizer

HERE = Path(__file__).parent
VENV = Path(os.environ.get("SGLANG_VENV", "/opt/sglang-cpu"))
PYTHON = HERE / "sglang-python"
"""The Python interpreter of the installation."""
INSTALL_SECONDS = 1500.0
MODEL_SECONDS = 300.0


def install() -> None:
    """Install SGLang unless it is installed. Takes several minutes the first time."""
    subprocess.run([HERE / "install", VENV], check=True, timeout=INSTALL_SECONDS)


def tiny_model(seed: int = 0) -> Path:
    """The folder of a model with random weights and Qwen2.5's tokenizer, also used as its own draft model.

    seed: models with different seeds differ only in their weights. Needs `install`.
    """
    tokenizer = qwen_tokenizer()

    def make(_scratch: Path, target: Path) -> None:
        command: list[str | Path] = [PYTHON, HERE / "make_tiny_model.py", tokenizer.path, target, str(seed)]
        subprocess.run(command, check=True, timeout=MODEL_SECONDS)

    return cached(f"tiny-qwen2-{tokenizer.source}-{seed + 1}", make)


def adapter(seed: int) -> Path:
    """The folder of a LoRA adapter of `tiny_model()` with random weights. Needs `install`."""
    model = tiny_model()

    def make(_scratch: Path, target: Path) -> None:
        command: list[str | Path] = [PYTHON, HERE / "make_adapter.py", model, target, str(seed)]
        subprocess.run(command, check=True, timeout=MODEL_SECONDS)

    return cached(f"lora-{model.name}-{seed}", make)
