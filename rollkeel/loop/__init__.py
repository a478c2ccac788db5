"""The stages, put together: read `steps.py`, `feeds.py`, `learn.py`, `run.py`, in this order."""
