"""Packing, and the only place where denominators are computed."""
