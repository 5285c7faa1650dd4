"""Support for inference engines: one `EngineDialect` for each kind of server."""
