"""Reads YAML that strangers wrote. libyaml, used where PyYAML has it, is fast but crashes on deep nesting, so depth is counted first."""

from __future__ import annotations

from typing import Any

import yaml
from yaml import YAMLError

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MOST_NESTED = 100


def parse_yaml(text: str | bytes) -> Any:
    """The tree of a YAML text. Raises `YAMLError`, for one nested deeper than `MOST_NESTED` too."""
    depth = 0
    for event in yaml.parse(text, _LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_NESTED:
            raise YAMLError(f"lists and mappings are nested deeper than {MOST_NESTED}")
    return yaml.load(text, _LOADER)
