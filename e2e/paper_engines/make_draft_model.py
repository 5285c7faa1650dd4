# mypy: disable-error-code="import-not-found"
"""make_draft_model.py TARGET_DIR OUT_DIR: a draft model for a tiny model: the model itself with noise in its weights.

The target model accepts some of its tokens and rejects others.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

NOISE = 0.03
"""The noise's standard deviation, relative to that of each weight matrix."""


def write(target: Path, out: Path) -> None:
    """Write the draft model. The output is deterministic."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            weights += NOISE * weights.std() * torch.randn_like(weights)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, out)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
