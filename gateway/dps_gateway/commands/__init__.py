"""Subcommands of `dps` that inspect or administer a gateway: `dps keys`, `dps session` and `dps top`."""
