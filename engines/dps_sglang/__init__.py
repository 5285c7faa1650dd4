"""An SGLang plugin that lets engines with different speculation share one prefix cache in Mooncake.

It is loaded by SGLang inside an engine's image, so its only dependencies are those of SGLang.

SGLang calls `plugin.register`, which installs hooks if the version of SGLang is supported (`compatibility`):
`draft_refill` for STANDALONE engines, `mooncake` for the names of pages, `mooncake_metrics`, `cache_salt` for the
tenants of /v1/messages, and `sharing` for new weights. `identity` and `weights` determine which engines read each
other's pages, and `arguments` which engines share none.

Only the modules `draft_refill` and `identity` need torch or SGLang when they are imported.
"""
