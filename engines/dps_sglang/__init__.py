"""An SGLang plugin that lets engines with different speculation share one prefix cache.

It is loaded by SGLang inside an engine's image, so it depends on the standard library only; SGLang and torch are
imported at the seam, in ``adapter``, ``engine_facts`` and ``draft_refill``.
"""
