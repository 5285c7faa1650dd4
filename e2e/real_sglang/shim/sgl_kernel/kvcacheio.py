# mypy: disable-error-code="import-not-found, no-any-unimported"
"""The operators that copy KV between SGLang 0.5.23's device and host pools, implemented in plain torch.

For HiCache's default layout (`--hicache-mem-layout page_first`): the host pool has the dimensions token, layer, head
and element, and the device pool has one buffer per layer. Names and arguments are SGLang's.
"""

import ctypes

import torch
from torch import Tensor


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor, dst_k: Tensor, src_v_layers: Tensor, dst_v: Tensor, src_indices: Tensor,
    dst_indices: Tensor, item_size: int, dst_layout_dim: int, num_layers: int,
) -> None:  # fmt: skip
    """Copy tokens of all layers from the device buffers, given as addresses, to the host."""
    count = int(src_indices.max()) + 1
    for addresses, host in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, address in enumerate(addresses.tolist()):
            memory = (ctypes.c_byte * (count * item_size)).from_address(address)
            device = torch.frombuffer(memory, dtype=host.dtype).view(count, *host.shape[2:])
            host[dst_indices, layer] = device[src_indices]


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor, dst_k: Tensor, src_v: Tensor, dst_v: Tensor, src_indices: Tensor, dst_indices: Tensor,
    layer_id: int, item_size: int, src_layout_dim: int,
) -> None:  # fmt: skip
    """Copy tokens of one layer from the host to the device."""
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]
