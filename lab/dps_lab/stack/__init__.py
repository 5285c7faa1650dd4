"""The engines of a local stack: emulated ones, SGLang servers, or such that somebody else runs."""
