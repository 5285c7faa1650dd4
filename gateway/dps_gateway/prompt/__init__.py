"""Prompt accounting: computes L_t, the length of a request's prompt in the engine's tokens.

The cost of tokenization is proportional to the text added since the previous turn.
"""
