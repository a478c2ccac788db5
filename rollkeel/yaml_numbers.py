"""YAML in which `1e-4` is a number, as people mean it, and `'1e-4'` a string."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads an unquoted `1e-4` as a string; people mean a number."""


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would read as numbers."""


_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def dump_yaml(tree: Any) -> str:
    """Text that `parse_yaml` reads back to an equal tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def parse_yaml(text: str) -> Any:
    """The tree of a YAML text. Raises `yaml.YAMLError`."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("lists and mappings are nested too deeply") from None
