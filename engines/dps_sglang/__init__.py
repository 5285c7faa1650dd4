"""An SGLang plugin that lets engines with different speculation share one prefix cache.

It is loaded by SGLang inside an engine's image, so its only dependencies are those of SGLang.

SGLang calls `plugin.register`, which installs hooks: `draft_refill` for STANDALONE engines, `mooncake` for the names of
pages in Mooncake, `cache_salt` for the tenants of /v1/messages, and `sharing` for new weights. For a directory, SGLang
creates `adapter.SharedPrefixCache`. If SGLang's version is supported, it is the class in `page_storage`, which copies
pages between SGLang's host memory (`host_pages`) and files (`storage`), in batches (`shared_cache`). `identity` and
`weights` determine which engines read each other's pages, and `arguments` which engines share none.

Only the modules `adapter`, `draft_refill`, `host_pages`, `identity`, `mooncake` and `page_storage` need torch or SGLang
when they are imported.
"""
