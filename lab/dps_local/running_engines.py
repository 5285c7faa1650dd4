"""Query running engines for the model and tokenizer that they serve."""

import argparse
import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from huggingface_hub import try_to_load_from_cache

from dps_engines.pools import PoolName

TIMEOUT_SECONDS = 10.0


class RunningEngineError(Exception):
    """A running engine cannot be used. The message says what to change."""


@dataclass(frozen=True)
class ServedModel:
    """The served model name, and the tokenizer as a folder or Hub id; empty if the engine does not report it."""

    model: str
    tokenizer: str


def base_url(text: str) -> str:
    """A server's base URL without the path `/v1`, which may be given or not. Raises ArgumentTypeError."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} is not a URL such as http://127.0.0.1:30000")
    return text.rstrip("/").removesuffix("/v1")


async def served_model(
    urls: Mapping[PoolName, str], model: str | None = None, tokenizer: str | None = None
) -> ServedModel:
    """The model that the engines at these URLs serve. `model` and `tokenizer` override the reported values.

    Raises RunningEngineError if an engine is unreachable, if the engines serve different models, or if their
    tokenizer is not on this machine.
    """
    infos = await asyncio.gather(*(_engine_info(pool, url) for pool, url in urls.items()))
    if model is None and len({info.model for info in infos}) > 1:
        models = ", ".join(f"{pool}: {info.model}" for pool, info in zip(urls, infos, strict=True))
        raise RunningEngineError(
            f"the engines serve different models ({models}); pass the name that clients use as --model"
        )
    return ServedModel(model or infos[0].model, tokenizer or _local_tokenizer(infos))


def _local_tokenizer(infos: list[ServedModel]) -> str:
    for info in infos:
        if info.tokenizer and _is_local(info.tokenizer):
            return info.tokenizer
    reported = next((info.tokenizer for info in infos if info.tokenizer), None)
    problem = (
        f"the engines' tokenizer '{reported}' is not on this machine"
        if reported
        else "the engines do not report their tokenizer"
    )
    raise RunningEngineError(
        f"{problem}; pass --tokenizer, a folder with tokenizer.json and tokenizer_config.json, or a Hub id"
    )


def _is_local(name: str) -> bool:
    if Path(name).is_absolute():
        return Path(name).is_dir()
    try:
        return isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)
    except ValueError:  # not a valid Hub id
        return False


async def _engine_info(pool: PoolName, url: str) -> ServedModel:
    engine = f"the {pool} engine at {url}"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)) as http:
            async with http.get(f"{url}/v1/models") as response:
                if response.status != 200:
                    raise RunningEngineError(f"{engine} returned status {response.status} for /v1/models")
                models = await response.json(content_type=None)
            async with http.get(f"{url}/server_info") as response:  # only SGLang has this endpoint
                server_info = await response.json(content_type=None) if response.status == 200 else {}
        return ServedModel(str(models["data"][0]["id"]), server_info.get("tokenizer_path") or "")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise RunningEngineError(f"{engine} is unreachable: {str(error) or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunningEngineError(f"{engine} is not an OpenAI-compatible server") from error
