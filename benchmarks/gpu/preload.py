"""What every stage on a card imports, once: a server does, and stages are forked from it. It must not begin to use CUDA."""

from __future__ import annotations

import importlib
import os

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask whether there is a card would begin

from benchmarks.gpu.driver import STAGES, bare

bare("cuda")
for _module, _ in STAGES.values():
    importlib.import_module(_module)
