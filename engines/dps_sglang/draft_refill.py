"""Completes the draft model's KV of cached prefixes in a STANDALONE engine (SGLang 0.5.23).

SGLang ends a stored prefix at the first page without draft KV. Here draft pages are neither stored nor required.
For a request with a prefix from host memory or storage, the draft model prefills the fetched tokens itself, into the
slots that the target uses. Answers stay correct even if a refill fails, because the target model verifies every
draft: a wrong draft only lowers the acceptance length. With tensor parallelism, a failure in one process ends the
engine, as the failure of any forward pass does, because the other processes wait for its part of the result.

SGLang feeds a draft model the tokens shifted by one. The draft KV of the last token of a cached prefix thus depends on
the token that followed it in the request that wrote it, so the draft model computes it again with this request's token.
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


def refill(
    original: Callable[..., Any],
    self: Any,
    batch: Any,
    target_hidden_states: Any,
    next_token_ids: Any,
    mm_input_embeds: Any = None,
    kv_loc_plan: Any = None,
) -> Any:
    """Wraps `_draft_extend_for_prefill`: the draft model first completes its KV of the cached prefixes."""
    if self.speculative_algorithm.is_standalone() and not batch.forward_mode.is_idle():
        if SHARING.begun:
            _prefill_all_fetched(self, batch)
        if can_widen(batch, mm_input_embeds):
            batch, kv_loc_plan = widened(batch, self.req_to_token_pool.req_to_token), None
    return original(self, batch, target_hidden_states, next_token_ids, mm_input_embeds, kv_loc_plan)


def can_widen(batch: Any, mm_input_embeds: Any) -> bool:
    """Whether any request has a cached prefix, and nothing else depends on the number of tokens in the batch."""
    return any(batch.prefix_lens) and mm_input_embeds is None and batch.global_num_tokens is None


def widened(batch: Any, slots: torch.Tensor) -> Any:
    """A copy of the batch in which each request begins with the last token of its cached prefix.

    slots: of all tokens by request, `req_to_token`. `_draft_extend_for_prefill` shifts the input, so the value of the
    first input token is not used.
    """
    cached = [min(prefix, 1) for prefix in batch.prefix_lens]
    ends = torch.tensor(batch.prefix_lens, device=slots.device).clamp(min=1)
    last = slots[batch.req_pool_indices, ends - 1].to(batch.out_cache_loc.dtype)
    inputs, places = [], []
    tokens, written = batch.input_ids.split(batch.extend_lens), batch.out_cache_loc.split(batch.extend_lens)
    for row, more in enumerate(cached):
        inputs += [tokens[row][:more], tokens[row]]
        places += [last[row : row + more], written[row]]
    copied = copy.copy(batch)
    copied.input_ids, copied.out_cache_loc = torch.cat(inputs), torch.cat(places)
    copied.prefix_lens = [prefix - more for prefix, more in zip(batch.prefix_lens, cached, strict=True)]
    copied.extend_lens = [length + more for length, more in zip(batch.extend_lens, cached, strict=True)]
    copied.extend_num_tokens = batch.extend_num_tokens + sum(cached)
    return copied


def _prefill_all_fetched(worker: Any, batch: Any) -> None:
    """Let the draft model prefill what was fetched for the requests of this batch."""
    for row, request in enumerate(batch.reqs):
        if needs_refill(request):
            try:
                prefill_fetched(worker, batch, row, request)
                count_refill(completed=True)
            except RuntimeError:
                count_refill(completed=False)
                if worker.server_args.tp_size > 1:
                    raise
                logger.exception("dps prefix cache: the draft model could not prefill %s", request.rid)


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
