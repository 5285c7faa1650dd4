# mypy: disable-error-code="import-not-found"
"""make_tiny_model.py TOKENIZER_DIR OUT_DIR: a tiny random Qwen2 checkpoint with the real Qwen2.5 tokenizer.

Untied embeddings and a wide initialisation, so that the model does not repeat one token: equal answers from a
greedy and a speculative server then mean something. The same checkpoint serves as its own draft model.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = (
    151_665  # the tokenizer's own entries: the published checkpoints pad it with ids that decode to nothing
)
ROPE_THETA = 1e6


def write(tokenizer: Path, out: Path) -> None:
    """Write ``out`` (config, weights, tokenizer files); the same bytes each time."""
    torch.manual_seed(0)
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
    # Transformers 5 writes rope_parameters only; an engine on Transformers 4 would take another base.
    written = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(written | {"rope_theta": ROPE_THETA}, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
