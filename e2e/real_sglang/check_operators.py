# mypy: disable-error-code="import-not-found"
"""check_operators.py: call the shim's operators for draft trees, and print the results as JSON.

Run by SGLang's interpreter. The trees' links are compared with those that SGLang itself derives on the host, in the
grammar support of its NGRAM worker.
"""

import json
import random
from typing import Any

import numpy as np
import torch
from sgl_kernel.cpu_operators import verify_tree_greedy_cpu
from sgl_kernel.speculative import reconstruct_indices_from_tree_mask
from sglang.srt.speculative.ngram_worker import _derive_tree_links

ROUNDS = 200
LARGEST_TREE = 12
TREES = 3
"""Trees per call, one for each request."""


def random_mask(size: int, choice: random.Random) -> list[list[bool]]:
    """The ancestors of each node, itself included, in a random tree whose root is node 0."""
    rows = [[True] + [False] * (size - 1)]
    for node in range(1, size):
        row = list(rows[choice.randrange(node)])
        row[node] = True
        rows.append(row)
    return rows


def links(masks: list[list[list[bool]]], lengths: list[int]) -> dict[str, Any]:
    """What the operator writes for trees of one size, and for sequences of these lengths."""
    count, size = len(masks), len(masks[0])
    written = {name: torch.full((count, size), -2) for name in ("positions", "index", "child", "sibling")}
    reconstruct_indices_from_tree_mask(
        torch.tensor(masks).flatten(), torch.tensor(lengths), *written.values(), count, size
    )
    return {name: tensor.tolist() for name, tensor in written.items()}


def equal_to_sglang() -> bool:
    """Whether random trees have SGLang's links, and positions that are the nodes' depths."""
    choice = random.Random(0)
    for _ in range(ROUNDS):
        size = choice.randint(1, LARGEST_TREE)
        masks = [random_mask(size, choice) for _ in range(TREES)]
        lengths = [choice.randrange(1000) for _ in masks]
        found = links(masks, lengths)
        child, sibling = _derive_tree_links(np.array(masks).flatten(), TREES, size)
        expected = {
            "positions": [
                [length + sum(row) - 1 for row in mask] for mask, length in zip(masks, lengths, strict=True)
            ],
            "index": [list(range(start, start + size)) for start in range(0, TREES * size, size)],
            "child": child.tolist(),
            "sibling": sibling.tolist(),
        }
        if found != expected:
            return False
    return True


def accepted() -> dict[str, Any]:
    """What the operator accepts of two trees, a tree with branches and a chain, of at most four nodes each."""
    branches = [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [True, False, True, False, False],
        [True, False, True, True, False],
        [True, False, True, False, True],
    ]
    chain = [[column <= row for column in range(5)] for row in range(5)]
    tree = links([branches, chain], [0, 0])
    predicts, index = torch.full((10,), -1), torch.full((2, 4), -1)
    count = torch.full((2,), -1)
    verify_tree_greedy_cpu(
        predicts, index, count,
        candidates=torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]),
        retrive_index=torch.tensor(tree["index"]),
        retrive_next_token=torch.tensor(tree["child"]),
        retrive_next_sibling=torch.tensor(tree["sibling"]),
        # After the first node, the tree's second branch is right, and then its second child.
        target_predict=torch.tensor([[3, 9, 5, 9, 7], [2, 9, 9, 9, 9]]),
    )  # fmt: skip
    return {"predicts": predicts.tolist(), "index": index.tolist(), "count": count.tolist()}


if __name__ == "__main__":
    print(json.dumps({"links equal those of SGLang": equal_to_sglang(), "accepted": accepted()}))
