"""vLLM (https://github.com/vllm-project/vllm)."""
