"""Runs every ```sh and ```python block of a Markdown file, in order, in one scratch folder per block kind.

Blocks in other languages (```text, ```console) are not run. A failing block stops the run and is printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def main(path: str) -> int:
    """Returns the exit code of the first failing block, else 0."""
    root = Path(path).resolve().parent
    env = {**os.environ, "PATH": f"{root / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"}
    blocks = BLOCK.findall(Path(path).read_text(encoding="utf-8"))
    if not blocks:
        print(f"{path}: no code blocks found")
        return 1
    for number, (kind, code) in enumerate(blocks, 1):
        print(f"--- README block {number} ({kind})\n{code}", flush=True)
        command = ["bash", "-euo", "pipefail", "-c", code] if kind == "sh" else [sys.executable, "-c", code]
        result = subprocess.run(command, cwd=root, env=env, check=False)
        if result.returncode:
            print(f"README block {number} failed with exit code {result.returncode}")
            return result.returncode
    print(f"{len(blocks)} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
