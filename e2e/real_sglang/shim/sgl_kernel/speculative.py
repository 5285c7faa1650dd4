# mypy: disable-error-code="import-not-found, no-any-unimported"
"""The operator that SGLang 0.5.23 imports from this module for NGRAM, implemented in plain torch."""

import torch
from torch import Tensor


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor, verified_seq_len: Tensor, positions: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, batch_size: int, draft_token_num: int,
) -> None:  # fmt: skip
    """Write the positions and links of draft trees, given as masks in which row i marks i and its ancestors.

    A node's next token is its first child, and its next sibling the following child of its parent; -1 if there is none.
    """
    size = draft_token_num
    nodes = torch.arange(size)
    ancestors = tree_mask.view(batch_size, size, size).bool().tril(-1)
    parents = torch.where(ancestors, nodes, -1).amax(2)
    children = torch.where(ancestors, nodes.view(-1, 1), size).amin(1)
    later = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (nodes.view(-1, 1) > nodes)
    siblings = torch.where(later, nodes.view(-1, 1), size).amin(1)
    siblings[parents < 0] = size
    positions.view(batch_size, size)[:] = ancestors.sum(2) + verified_seq_len.view(-1, 1)
    retrive_index.view(batch_size, size)[:] = torch.arange(batch_size * size).view(batch_size, size)
    retrive_next_token.view(batch_size, size)[:] = torch.where(children < size, children, -1)
    retrive_next_sibling.view(batch_size, size)[:] = torch.where(siblings < size, siblings, -1)
