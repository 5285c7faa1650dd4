"""Settings of the operator process, and the command line of `dps operator`."""

import argparse
import os
from dataclasses import dataclass, field, fields
from typing import Any


def _option(default: Any, text: str) -> Any:
    """A setting that an option of the command line changes, with its help text.

    The name of the option is that of the field; an option for one of several values has it in the singular.
    DPS_OPERATOR_<FIELD> in the environment sets the default, in which commas separate several values.
    """
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """Default images and timing. Times are in seconds."""

    namespaces: tuple[str, ...] = _option((), "namespace to watch; repeatable (default: all namespaces)")
    gateway_image: str = _option(
        "dps-router/gateway:0.1.0", "gateway image of DPSRouters without spec.gateway.image"
    )
    redis_image: str = _option("redis:7.4-alpine", "image of managed Redis servers")
    plugin_image: str = _option(
        "dps-router/operator:0.1.0",
        "image with the SGLang plugin of the common prefix cache, the operator's own",
    )
    lab_image: str = _option("dps-router/lab:0.1.0", "image of calibrations")
    loader_image: str = _option(
        "rclone/rclone:1.75.1", "image of rclone, which downloads models from buckets"
    )
    lease: str = _option("", "Lease of the replica that reconciles, as NAMESPACE/NAME, if there are several")
    pull_secrets: tuple[str, ...] = _option(
        (), "pull secret of all pods of DPSRouters, in their namespaces; repeatable (default: none)"
    )
    """A pull secret that does not exist in a namespace is ignored there."""
    workers: int = _option(8, "DPSRouters reconciled concurrently")
    resync_seconds: float = _option(600.0, "seconds between full listings of all watched objects")
    """The listings recover events that a watch has missed."""
    health_port: int = _option(8080, "port of /healthz, /readyz and /metrics")
    verbose: bool = False
    """Whether to log debug messages."""
    request_timeout: float = 30
    """Timeout of one API server request."""
    stuck_after: float = 300
    """The liveness probe fails if a reconcile runs, or a listing is overdue, for longer than this."""


def parse_options(arguments: list[str]) -> Settings:
    """Parse the command line, with defaults from the environment."""
    parser = argparse.ArgumentParser(prog="dps operator", description="Reconcile DPSRouter resources.")
    for setting in fields(Settings):
        if "help" not in setting.metadata:
            continue
        name, default, text = setting.name, setting.default, setting.metadata["help"]
        option = f"--{name.replace('_', '-')}"
        found = os.environ.get(f"DPS_OPERATOR_{name.upper()}")
        if isinstance(default, tuple):
            names = [each for each in (found or "").split(",") if each]
            parser.add_argument(
                option.removesuffix("s"), action="append", default=names, dest=name, help=text
            )
        else:
            kind: Any = type(default)
            value = default if found is None else kind(found)
            parser.add_argument(option, type=kind, default=value, help=f"{text} (default: %(default)s)")
    parser.add_argument(
        "--verbose", action="store_true", help="log debug messages, including every event that is handled"
    )
    parsed = vars(parser.parse_args(arguments)).items()
    values: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in parsed}
    return Settings(**values)
