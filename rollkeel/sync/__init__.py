"""Weights to engines: named slices with checksums that add up, applied in place, proven on arrival."""
