"""Prompt accounting: from a request to L_t in the engine's tokens, at the cost of what was added."""
