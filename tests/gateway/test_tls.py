"""TLS on the public port and to engines, and the addresses of the ports."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from dps_gateway.api.public import public_app
from dps_gateway.app import serve
from dps_gateway.config import ConfigError, ConfigFile, GatewayConfig
from dps_gateway.runtime import Runtime
from dps_gateway.session.redis import connect
from dps_testkit.certificates import certify
from dps_testkit.http import status_of
from dps_testkit.tokenizers import shared_tokenizer
from dps_testkit.waiting import wait_until

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is needed to create a certificate"
)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    certify(tmp_path / "tls.crt", tmp_path / "tls.key")
    return tmp_path / "tls.crt"


def text(path: Path) -> str:
    return path.read_text().strip()


def configuration(certificate: Path, **sections: Any) -> GatewayConfig:
    pool = {"endpoints": ["http://127.0.0.1:1"]}
    listen = {"tls": {"certFile": str(certificate), "keyFile": str(certificate.with_suffix(".key"))}}
    return GatewayConfig.model_validate(
        {
            "listen": listen,
            "model": {"name": "m", "tokenizer": "x"},
            "pools": {"speculative": pool, "greedy": pool},
            **sections,
        }
    )


@asynccontextmanager
async def running(config: GatewayConfig) -> AsyncIterator[Runtime]:
    runtime = Runtime(config, shared_tokenizer())
    try:
        yield runtime
    finally:
        await runtime.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"], ids=["server name", "no server name"])
async def test_new_handshakes_use_the_new_certificate(certificate: Path, host: str) -> None:
    config = configuration(certificate)
    async with running(config) as runtime, TestServer(public_app(runtime), host="127.0.0.1") as plain:
        assert runtime.tls is not None
        assert plain.runner is not None
        site = web.TCPSite(plain.runner, "127.0.0.1", port := unused_port(), ssl_context=runtime.tls)
        await site.start()

        async def presented() -> str:
            """The certificate of a new connection."""
            context = ssl.create_default_context(cafile=str(certificate))
            connector = aiohttp.TCPConnector(ssl=context, force_close=True)
            async with (
                aiohttp.ClientSession(connector=connector) as client,
                client.get(f"https://{host}:{port}/version") as response,
            ):
                assert response.status == 200
            der = await asyncio.to_thread(ssl.get_server_certificate, (host, port), timeout=30)
            return der.strip()

        before = await presented()
        source = ConfigFile(certificate.with_name("gateway.yaml"))
        source.path.write_text(config.model_dump_json(by_alias=True))
        source.load()
        certify(certificate, certificate.with_suffix(".key"))
        assert source.changed()
        runtime.apply(config)
        after = await presented()
    assert after == text(certificate) != before


async def test_key_of_another_certificate_is_refused_and_the_previous_one_stays(certificate: Path) -> None:
    config = configuration(certificate)
    async with running(config) as runtime:
        certify(certificate.with_name("other.crt"), certificate.with_suffix(".key"))
        with pytest.raises(ConfigError, match=r"listen.tls: .* cannot be used: .*(?i:mismatch)"):
            runtime.apply(config)
        async with await asyncio.start_server(
            lambda reader, writer: writer.close(), "127.0.0.1", port := unused_port(), ssl=runtime.tls
        ):
            address = ("127.0.0.1", port)
            presented = await asyncio.to_thread(ssl.get_server_certificate, address, timeout=30)
        assert presented.strip() == text(certificate)


async def test_engine_with_a_private_certificate_authority(certificate: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"choices": []})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    engine = TestServer(app)
    await engine.start_server(ssl=context)
    endpoint = {"endpoints": [str(engine.make_url("")).rstrip("/")]}
    statuses = []
    for pool in (endpoint, endpoint | {"caFile": str(certificate)}):
        config = configuration(certificate, pools={"speculative": pool, "greedy": pool}, listen={})
        async with (
            running(config) as runtime,
            TestServer(public_app(runtime)) as gateway,
            aiohttp.ClientSession() as client,
            client.post(
                gateway.make_url("/v1/chat/completions"),
                json={"messages": [{"role": "user", "content": "hello"}]},
            ) as response,
        ):
            statuses.append(response.status)
    await engine.close()
    assert statuses == [502, 200]


async def test_missing_authority_is_an_error(certificate: Path) -> None:
    pool = {"endpoints": ["https://e:1"], "caFile": "missing"}
    with pytest.raises(
        ConfigError, match=r"pools.speculative.caFile: .* missing cannot be used: No such file"
    ):
        Runtime(
            configuration(certificate, pools={"speculative": pool, "greedy": pool}),
            shared_tokenizer(),
        )


def test_sentinel_url_can_name_an_authority() -> None:
    client = connect("rediss+sentinel://host:26379/0?service=s&ssl_ca_certs=/ca.pem", 1.0)
    assert client.connection_pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"  # type: ignore[union-attr]


def test_credentials_in_a_sentinel_url_are_decoded() -> None:
    client = connect("redis+sentinel://u%40:p%2Fss@host:26379/0?service=s", 1.0)
    options = client.connection_pool.connection_kwargs  # type: ignore[union-attr]
    assert (options["username"], options["password"]) == ("u@", "p/ss")


def test_unknown_option_of_a_sentinel_url_is_named_without_its_value() -> None:
    with pytest.raises(ValueError, match=r"unknown option sentinel_pasword$"):
        connect("redis+sentinel://a/0?service=main&sentinel_pasword=secret", 1.0)


async def test_ports_listen_on_their_own_addresses(certificate: Path) -> None:
    port, admin_port = unused_port(), unused_port()
    listen = configuration(certificate).listen.model_dump(by_alias=True)
    listen |= {"host": "127.0.0.1", "port": port, "adminHost": "127.0.0.2", "adminPort": admin_port}
    config = configuration(certificate, listen=listen)
    gateway = asyncio.create_task(serve(config, shared_tokenizer(), None))
    try:

        async def live() -> bool:
            return await status_of(f"http://127.0.0.2:{admin_port}/livez") == 200

        await wait_until(live, "the admin port answers")
        with pytest.raises(OSError, match="Connect"):
            await asyncio.open_connection("127.0.0.1", admin_port)
        await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=30)
    finally:
        gateway.cancel()
        with suppress(asyncio.CancelledError):
            await gateway
