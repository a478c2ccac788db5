"""A corpus of injected faults, and how often the doctor names them."""
