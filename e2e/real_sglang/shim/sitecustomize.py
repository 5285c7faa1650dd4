# mypy: disable-error-code="import-not-found"
"""Lets torchvision be imported beside a CPU build of torch.

PyPI's torchvision cannot load its compiled part then, which would register these operators. With a CUDA build of
torch it can, and registering them twice would be an error.
"""

import importlib.util

if importlib.util.find_spec("torch") and importlib.util.find_spec("torchvision"):
    import torch

    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
