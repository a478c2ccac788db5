"""The suite for one accelerator: correctness first, then speed, each stage in a process of its own (docs/gpu.md)."""
