"""torchvision's wheel is a CUDA build: beside a CPU torch its operators are not there, and its import dies of that.

Their schemas are defined just before the module that looks for them; transforms written in Python work after that.
"""

import contextlib
import sys
from importlib.abc import MetaPathFinder


class _Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision._meta_registrations":
            import torch

            for operator in ("nms", "qnms"):
                with contextlib.suppress(RuntimeError):  # it is there
                    torch.library.define(
                        f"torchvision::{operator}",
                        "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                    )


sys.meta_path.insert(0, _Finder())
