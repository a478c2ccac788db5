"""Controlled experiments: objectives × seeds × mismatch side by side, with a verdict against what is expected."""
