"""Engines that run already: what they serve, and whether their tokenizer is on this machine."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from huggingface_hub import try_to_load_from_cache

from dps_engines.pools import PoolName

ANSWER_SECONDS = 10.0


class GivenError(Exception):
    """An engine does not answer, or not as it must; the message says what to do."""


@dataclass(frozen=True)
class Served:
    """What engines serve: the model's name, and its tokenizer, a folder or hub id."""

    model: str
    tokenizer: str


@dataclass(frozen=True)
class _Answer:
    """What one engine says of itself; only SGLang tells its tokenizer."""

    model: str
    tokenizer: str | None


async def served(
    urls: Mapping[PoolName, str], model: str | None = None, tokenizer: str | None = None
) -> Served:
    """What all engines at these URLs serve; `model` and `tokenizer` take the place of what they say.

    Every engine is asked. Raises GivenError when one does not answer, when they serve different models, or
    when their tokenizer is not on this machine.
    """
    answers = await asyncio.gather(*(_ask(pool, url) for pool, url in urls.items()))
    names = {answer.model for answer in answers}
    if model is None and len(names) > 1:
        told = ", ".join(f"{pool}: {answer.model}" for pool, answer in zip(urls, answers, strict=True))
        raise GivenError(
            f"the engines serve different models ({told}); name the one that clients ask for: --model"
        )
    return Served(model or answers[0].model, tokenizer or _tokenizer_here(answers))


def _tokenizer_here(answers: list[_Answer]) -> str:
    for answer in answers:
        if answer.tokenizer and _is_here(answer.tokenizer):
            return answer.tokenizer
    told = next((answer.tokenizer for answer in answers if answer.tokenizer), None)
    problem = (
        f"the engines' tokenizer '{told}' is not on this machine" if told else "the engines name no tokenizer"
    )
    raise GivenError(
        f"{problem}; pass --tokenizer, a folder with tokenizer.json and tokenizer_config.json, or a hub id"
    )


def _is_here(name: str) -> bool:
    if Path(name).is_absolute():
        return Path(name).is_dir()
    try:
        return isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)
    except ValueError:  # not the form of a hub id
        return False


async def _ask(pool: PoolName, url: str) -> _Answer:
    engine = f"the {pool} engine at {url}"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS)) as http:
            async with http.get(f"{url}/v1/models") as answer:
                if answer.status != 200:
                    raise GivenError(f"{engine} answers /v1/models with status {answer.status}")
                models = await answer.json(content_type=None)
            async with http.get(f"{url}/server_info") as answer:  # SGLang's; others do without
                information = await answer.json(content_type=None) if answer.status == 200 else {}
        return _Answer(str(models["data"][0]["id"]), information.get("tokenizer_path"))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise GivenError(f"{engine} does not answer: {str(error) or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise GivenError(f"{engine} does not answer as an OpenAI-compatible server does") from error
