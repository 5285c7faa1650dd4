# mypy: disable-error-code="import-not-found"
"""Makes torchvision importable with a CPU build of torch, and more of SGLang usable without a GPU.

With a CPU build, PyPI's torchvision cannot load its extension module, which registers these operators. With a CUDA
build it can, and registering them twice would be an error.
"""

import importlib.util

import sglang_on_cpu  # noqa: F401  # changes modules of SGLang when they are imported

if importlib.util.find_spec("torch") and importlib.util.find_spec("torchvision"):
    import torch

    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
