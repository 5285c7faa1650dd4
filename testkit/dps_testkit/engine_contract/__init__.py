"""The HTTP contract of an SGLang server: requests, how to send them, and how to describe the answers."""
