"""Write the benchmark's model once as a Hugging Face folder, so that both sides load the same weights."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peer.workload import SEED
from rollkeel.config import ModelConfig
from rollkeel.models.loading import load_policy, save_policy

PRESET = "preset:small-qwen3-moe"


def build(folder: str | Path) -> Path:
    """Hidden 128, 4 layers, head_dim 32, 8 experts top-2 of width 128, vocabulary 2,048; returns `folder`."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        save_policy(load_policy(ModelConfig(path=PRESET), seed=SEED), folder)
    return folder


def main() -> None:
    print(build(sys.argv[1]))


if __name__ == "__main__":
    main()
