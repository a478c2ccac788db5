"""Runs the ```sh and ```python blocks of a Markdown file as a reader types them: in order, in one shell, in the file's folder.

`--guide` runs those of all pages of the guide, in the order of mkdocs.yml, in one empty folder with the environment `.venv` activated.

What an earlier block sets (an activated environment, the working folder) holds for later ones, as it does for a reader; the shell
starts without this repository's environment on its path. Blocks in other languages (```text, ```console) are not run. A failing
block stops the run and is printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def script(blocks: list[tuple[str, str]]) -> str:
    """One shell script of all blocks; Python blocks go to the `python` that the shell finds."""
    parts = ["set -euo pipefail"]
    for number, (kind, code) in enumerate(blocks, 1):
        parts.append(f"echo '--- block {number} ({kind})'; trap 'echo block {number} failed' ERR")
        parts.append(code if kind == "sh" else f"python - <<'END_OF_BLOCK'\n{code}END_OF_BLOCK\n")
    return "\n".join(parts)


def run(blocks: list[tuple[str, str]], folder: Path, root: Path, first: str = "") -> int:
    """Exit code of the first failing block, else 0; `first` is put before the shell's PATH."""
    own = str(root / ".venv")
    places = [place for place in os.environ["PATH"].split(os.pathsep) if not place.startswith(own)]
    env = {**os.environ, "PATH": os.pathsep.join([first, *places] if first else places)}
    env.pop("VIRTUAL_ENV", None)
    code = subprocess.run(["bash", "-c", script(blocks)], cwd=folder, env=env, check=False).returncode
    print(f"{len(blocks)} blocks, exit code {code}")
    return code


def main(path: str) -> int:
    """Run the blocks of the file at `path`, or of the guide for `--guide`; the exit code is 0 if all of them pass."""
    root = Path(__file__).resolve().parent.parent
    if path != "--guide":
        file = Path(path).resolve()
        blocks = BLOCK.findall(file.read_text(encoding="utf-8"))
        if not blocks:
            print(f"{path}: no code blocks found")
            return 1
        return run(blocks, file.parent, file.parent)
    pages = re.findall(r"guide/[\w-]+\.md", (root / "mkdocs.yml").read_text(encoding="utf-8"))
    blocks = [block for page in pages for block in BLOCK.findall((root / "docs" / page).read_text(encoding="utf-8"))]
    with tempfile.TemporaryDirectory() as folder:
        return run(blocks, Path(folder), root, first=str(root / ".venv" / "bin"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
