"""An emulated SGLang server: SGLang's HTTP API, tokenization, prefix cache and timing, without a model."""
