"""The command line of `dps operator`."""

import argparse
import os
from dataclasses import dataclass

from dps_operator.settings import Settings


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    settings: Settings
    verbose: bool
    """Whether to log debug messages."""


def _environment(option: str, default: str) -> str:
    return os.environ.get(f"DPS_OPERATOR_{option}", default)


def _listed(option: str) -> list[str]:
    return [name for name in _environment(option, "").split(",") if name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dps operator", description="Reconcile DPSRouter resources.")
    parser.add_argument(
        "--namespace",
        action="append",
        default=_listed("NAMESPACES"),
        help="namespace to watch; repeatable (default: all namespaces)",
    )
    parser.add_argument(
        "--gateway-image",
        default=_environment("GATEWAY_IMAGE", Settings.gateway_image),
        help="gateway image of DPSRouters without spec.gateway.image (default: %(default)s)",
    )
    parser.add_argument(
        "--redis-image",
        default=_environment("REDIS_IMAGE", Settings.redis_image),
        help="image of managed Redis servers (default: %(default)s)",
    )
    parser.add_argument(
        "--plugin-image",
        default=_environment("PLUGIN_IMAGE", Settings.plugin_image),
        help="image with the SGLang plugin of the common prefix cache, the operator's own (default: %(default)s)",
    )
    parser.add_argument(
        "--lab-image",
        default=_environment("LAB_IMAGE", Settings.lab_image),
        help="image of calibrations (default: %(default)s)",
    )
    parser.add_argument(
        "--loader-image",
        default=_environment("LOADER_IMAGE", Settings.loader_image),
        help="image of rclone, which downloads models from buckets (default: %(default)s)",
    )
    parser.add_argument(
        "--hub-endpoint",
        metavar="URL",
        default=_environment("HUB_ENDPOINT", Settings.hub_endpoint),
        help="Hugging Face Hub or a mirror of it, to read the configurations of models (default: none)",
    )
    parser.add_argument(
        "--lease",
        metavar="NAMESPACE/NAME",
        default=_environment("LEASE", Settings.lease),
        help="Lease of the replica that reconciles, if there are several (default: none)",
    )
    parser.add_argument(
        "--pull-secret",
        action="append",
        default=_listed("PULL_SECRETS"),
        help="pull secret of all pods of DPSRouters, in their namespaces; repeatable (default: none)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=int(_environment("WORKERS", str(Settings.workers))),
        help="DPSRouters reconciled concurrently (default: %(default)s)",
    )
    parser.add_argument(
        "--resync-seconds",
        type=float,
        default=float(_environment("RESYNC_SECONDS", str(Settings.resync_seconds))),
        help="seconds between full listings of all watched objects (default: %(default)s)",
    )
    parser.add_argument(
        "--health-port",
        type=int,
        default=int(_environment("HEALTH_PORT", str(Settings.health_port))),
        help="port of /healthz, /readyz and /metrics (default: %(default)s)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="log debug messages, including every event that is handled"
    )
    return parser


def parse_options(arguments: list[str]) -> Options:
    """Parse the command line. DPS_OPERATOR_<OPTION> in the environment sets the default of an option."""
    parsed = _parser().parse_args(arguments)
    settings = Settings(
        gateway_image=parsed.gateway_image,
        redis_image=parsed.redis_image,
        plugin_image=parsed.plugin_image,
        lab_image=parsed.lab_image,
        loader_image=parsed.loader_image,
        pull_secrets=tuple(parsed.pull_secret),
        hub_endpoint=parsed.hub_endpoint,
        namespaces=tuple(parsed.namespace),
        lease=parsed.lease,
        workers=parsed.workers,
        resync_seconds=parsed.resync_seconds,
        health_port=parsed.health_port,
    )
    return Options(settings, parsed.verbose)
