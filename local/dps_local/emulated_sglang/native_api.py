"""/generate, SGLang's native endpoint: one prompt or a batch. Every event has the whole text, not a delta."""

from contextlib import aclosing
from typing import Any

from aiohttp import web

from dps_local.emulated_sglang import results
from dps_local.emulated_sglang.driver import Engine, Output
from dps_local.emulated_sglang.http import EventStream, json_response, off_loop_if_long, read_body
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.protocol import GenerateRequest, GenerateSampling


class NativeEndpoints:
    """The native endpoint of one engine."""

    def __init__(self, engine: Engine, prompts: Prompts) -> None:
        self._engine = engine
        self._prompts = prompts

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """POST or PUT /generate."""
        request = await read_body(http, GenerateRequest)
        try:
            prompts, batched = await off_loop_if_long(http, self._read_prompts, request)
            requested = request.sampling_params or GenerateSampling()
            sampling = requested if isinstance(requested, list) else [requested] * len(prompts)
            if len(sampling) != len(prompts):
                raise ValueError("The length of sampling_params should be equal to the batch size.")
            params = [each.sampling() for each in sampling]
            batched = batched or any(each.n > 1 for each in params)
            rids: list[str | None] = [request.rid] if isinstance(request.rid, str) else [*(request.rid or [])]
            rids = rids if len(rids) == len(prompts) else []
            spaces = request.namespaces(len(prompts), batch=batched)
            if not request.stream:
                finals = await results.final_outputs(self._engine, prompts, params, rids, spaces)
                answers = [self._answer(output) for output in finals]
                return json_response(answers if batched else answers[0])
        except ValueError as error:
            return json_response({"error": {"message": str(error)}}, 400)
        stream = EventStream(http)
        await stream.open()
        try:
            async with aclosing(results.outputs(self._engine, prompts, params, True, rids, spaces)) as run:
                async for index, output in run:
                    await stream.send(self._answer(output) | ({"index": index} if batched else {}))
        except ValueError as error:
            problem = {
                "message": str(error),
                "type": "invalid_request_error",
                "code": 400,
                "retryable": False,
            }
            await stream.send({"error": problem})
        return await stream.close()

    def _read_prompts(self, request: GenerateRequest) -> tuple[list[results.Prompt], bool]:
        """The prompts, and whether the request is a batch.

        Raises ValueError unless the request has exactly one of `text` and `input_ids`.
        """
        if (request.text is None) == (request.input_ids is None):
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        inputs = request.input_ids if request.text is None else request.text
        assert inputs is not None
        return self._prompts.encode_inputs(inputs)

    def _answer(self, output: Output) -> dict[str, Any]:
        return {
            "text": output.text,
            "output_ids": list(output.sequence.plan.token_ids[: output.tokens]),
            "meta_info": results.meta_info(output, self._engine),
        }
