# mypy: disable-error-code="import-not-found"
"""make_adapter.py MODEL_DIR OUT_DIR SEED: create a LoRA adapter with random weights for a tiny model.

It changes the projections of attention and MLP in every layer, as much as the model's own weights, so that the answers
with the adapter differ from those without it.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

RANK = 4
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIGURATION = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": RANK,
    "target_modules": MODULES,
    "lora_dropout": 0.0,
    "bias": "none",
}


def write(model: Path, out: Path, seed: int) -> None:
    """Write the adapter's configuration and weights, named as PEFT does, to `out`. The output is deterministic."""
    random = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        layers = Qwen2ForCausalLM(Qwen2Config.from_pretrained(model))
    weights = {}
    for name, layer in layers.named_modules():
        if name.endswith(MODULES):
            for part, shape in (("A", (RANK, layer.in_features)), ("B", (layer.out_features, RANK))):
                weights[f"base_model.model.{name}.lora_{part}.weight"] = 0.2 * torch.randn(
                    shape, generator=random
                )
    save_file(weights, out / "adapter_model.safetensors")
    configuration = CONFIGURATION | {"base_model_name_or_path": str(model)}
    (out / "adapter_config.json").write_text(json.dumps(configuration, indent=2))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
