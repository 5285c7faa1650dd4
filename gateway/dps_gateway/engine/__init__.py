"""What the gateway knows about inference engines: one `EngineDialect` for each kind of server."""
