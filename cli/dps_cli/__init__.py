"""The `dps` command."""
