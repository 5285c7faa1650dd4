"""Run the prompts of a request, and describe the answers in SGLang's terms (`meta_info`, `usage`)."""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Many
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from dps_local.emulated_sglang.driver import Engine, Output
from dps_local.emulated_sglang.generation import SamplingParams
from dps_local.emulated_sglang.radix import SHARED, Namespace
from dps_local.emulated_sglang.scheduler import Sequence

Prompt = tuple[int, ...]


async def outputs(
    engine: Engine,
    prompts: Many[Prompt],
    params: SamplingParams | Many[SamplingParams],
    stream: bool,
    rids: Many[str | None] = (),
    namespaces: Many[Namespace] = (),
) -> AsyncGenerator[tuple[int, Output], None]:
    """Yield the index and the outputs of every choice. Indexes count `n` choices per prompt, prompt by prompt.

    With n > 1, SGLang prefills each prompt once before its choices, so that each choice finds it cached.
    Raises RequestError like `Engine.generate`.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    spaces = namespaces or [SHARED] * len(prompts)
    for prompt, sampling, space in zip(prompts, each, spaces, strict=True):
        if sampling.n > 1:
            warm = replace(sampling, max_new_tokens=0, min_new_tokens=0)
            async with aclosing(engine.generate(prompt, warm, stream=False, namespace=space)) as prefill:
                async for _ in prefill:
                    pass
    runs = [
        engine.generate(prompt, sampling, stream, choice, rid if sampling.n == 1 else None, space)
        for prompt, sampling, rid, space in zip(
            prompts, each, rids or [None] * len(prompts), spaces, strict=True
        )
        for choice in range(sampling.n)
    ]
    if len(runs) == 1:
        async with aclosing(runs[0]) as run:
            async for output in run:
                yield 0, output
        return
    async with aclosing(_merged(runs)) as merged:
        async for index, output in merged:
            yield index, output


async def _merged(runs: Many[AsyncGenerator[Output, None]]) -> AsyncGenerator[tuple[int, Output], None]:
    """Run all choices concurrently and yield their outputs as they arrive. Raises the first error of a choice."""
    arrived: asyncio.Queue[tuple[int, Output | ValueError]] = asyncio.Queue()

    async def pump(index: int, run: AsyncGenerator[Output, None]) -> None:
        try:
            async for output in run:
                arrived.put_nowait((index, output))
        except ValueError as error:
            arrived.put_nowait((index, error))

    pumps = [asyncio.create_task(pump(index, run)) for index, run in enumerate(runs)]
    try:
        left = len(runs)
        while left:
            index, item = await arrived.get()
            if isinstance(item, ValueError):
                raise item
            left -= item.finished
            yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for run in runs:
            await run.aclose()


async def final_outputs(
    engine: Engine,
    prompts: Many[Prompt],
    params: SamplingParams | Many[SamplingParams],
    rids: Many[str | None] = (),
    namespaces: Many[Namespace] = (),
) -> list[Output]:
    """The final outputs of all choices, in order."""
    finals: dict[int, Output] = {}
    async with aclosing(outputs(engine, prompts, params, False, rids, namespaces)) as run:
        async for index, output in run:
            finals[index] = output
    return [finals[index] for index in sorted(finals)]


def weight_versions(tokens: int) -> list[dict[str, Any]]:
    """The weight version of each range of tokens: always the same one."""
    return [{"version": "default", "start": 0, "end": tokens}]


def cached_tokens_details(sequence: Sequence, engine: Engine) -> dict[str, Any] | None:
    """The cached tokens by where they were found; None if there are none."""
    if not sequence.cached_tokens:
        return None
    stored = sequence.storage_tokens
    details: dict[str, Any] = {"device": sequence.cached_tokens - stored, "host": 0}
    if engine.storage is not None:
        details |= {"storage": stored, "storage_backend": engine.storage.options.backend}
    return details


def meta_info(output: Output, engine: Engine) -> dict[str, Any]:
    """SGLang's `meta_info` of one sequence. Durations and timestamps are in emulated time."""
    sequence = output.sequence
    info: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish_reason if output.finished else None,
        "prompt_tokens": len(sequence.prompt),
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": output.tokens,
        "cached_tokens": sequence.cached_tokens,
        "cached_tokens_details": cached_tokens_details(sequence, engine),
        "dp_rank": None,
    }
    if sequence.admitted is not None and sequence.first_token is not None:
        info |= {
            "storage_prefetch_wait": sequence.fetch_seconds,
            "storage_staging_wait": 0.0,
            "forward_entry_time": engine.epoch + sequence.admitted,
            "prefill_finished_time": engine.epoch + sequence.first_token,
            "queue_time": sequence.admitted - sequence.arrived,
        }
    if output.tokens <= 1 or output.finished:
        info["response_sent_to_client_ts"] = engine.now
    if output.finished:
        info |= _final_info(output, engine)
    return info


def _final_info(output: Output, engine: Engine) -> dict[str, Any]:
    """The fields of `meta_info` that only a finished sequence has."""
    sequence = output.sequence
    assert sequence.finished is not None
    info: dict[str, Any] = {
        "weight_versions": weight_versions(output.tokens),
        "e2e_latency": sequence.finished - sequence.arrived,
        "request_received_ts": engine.epoch + sequence.arrived,
        "api_server_dispatch_finish_ts": engine.epoch + sequence.arrived,
        "request_finished_ts": engine.epoch + sequence.finished,
    }
    if sequence.first_token is not None:
        decode = sequence.finished - sequence.first_token
        info |= {
            "first_token_latency": sequence.first_token - sequence.arrived,
            "decode_throughput": output.tokens / decode if decode else 0.0,
        }
    if sequence.verify_steps:
        proposed = sequence.verify_steps * (engine.draft_tokens - 1)
        info |= {
            "spec_accept_rate": sequence.accepted_drafts / proposed if proposed else 0.0,
            "spec_accept_length": output.tokens / sequence.verify_steps,
            "spec_num_correct_drafts": sequence.accepted_drafts,
            "spec_num_proposed_drafts": proposed,
            "spec_verify_ct": sequence.verify_steps,
            "spec_correct_drafts_histogram": list(sequence.accepted),
        }
    return info


def usage(finals: Many[Output], n: int, cache_report: bool) -> dict[str, Any]:
    """OpenAI `usage` of all choices. A prompt counts once for its `n` choices."""
    prompts = [output.sequence for output in finals[::n]]
    prompt_tokens = sum(len(sequence.prompt) for sequence in prompts)
    completion_tokens = sum(output.tokens for output in finals)
    cached = sum(sequence.cached_tokens for sequence in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached} if cache_report else None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }
