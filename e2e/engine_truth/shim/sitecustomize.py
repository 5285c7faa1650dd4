# With a CPU build of torch, PyPI's torchvision cannot load its own _C.so (it is linked against CUDA): declare the op
# schemas it would register. A CUDA build of torch loads it, and then declaring them again would be an error.
import importlib.util

if importlib.util.find_spec("torch") and importlib.util.find_spec("torchvision"):
    import torch

    if torch.version.cuda is None:
        for _op in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{_op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
