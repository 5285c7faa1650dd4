"""The configuration file of a gateway on 127.0.0.1."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dps_engines.pools import PoolName


def gateway_config(
    *,
    port: int,
    admin_port: int,
    model: str,
    tokenizer: Path | str,
    endpoints: Mapping[PoolName, Sequence[str]],
    sections: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """A gateway's configuration. Fields in `sections` are added to it, and override it."""
    config: dict[str, dict[str, Any]] = {
        "listen": {"host": "127.0.0.1", "port": port, "adminPort": admin_port},
        "model": {"name": model, "tokenizer": str(tokenizer)},
        "pools": {name: {"endpoints": list(urls)} for name, urls in endpoints.items()},
    }
    for name, section in sections.items():
        config[name] = config.get(name, {}) | dict(section)
    return config


def write_gateway_config(file: Path, config: Mapping[str, Any]) -> None:
    """Write the configuration as YAML."""
    file.write_text(yaml.safe_dump(dict(config), sort_keys=False))
