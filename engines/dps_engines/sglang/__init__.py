"""SGLang (https://github.com/sgl-project/sglang)."""
