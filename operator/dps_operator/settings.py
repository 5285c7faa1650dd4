"""Settings of the operator process, and the command line of `dps operator`."""

import argparse
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Default images and timing. Times are in seconds."""

    gateway_image: str = "dps-router/gateway:0.1.0"
    redis_image: str = "redis:7.4-alpine"
    plugin_image: str = "dps-router/operator:0.1.0"
    """Image from which the SGLang plugin of the common prefix cache is copied: the operator's own."""
    lab_image: str = "dps-router/lab:0.1.0"
    """Image of calibrations."""
    loader_image: str = "rclone/rclone:1.75.1"
    """Image of rclone, which downloads models from buckets."""
    pull_secrets: tuple[str, ...] = ()
    """Pull secrets of all pods of DPSRouters. A pull secret that does not exist in a namespace is ignored there."""
    namespaces: tuple[str, ...] = ()
    """Watched namespaces; empty for all namespaces."""
    lease: str = ""
    """Lease of the replica that reconciles, as NAMESPACE/NAME; empty if there is one replica."""
    workers: int = 8
    """DPSRouters reconciled concurrently."""
    resync_seconds: float = 600.0
    """Interval of full listings, which recover events that a watch has missed."""
    request_timeout: float = 30
    """Timeout of one API server request."""
    stuck_after: float = 300
    """The liveness probe fails if a reconcile runs, or a listing is overdue, for longer than this."""
    health_port: int = 8080


OPTIONS: dict[str, tuple[str, str]] = {
    "namespaces": ("--namespace", "namespace to watch; repeatable (default: all namespaces)"),
    "gateway_image": ("--gateway-image", "gateway image of DPSRouters without spec.gateway.image"),
    "redis_image": ("--redis-image", "image of managed Redis servers"),
    "plugin_image": (
        "--plugin-image",
        "image with the SGLang plugin of the common prefix cache, the operator's own",
    ),
    "lab_image": ("--lab-image", "image of calibrations"),
    "loader_image": ("--loader-image", "image of rclone, which downloads models from buckets"),
    "lease": ("--lease", "Lease of the replica that reconciles, as NAMESPACE/NAME, if there are several"),
    "pull_secrets": (
        "--pull-secret",
        "pull secret of all pods of DPSRouters, in their namespaces; repeatable (default: none)",
    ),
    "workers": ("--workers", "DPSRouters reconciled concurrently"),
    "resync_seconds": ("--resync-seconds", "seconds between full listings of all watched objects"),
    "health_port": ("--health-port", "port of /healthz, /readyz and /metrics"),
}
"""The option and its help text for each setting that can be changed.

DPS_OPERATOR_<SETTING> in the environment sets the default, in which commas separate several names."""


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    settings: Settings
    verbose: bool
    """Whether to log debug messages."""


def parse_options(arguments: list[str]) -> Options:
    """Parse the command line, with defaults from the environment."""
    parser = argparse.ArgumentParser(prog="dps operator", description="Reconcile DPSRouter resources.")
    for name, (option, text) in OPTIONS.items():
        default = getattr(Settings, name)
        found = os.environ.get(f"DPS_OPERATOR_{name.upper()}")
        keywords: dict[str, Any] = {"dest": name, "help": text}
        if isinstance(default, tuple):
            names = [each for each in (found or "").split(",") if each]
            parser.add_argument(option, action="append", default=names, **keywords)
        else:
            keywords["help"] += " (default: %(default)s)"
            value = default if found is None else type(default)(found)
            parser.add_argument(option, type=type(default), default=value, **keywords)
    parser.add_argument(
        "--verbose", action="store_true", help="log debug messages, including every event that is handled"
    )
    values = vars(parser.parse_args(arguments))
    verbose = values.pop("verbose")
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Options(Settings(**values | lists), verbose)
