"""`dps session`: show or delete the stored record of a session."""

import argparse
import asyncio
import sys
from pathlib import Path

import orjson

from dps_gateway.config import ConfigError, GatewayConfig, current_redis_url, load_config
from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.redis import RedisBackend, StoreUnavailable, connect
from dps_gateway.session.store import Mirror, SessionStore, StateSource

TIMEOUT_SECONDS = 5.0


def main(argv: list[str]) -> int:
    """`dps session show|delete ID --config FILE`.

    Exit status: 0 if the session exists, 1 if it does not, 2 if the configuration or Redis cannot be used.
    """
    parser = argparse.ArgumentParser(prog="dps session", description=__doc__)
    parser.add_argument("action", choices=["show", "delete"])
    parser.add_argument("id", help="the session id that the client sends, or the value of x-dps-session")
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="the gateway's configuration file"
    )
    parser.add_argument("--tenant", default="", help="the tenant of the session, if API keys are in use")
    arguments = parser.parse_args(argv)
    try:
        config = load_config(arguments.config)
        url = current_redis_url(config.session)
        if url is None:
            raise ConfigError(
                f"{arguments.config}: session.redisUrl is not set, so records exist only in the gateway's memory"
            )
        return asyncio.run(_run(config, url, arguments.action, arguments.id, arguments.tenant))
    except (ConfigError, StoreUnavailable, ValueError) as error:
        print(f"dps session: {error}", file=sys.stderr)
        return 2


async def _run(config: GatewayConfig, url: str, action: str, client_id: str, tenant: str) -> int:
    backend = RedisBackend(connect(url, TIMEOUT_SECONDS), TIMEOUT_SECONDS)
    store = SessionStore(backend, Mirror(0), config.session.ttl_seconds)
    scope = Scope.of(config.model.name, tenant, config.session.scope)
    session = SessionId.of_client(scope, client_id)
    try:
        snapshot = await store.read(scope, session)
        if snapshot.source is not StateSource.REDIS:
            raise StoreUnavailable("Redis did not answer; check session.redisUrl")
        if snapshot.record is None:
            print(f"session {session.text} does not exist", file=sys.stderr)
            return 1
        document = snapshot.document()
        print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
        if action == "delete":
            await store.delete(scope, session)
            print(f"deleted {session.text}", file=sys.stderr)
        return 0
    finally:
        await backend.close()
