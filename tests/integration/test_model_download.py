"""The generated init container downloads a model with rclone from a server with the API of S3."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dps_local.processes import Child, free_ports
from dps_operator.api import ModelSource
from dps_operator.build.engine import SOURCES
from dps_operator.build.gateway import SOURCE
from dps_operator.build.pods import Target, source_additions
from dps_testkit.http import status_of

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("flock") is None, reason="flock is missing"),
]

RCLONE = Path(sys.executable).with_name("rclone")
SECRET = {"AWS_ACCESS_KEY_ID": "access-key-1", "AWS_SECRET_ACCESS_KEY": "secret-key-1"}
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"tokens",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00001.safetensors": os.urandom(1 << 20),
    "original/params.json": b"{}",
}
TOKENIZER = {"config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"}


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (folder := tmp_path / "volume").mkdir()
    return folder


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a server with a model in the bucket `models`."""
    for name, content in FILES.items():
        path = tmp_path / "data/models/qwen/7b" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (port,) = free_ports(1)
    command = [str(RCLONE), "serve", "s3", "--config=/dev/null", f"--addr=127.0.0.1:{port}"]
    command += [f"--auth-key={','.join(SECRET.values())}", str(tmp_path / "data")]

    async def ready() -> bool:
        return await status_of(f"http://127.0.0.1:{port}") is not None

    server = Child("S3", command, tmp_path / "server.log", ready)
    server.start()
    try:
        await server.wait_ready()
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop()


async def download(
    url: str, target: Target, secret: dict[str, str] = SECRET, uri: str = "s3://models/qwen/7b"
) -> tuple[int, str]:
    """Run the init container for a target; returns the exit status and the log."""
    source = ModelSource.model_validate(
        {
            "s3": {
                "uri": uri,
                "endpoint": url,
                "region": "us-east-1",
                "credentialsSecretRef": {"name": "bucket"},
            }
        }
    )
    (container,) = source_additions(source, "model", target, "rclone:1")["initContainers"]
    keys: list[dict[str, Any]] = container["env"]
    env = {one["name"]: secret[one["valueFrom"]["secretKeyRef"]["key"]] for one in keys}
    process = await asyncio.create_subprocess_exec(
        *container["command"],
        *container["args"],
        env={"PATH": f"{RCLONE.parent}:{os.environ['PATH']}", **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


async def test_engine_downloads_all_files_once_even_if_several_start_together(url: str, volume: Path) -> None:
    target = replace(SOURCES, folder=str(volume))
    results = await asyncio.gather(*(download(url, target) for _ in range(3)))
    assert [status for status, _ in results] == [0, 0, 0], results
    model = volume / "s3/models/qwen/7b"
    assert contents(model) == FILES
    before = {path: path.stat().st_ino for path in model.rglob("*")}
    assert (await download(url, target))[0] == 0
    assert {path: path.stat().st_ino for path in model.rglob("*")} == before


async def test_gateway_downloads_only_the_tokenizer(url: str, volume: Path) -> None:
    status, log = await download(url, replace(SOURCE, folder=str(volume)))
    assert status == 0, log
    assert set(contents(volume / "s3/models/qwen/7b")) == TOKENIZER


async def test_wrong_credentials_end_the_download_with_a_message(url: str, volume: Path) -> None:
    secret = SECRET | {"AWS_SECRET_ACCESS_KEY": "wrong-key-1"}
    status, log = await download(url, replace(SOURCES, folder=str(volume)), secret)
    assert (status != 0, "403" in log.splitlines()[-1]) == (True, True)


@pytest.mark.parametrize("target", [SOURCES, SOURCE], ids=["engine", "gateway"])
async def test_missing_folder_ends_the_download_with_a_message(
    url: str, volume: Path, target: Target
) -> None:
    status, log = await download(url, replace(target, folder=str(volume)), uri="s3://models/qwen/8b")
    message = "s3://models/qwen/8b contains no file of the model"
    assert (status != 0, log.splitlines()[-1]) == (True, message)
