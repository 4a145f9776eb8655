"""The process of a server of OpenEnv: `python -m grpo_async.agents.environments.openenv_process MODULE:APP FD OWNER`.

FD is a socket that listens already, OWNER the process with which it ends.
"""

from __future__ import annotations

import socket
import sys

import uvicorn

from grpo_async.user_code.references import resolve
from grpo_async.utils.lifetime import die_with_parent


def main() -> None:
    die_with_parent(int(sys.argv[3]))
    server = uvicorn.Server(uvicorn.Config(resolve(sys.argv[1]), log_level="warning"))
    server.run(sockets=[socket.socket(fileno=int(sys.argv[2]))])


if __name__ == "__main__":
    main()
