"""Stored responses stay with the engine that holds them, whichever gateway replica a request reaches."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import openai
import pytest
import pytest_asyncio

from dps_local.stack import MODEL
from dps_testkit.processes import Engine, LocalProcesses
from dps_testkit.waiting import eventually_async

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

KEYS = {"one": "sk-one", "two": "sk-two"}


@dataclass(frozen=True)
class TwoGateways:
    """Two gateway replicas in front of engines with a response store."""

    engines: dict[str, Engine]
    urls: tuple[str, str]

    def client(self, replica: int, tenant: str = "one") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.urls[replica]}/v1", api_key=KEYS[tenant], max_retries=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TwoGateways]:
    folder = tmp_path_factory.mktemp("stored")
    keys = folder / "keys"
    keys.write_text("".join(f"{tenant}:{key}\n" for tenant, key in KEYS.items()))
    async with LocalProcesses(folder) as processes:
        redis = await processes.start_redis()
        engines = await processes.start_engines(
            "first", "second", "greedy", arguments=["--enable-response-store"]
        )
        sections = {"auth": {"keysFile": str(keys)}, "session": {"redisUrl": redis.url}}
        gateways = [await processes.start_gateway(engines[:2], engines[2:], sections) for _ in range(2)]
        yield TwoGateways({engine.url: engine for engine in engines}, (gateways[0].url, gateways[1].url))


async def test_conversation_continues_on_another_gateway_replica(gateways: TwoGateways) -> None:
    answers = []
    previous: str | None = None
    for number, question in enumerate(("How is it in Oslo? " * 20, "And in Bern?", "Why?")):
        async with gateways.client(number % 2) as client:
            answer = await client.responses.with_raw_response.create(
                model=MODEL, input=question, previous_response_id=previous, max_output_tokens=9
            )
        answers.append(answer)
        previous = answer.parse().id
    usages = [usage for answer in answers if (usage := answer.parse().usage) is not None]
    lengths = [usage.input_tokens for usage in usages]
    session = answers[0].headers["x-dps-session"]
    assert [
        {
            name: answer.headers[f"x-dps-{name}"]
            for name in ("history", "turn", "session", "pool", "prompt-tokens", "delta-tokens")
        }
        for answer in answers
    ] == [
        {
            "history": "grown" if index else "new",
            "turn": str(index + 1),
            "session": session,
            "pool": answers[0].headers["x-dps-pool"],
            "prompt-tokens": str(length),
            "delta-tokens": str(length - (lengths[index - 1] if index else 0)),
        }
        for index, length in enumerate(lengths)
    ]
    assert all(usage.input_tokens_details.cached_tokens > 0 for usage in usages[1:])


async def test_stream_can_be_continued(gateways: TwoGateways) -> None:
    async with gateways.client(0) as client:
        stream = await client.responses.create(model=MODEL, input="A story", max_output_tokens=9, stream=True)
        events = [event async for event in stream]
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        answer = await client.responses.with_raw_response.create(
            model=MODEL, input="Go on", previous_response_id=last.response.id, max_output_tokens=9
        )
    assert (answer.headers["x-dps-history"], answer.headers["x-dps-turn"]) == ("grown", "2")


async def test_response_is_retrieved_from_its_engine_by_every_gateway_replica(gateways: TwoGateways) -> None:
    async with gateways.client(0) as one, gateways.client(1) as two:
        created = [
            await one.responses.create(model=MODEL, input=f"Question {number}", max_output_tokens=9)
            for number in range(6)
        ]
        for response in created:
            assert (await two.responses.retrieve(response.id)).output_text == response.output_text


async def test_background_response_is_retrieved_and_cancelled(gateways: TwoGateways) -> None:
    async with gateways.client(0) as one, gateways.client(1) as two:
        queued = await one.responses.create(
            model=MODEL, input="Slowly", max_output_tokens=400, background=True
        )
        assert queued.status == "queued"
        assert (await two.responses.retrieve(queued.id)).id == queued.id
        assert (await two.responses.cancel(queued.id)).status in ("cancelled", "completed", "incomplete")


async def test_another_tenant_cannot_reach_a_response(gateways: TwoGateways) -> None:
    async with gateways.client(0) as own, gateways.client(0, "two") as other:
        response = await own.responses.create(model=MODEL, input="A secret", max_output_tokens=9)
        for attempt in (
            other.responses.retrieve(response.id),
            other.responses.cancel(response.id),
            other.responses.create(model=MODEL, input="Tell", previous_response_id=response.id),
        ):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await attempt
        assert (await own.responses.retrieve(response.id)).output_text == response.output_text


async def test_request_fails_clearly_while_the_engine_that_holds_the_response_is_down(
    gateways: TwoGateways,
) -> None:
    """This test is the last of the module, because it stops the engines of one pool."""
    async with gateways.client(0) as client:
        raw = await client.responses.with_raw_response.create(model=MODEL, input="Hi", max_output_tokens=9)
        response, pool = raw.parse(), raw.headers["x-dps-pool"]
        engines = list(gateways.engines.values())
        for engine in engines[:2] if pool == "speculative" else engines[2:]:
            engine.child.kill()

        async def fails_clearly() -> None:
            """A request that finds the engine down itself may fail with another message, or with 502."""
            with pytest.raises(openai.InternalServerError) as failure:
                await client.responses.create(model=MODEL, input="And?", previous_response_id=response.id)
            assert failure.value.status_code in (502, 503)
            assert f"the engine that holds response '{response.id}' is not ready" in str(failure.value)

        await eventually_async(fails_clearly)
