"""Keeps a server from outliving its owner: `python guard.py FOLDER COMMAND…`, standard library only.

Runs the command in this process's group. When standard input ends (the owner closed it, or died in any way) the server is
asked to end and the whole group is killed; `FOLDER` is removed then, too. When the server ends by itself, what it left
behind of its group is killed, so that no half of it holds the port.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0


def main(folder: str, command: list[str]) -> None:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    print(f"rollkeel: server process {server.pid}", flush=True)

    def watch() -> None:
        code = server.wait()
        print(f"rollkeel: the server ended with exit code {code}", flush=True)
        os.killpg(0, signal.SIGKILL)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while sys.stdin.buffer.read(1):
        continue
    shutil.rmtree(folder, ignore_errors=True)
    server.terminate()
    watcher.join(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
