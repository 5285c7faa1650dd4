"""Lets a STANDALONE engine use pages that an engine without a draft model wrote (SGLang 0.5.23).

SGLang ends a stored prefix at the first page without draft KV. Here draft pages are neither stored nor required.
For a request with a prefix from host memory or storage, the draft model prefills the fetched tokens itself, into the
slots that the target uses. Answers stay correct even if a refill fails, because the target model verifies every
draft: a wrong draft only lowers the acceptance length. With tensor parallelism, a failure in one process ends the
engine, as the failure of any forward pass does, because the other processes wait for its part of the result.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

from dps_sglang.metrics import count_refill
from dps_sglang.sharing import SHARING

logger = logging.getLogger(__name__)

STORAGE_PHASES = ("PREFETCH", "BACKUP_STORAGE")
DRAFT_POOLS = ("draft", "draft_indexer", "draft_swa")
CHUNK_TOKENS = 4096
"""Maximum number of tokens that the draft model prefills at once, which limits the memory for its activations."""


def without_draft_pages(
    original: Callable[..., Any], self: Any, phase: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps `_build_sidecar_transfers`: draft pages are copied between device and host, but not stored."""
    transfers = original(self, phase, *args, **kwargs)
    if SHARING.begun and phase.name in STORAGE_PHASES:
        return [transfer for transfer in transfers if transfer.name.value not in DRAFT_POOLS]
    return transfers


def refill(original: Callable[..., Any], self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `_draft_extend_for_prefill`: the draft model first runs over the tokens that were fetched."""
    if SHARING.begun and self.speculative_algorithm.is_standalone() and not batch.forward_mode.is_idle():
        for row, request in enumerate(batch.reqs):
            if needs_refill(request):
                try:
                    prefill_fetched(self, batch, row, request)
                    count_refill(completed=True)
                except RuntimeError:
                    count_refill(completed=False)
                    if self.server_args.tp_size > 1:
                        raise
                    logger.exception("dps prefix cache: the draft model could not prefill %s", request.rid)
    return original(self, batch, *args, **kwargs)


def needs_refill(request: Any) -> bool:
    """Whether this is the request's first chunk, after a prefix that did not come from device memory."""
    fetched = request.cached_tokens_host + request.cached_tokens_storage
    return bool(request.extend_batch_idx == 1 and request.prefix_len and fetched)


def first_fetched_token(request: Any) -> int:
    """The first token of a request's cached prefix that was not in device memory when the request was scheduled.

    The draft model's KV of the earlier tokens is in device memory as well.
    """
    start = request.prefix_len - min(request.prefix_len, request.materialized_host_hit_len())
    if request.storage_hit_length and request.storage_hit_start is not None:
        return int(min(start, request.storage_hit_start))
    return int(start)


def prefill_fetched(worker: Any, batch: Any, row: int, request: Any) -> None:
    """Run the draft model over the tokens of a request's prefix that were fetched, chunk by chunk."""
    length = request.prefix_len
    tokens = request.get_fill_ids()
    slots = worker.req_to_token_pool.req_to_token[batch.req_pool_indices[row], :length].to(torch.int64)
    chunk_tokens = _chunk_tokens(worker.server_args.chunked_prefill_size)
    for start in range(first_fetched_token(request), length, chunk_tokens):
        end = min(length, start + chunk_tokens)
        # SGLang feeds a draft model the tokens shifted by one.
        chunk = _chunk(batch, row, request, list(tokens[start + 1 : end + 1]), start, end)
        chunk.out_cache_loc = slots[start:end]
        forward_batch = ForwardBatch.init_new(
            chunk,
            worker.draft_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        worker.draft_runner.forward(forward_batch)


def _chunk_tokens(chunked_prefill_size: int | None) -> int:
    """SGLang reserves memory for the activations of `chunked_prefill_size` tokens, unless that is None or -1."""
    if chunked_prefill_size is None or chunked_prefill_size <= 0:
        return CHUNK_TOKENS
    return min(CHUNK_TOKENS, chunked_prefill_size)


def _chunk(batch: Any, row: int, request: Any, tokens: list[int], start: int, end: int) -> Any:
    """A batch of one request that extends it from `start` to `end`."""
    device = batch.seq_lens.device
    chunk = copy.copy(batch)
    chunk.reqs, chunk.decoding_reqs = [request], None
    chunk.multimodal_inputs, chunk.return_logprob = None, False
    chunk.req_pool_indices = batch.req_pool_indices[row : row + 1]
    chunk.req_pool_indices_cpu = batch.req_pool_indices_cpu[row : row + 1]
    chunk.input_ids = torch.tensor(tokens, dtype=torch.int64, device=device)
    chunk.seq_lens, chunk.seq_lens_cpu = torch.tensor([end], device=device), torch.tensor([end])
    chunk.seq_lens_sum = end
    chunk.orig_seq_lens = torch.tensor([end], dtype=torch.int32, device=device)
    chunk.prefix_lens, chunk.extend_lens, chunk.extend_num_tokens = [start], [end - start], end - start
    chunk.extend_logprob_start_lens = [0]
    chunk.spec_info = EagleDraftExtendInput(
        hidden_states=None, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
    )
    return chunk
