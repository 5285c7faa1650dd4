"""The data plane: an OpenAI-compatible gateway that routes each turn by Delta-Prefill Switching."""
