"""Measures running engines through their chat completions."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp

from dps_gateway.pool import Pool
from dps_lab.calibrate.measure import Answer, EngineMeasurement, MeasurementError, Plan, measure
from dps_lab.replay.wire import BrokenAnswerError, read_stream
from dps_lab.workload.assets import bundled_sessions
from dps_lab.workload.sessions import load_sessions

LIMIT_SECONDS: Final = 120.0
"""Time limit for the measurement of one engine."""

CONNECT_SECONDS: Final = 10.0


class LiveEngine:
    """Sends chat completions to one engine. The caller opens and closes the aiohttp session."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str) -> None:
        self._http = http
        self._url = f"{url}/v1/chat/completions"
        self._model = model

    async def answers(self, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
        """Send all prompts at the same time, and wait for all answers. Raises MeasurementError."""
        return await asyncio.gather(*(self._answer(prompt, max_tokens) for prompt in prompts))

    async def _answer(self, prompt: str, max_tokens: int) -> Answer:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = time.perf_counter()
        chunks: list[float] = []
        async with self._http.post(self._url, json=body) as response:
            if response.status != 200:
                raise MeasurementError(
                    f"it answers with status {response.status}: {(await response.text())[:300]}"
                )
            answer = await read_stream(response, lambda: chunks.append(time.perf_counter()))
        usage = answer.usage
        if not chunks or not usage.prompt_tokens:
            raise MeasurementError("its answers have no text, or no usage; it must support stream_options")
        return Answer(sent, tuple(chunks), usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


async def measure_engines(
    urls: Mapping[Pool, Sequence[str]], api_key: str | None, plan: Plan
) -> dict[Pool, EngineMeasurement]:
    """Measure the engines at these base URLs one after another. Returns the mean of each pool.

    Raises MeasurementError, whose message names the engine.
    """
    chats = _chats()
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    measured: dict[Pool, list[EngineMeasurement]] = {pool: [] for pool in urls}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
        for pool, each in urls.items():
            for url in each:
                measured[pool].append(await _measure(http, pool, url, chats, plan))
    return {pool: EngineMeasurement.mean(each) for pool, each in measured.items()}


async def _measure(
    http: aiohttp.ClientSession, pool: Pool, url: str, chats: Sequence[str], plan: Plan
) -> EngineMeasurement:
    engine = f"the {pool} engine at {url}"
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            model, context_tokens = await _model(http, url)
            chosen = plan if context_tokens is None else plan.within(context_tokens)
            return await measure(LiveEngine(http, url, model), chats, chosen)
    except MeasurementError as error:
        raise MeasurementError(f"{engine} cannot be measured: {error}") from error
    except (aiohttp.ClientError, BrokenAnswerError) as error:
        raise MeasurementError(
            f"{engine} does not answer: {error}; check that it runs, and that --{pool}-url is its base URL, such as "
            "http://127.0.0.1:30000"
        ) from error
    except TimeoutError as error:
        raise MeasurementError(
            f"{engine} has not answered {plan.requests} requests within {LIMIT_SECONDS:g} s; measure it while it has "
            "less load"
        ) from error


async def _model(http: aiohttp.ClientSession, url: str) -> tuple[str, int | None]:
    """The name of the served model, and its context length if it is reported, as SGLang and vLLM do.

    Raises MeasurementError if the server is not compatible with OpenAI's API.
    """
    async with http.get(f"{url}/v1/models") as response:
        if response.status in (401, 403):
            raise MeasurementError(f"it answers with status {response.status}; set --api-key")
        try:
            models: Any = await response.json(content_type=None)
            model = models["data"][0]
            return str(model["id"]), model.get("max_model_len")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise MeasurementError(
                f"it answers /v1/models with status {response.status} and no list of models"
            ) from None


def _chats() -> list[str]:
    """The user messages of the bundled sessions."""
    return [
        message["content"]
        for session in load_sessions(bundled_sessions())
        for turn in session.turns
        for message in turn.messages
        if message["role"] == "user"
    ]
