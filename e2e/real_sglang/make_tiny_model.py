# mypy: disable-error-code="import-not-found"
"""make_tiny_model.py TOKENIZER_DIR OUT_DIR [SEED]: create a tiny random Qwen2 checkpoint with Qwen2.5's tokenizer.

Untied embeddings and a wide initialisation keep the model from repeating one token; otherwise a greedy and a
speculative server could give equal answers by chance. The checkpoint is also its own draft model.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 151_665  # the tokenizer's entries; the published checkpoints pad the vocabulary with unused ids
ROPE_THETA = 1e6


def write(tokenizer: Path, out: Path, seed: int) -> None:
    """Write config, weights and tokenizer files to `out`. The output is deterministic."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=151_643,
        eos_token_id=151_645,
    )
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(out)
    # Transformers 5 writes rope_parameters only; an engine with Transformers 4 would use its default base.
    written = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(written | {"rope_theta": ROPE_THETA}, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
