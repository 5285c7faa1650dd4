"""An SGLang plugin that lets engines with different speculation share one prefix cache.

It is loaded by SGLang inside an engine's image, so its only dependencies are SGLang and torch, which only the modules
`adapter`, `draft_refill`, `identity`, `mooncake` and `plugin` import.
"""
