"""Policies on top of transformers, whose version is looked at here because other packages replace it after an install."""

from importlib import metadata

from rollkeel.errors import BadInput

TRANSFORMERS = (5, 16)
"""Oldest version whose experts interface, attention interface and checkpoint conversion are those that this code takes."""


def check_transformers(version: str) -> None:
    """Raises `BadInput` for a `version` that is too old, or of another major number."""
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if found < TRANSFORMERS or found[0] > TRANSFORMERS[0]:
        oldest = ".".join(map(str, TRANSFORMERS))
        wanted = f"transformers>={oldest},<{TRANSFORMERS[0] + 1}"
        raise BadInput(f'transformers {version} is installed, expected {wanted}; pip install "{wanted}"')


check_transformers(metadata.version("transformers"))
