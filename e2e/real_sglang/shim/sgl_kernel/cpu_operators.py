# mypy: disable-error-code="import-not-found, no-any-unimported"
"""The operators that SGLang 0.5.23 needs for speculation on a CPU, implemented in plain torch.

A draft model's drafts must be a chain (`--speculative-eagle-topk 1`), those of NGRAM can be a tree. Names, arguments
and their order are SGLang's; tensors are written in place as its kernels do.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def _spans(*columns: Tensor) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write the new KV slots of each request into its row."""
    taken = 0
    for row, first, last in _spans(req_pool_indices, start, end):
        slots = out_cache_loc[taken : taken + last - first]
        req_to_token[row, first:last] = slots.to(req_to_token.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read the KV slots of each request from its row."""
    taken = 0
    for row, first, last in _spans(req_pool_indices, start, end):
        out_cache_loc[taken : taken + last - first] = req_to_token[row, first:last].to(out_cache_loc.dtype)
        taken += last - first


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor, out_cache_loc: Tensor, pool_len: int,
    topk: int, num_steps: int,
) -> None:  # fmt: skip
    """Read the slots for the drafts that follow each sequence."""
    end = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, end, out_cache_loc, pool_len)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """The rows of KV slots for draft decoding; for a chain, the rows of the requests."""
    _chain_only(topk)
    return req_to_token[req_pool_indices].clone()


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request."""
    count = accept_lens.numel()
    last = torch.arange(count) * accept_stride + accept_lens.view(-1).long() - 1
    bonus_tokens[:count] = accept_tokens.view(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """The KV slots of the accepted tokens, compacted."""
    flat = accept_index.view(-1)
    accepted = flat[flat > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, target_slots: Tensor, source_slots: Tensor
) -> None:
    """Move KV entries in all layers' buffers, given as addresses and bytes per entry. Reads precede writes."""
    for address, size in _spans(data_ptrs, strides):
        entries = [ctypes.string_at(address + slot * size, size) for slot in source_slots.tolist()]
        for slot, entry in zip(target_slots.tolist(), entries, strict=True):
            ctypes.memmove(address + slot * size, entry, size)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor, selected_index: Tensor, verified_seq_len: Tensor, tree_mask: Tensor, positions: Tensor,
    retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor, topk: int, depth: int,
    draft_token_num: int, tree_mask_mode: int,
) -> None:  # fmt: skip
    """The draft tree of each request: a chain in which each token attends to the previous ones."""
    _chain_only(topk)
    count, size = verified_seq_len.numel(), draft_token_num
    steps = torch.arange(size)
    tree_mask.view(count, size, size)[:] = torch.ones(size, size, dtype=torch.bool).tril()
    positions.view(count, size)[:] = verified_seq_len.view(-1, 1) + steps
    retrive_index.view(count, size)[:] = torch.arange(count * size).view(count, size)
    retrive_next_token.view(count, size)[:] = torch.where(steps + 1 < size, steps + 1, -1)
    retrive_next_sibling[:] = -1


def verify_tree_greedy_cpu(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """Accept the drafts on the path of the target's choices through the tree, plus the target's next token."""
    target = target_predict.reshape(candidates.shape).tolist()
    trees = zip(
        *(tensor.tolist() for tensor in (candidates, retrive_next_token, retrive_next_sibling)), strict=True
    )
    for row, (drafts, first_child, next_sibling) in enumerate(trees):
        path = [0]
        while len(path) < accept_index.shape[1]:
            node = first_child[path[-1]]
            while node >= 0 and drafts[node] != target[row][path[-1]]:
                node = next_sibling[node]
            if node < 0:
                break
            path.append(node)
        kept = retrive_index[row, path]
        accept_index[row, : len(path)] = kept.to(accept_index.dtype)
        accept_token_num[row] = len(path) - 1
        predicts[kept.long()] = torch.tensor([target[row][node] for node in path], dtype=predicts.dtype)


def decode_attention_cpu(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: Any, v_scale: Any, out: Tensor, k: Tensor | None,
    v: Tensor, loc: Tensor, attn_logits: Tensor, req_to_token: Tensor, req_pool_indices: Tensor,
    seq_lens: Tensor, scaling: float, *_: Any,
) -> None:  # fmt: skip
    """Attention of one new token per request over its KV slots, after the new entry is written."""
    if k is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for row, (request, length) in enumerate(_spans(req_pool_indices, seq_lens)):
        keys, values = _cached(req_to_token[request, :length], k_buffer, v_buffer, q)
        query = q[row].unsqueeze(1)[None]
        attended = scaled_dot_product_attention(query, keys, values, scale=scaling, enable_gqa=True)
        out[row] = attended[0, :, 0]


def extend_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: Any, v_scale: Any,
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, extend_seq_lens: Tensor,
    extend_start_loc: Tensor, max_extend_len: int, scaling: float, logit_cap: float, is_cross: bool, swa: Any,
    encoder_lens: Any, sinks: Any, tree_mask: Tensor | None, is_causal: bool,
) -> None:  # fmt: skip
    """Attention of several new tokens per request with cached KV: causal, or restricted by the draft tree."""
    requests = _spans(req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc)
    for row, (request, length, new, first) in enumerate(requests):
        keys, values = _cached(req_to_token[request, :length], k_buffer, v_buffer, q)
        mask = torch.ones(new, length, dtype=torch.bool)
        if tree_mask is not None:
            mask[:, length - new :] = tree_mask.view(-1, new, new)[row].bool()
        elif is_causal:
            mask = mask.tril(length - new)
        query = q[first : first + new].transpose(0, 1)[None]
        attended = scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        )
        out[first : first + new] = attended[0].transpose(0, 1)


def _cached(slots: Tensor, k_buffer: Tensor, v_buffer: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    index = slots.long()
    keys, values = (buffer[index].to(like.dtype).transpose(0, 1)[None] for buffer in (k_buffer, v_buffer))
    return keys, values


def _chain_only(topk: int) -> None:
    if topk != 1:
        raise NotImplementedError(f"drafts in a tree (topk {topk}) need a GPU; use topk 1")


# SGLang's attention backend for CPUs looks up these two in torch.ops.
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
