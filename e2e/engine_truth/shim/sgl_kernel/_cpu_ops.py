"""Pure-torch versions of the CPU ops that sglang 0.5.23's CPU speculative path takes from a CPU build of sgl-kernel."""

import ctypes
import torch
import torch.nn.functional as F


def _pairs(start, end):
    return list(zip(start.tolist(), end.tolist()))


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    o = 0
    for r, (s, e) in zip(req_pool_indices.tolist(), _pairs(start_offset, end_offset)):
        req_to_token[r, s:e] = out_cache_loc[o : o + e - s].to(req_to_token.dtype)
        o += e - s


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    o = 0
    for r, (s, e) in zip(req_pool_indices.tolist(), _pairs(start_offset, end_offset)):
        out_cache_loc[o : o + e - s] = req_to_token[r, s:e].to(out_cache_loc.dtype)
        o += e - s


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, out_cache_loc, pool_len
    )


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    rows = req_to_token[req_pool_indices].repeat_interleave(topk, 0).clone()
    if topk > 1:
        for b, (r, n) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
            for k in range(topk):
                rows[b * topk + k, n : n + num_steps] = req_to_token[
                    r, n + k * num_steps : n + (k + 1) * num_steps
                ]
    return rows


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    n = accept_lens.numel()
    idx = torch.arange(n) * accept_stride + accept_lens.view(-1).long() - 1
    bonus_tokens[:n] = accept_tokens.view(-1)[idx].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    src = accept_index.view(-1)
    src = src[src > -1].long()
    accept_out_cache_loc[: src.numel()] = out_cache_loc[src].to(accept_out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    for p, st in zip(data_ptrs.tolist(), strides.tolist()):
        rows = [ctypes.string_at(p + s * st, st) for s in src_loc.tolist()]
        for t, r in zip(tgt_loc.tolist(), rows):
            ctypes.memmove(p + t * st, r, st)


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    for i, (s, n) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist())):
        input_ids[s : s + n - 1] = input_ids[s + 1 : s + n].clone()
        pos = s + n - 1 if select_index is None else int(select_index[i])
        input_ids[pos] = topk_index.view(-1)[i]


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    bs, n = verified_seq_len.numel(), draft_token_num
    assert tree_mask_mode == 1, "only QLEN_ONLY is used on cpu"
    mask = tree_mask.view(bs, n, n)
    mask[:] = False
    mask[:, :, 0] = True
    parents, sel = parent_list.tolist(), selected_index.tolist()
    for b, sl in enumerate(verified_seq_len.tolist()):

        def where(tok):
            return next((j for j, t in enumerate(sel[b]) if t == tok), None)

        positions[b * n] = sl
        retrive_index[b] = torch.arange(b * n, (b + 1) * n, dtype=retrive_index.dtype)
        for i in range(n - 1, 0, -1):
            pt, pp = sel[b][i - 1] // topk, 0
            if pt > 0:
                w = where(parents[b][pt])
                if w is None:
                    continue
                pp = w + 1
            prev = int(retrive_next_token[b, pp])
            retrive_next_token[b, pp] = i
            if prev != -1:
                retrive_next_sibling[b, i] = prev
        for t in range(1, n):
            cur, d = t - 1, 0
            while cur is not None:
                mask[b, t, cur + 1] = True
                d += 1
                pt = sel[b][cur] // topk
                if pt == 0:
                    break
                cur = where(parents[b][pt])
            positions[b * n + t] = sl + d


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    tp = target_predict.reshape(-1).tolist()
    for b in range(candidates.shape[0]):
        ri, nt, ns, cd = (
            x[b].tolist() for x in (retrive_index, retrive_next_token, retrive_next_sibling, candidates)
        )
        last, acc, cur = ri[0], 0, 0
        accept_index[b, 0] = last
        for _ in range(1, accept_index.shape[1]):
            cur = nt[cur]
            while cur != -1 and cd[cur] != tp[last]:
                cur = ns[cur]
            if cur == -1:
                break
            predicts[last] = tp[last]
            acc += 1
            accept_index[b, acc] = ri[cur]
            last = ri[cur]
        accept_token_num[b] = acc
        predicts[last] = tp[last]


def reconstruct_indices_from_tree_mask(
    tree_mask,
    verified_seq_len,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    batch_size,
    draft_token_num,
):
    n = draft_token_num
    anc = tree_mask.view(batch_size, n, n).bool() & torch.ones(n, n, dtype=torch.bool).tril(-1)
    col = torch.arange(n)
    positions.view(-1)[: batch_size * n] = (
        (anc.sum(-1) + verified_seq_len.view(-1, 1)).view(-1).to(positions.dtype)
    )
    retrive_index.view(batch_size, n)[:] = torch.arange(batch_size * n).view(batch_size, n)
    parent = torch.where(anc, col, -1).max(-1).values
    first = torch.where(anc, col.view(-1, 1), n).min(1).values
    retrive_next_token.view(batch_size, n)[:] = torch.where(first < n, first, -1)
    same = (parent[:, :, None] == parent[:, None, :]) & (col.view(-1, 1) > col.view(1, -1))
    sib = torch.where(same, col.view(-1, 1), n).min(1).values
    retrive_next_sibling.view(batch_size, n)[:] = torch.where((parent >= 0) & (sib < n), sib, -1)


def decode_attention_cpu(
    q,
    k_buf,
    v_buf,
    k_scale,
    v_scale,
    o,
    k,
    v,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    scaling,
    logit_cap,
    is_cross,
    swa,
    encoder_lens,
    sinks,
):
    if k is not None:
        k_buf[loc] = k.view(-1, *k_buf.shape[1:]).to(k_buf.dtype)
        v_buf[loc] = v.view(-1, *v_buf.shape[1:]).to(v_buf.dtype)
    for i, (r, n) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        idx = req_to_token[r, :n].long()
        kk, vv = k_buf[idx].to(q.dtype).transpose(0, 1), v_buf[idx].to(q.dtype).transpose(0, 1)
        o[i] = F.scaled_dot_product_attention(
            q[i].unsqueeze(1).unsqueeze(0), kk[None], vv[None], scale=scaling, enable_gqa=True
        )[0, :, 0]


def extend_attention_cpu(
    q,
    k,
    v,
    o,
    k_buf,
    v_buf,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_extend_len,
    scaling,
    logit_cap,
    is_cross,
    swa,
    encoder_lens,
    sinks,
    tree_mask,
    is_causal,
):
    for i, (r, n, e, s) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist())
    ):
        idx = req_to_token[r, :n].long()
        kk, vv = k_buf[idx].to(q.dtype).transpose(0, 1), v_buf[idx].to(q.dtype).transpose(0, 1)
        m = torch.ones(e, n, dtype=torch.bool)
        if tree_mask is not None:
            m[:, n - e :] = tree_mask.view(-1, e, e)[i].bool()
        elif is_causal:
            m = m.tril(n - e)
        o[s : s + e] = F.scaled_dot_product_attention(
            q[s : s + e].transpose(0, 1)[None],
            kk[None],
            vv[None],
            attn_mask=m,
            scale=scaling,
            enable_gqa=True,
        )[0].transpose(0, 1)


# IntelAMXAttnBackend looks these two up on torch.ops.sgl_kernel
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
