"""A server that is killed while it answers, again and again: `python -m tests.server.killed FOLDER PORT`, serves."""

from __future__ import annotations

import sys
from pathlib import Path

from headwater.server import serve


def main() -> int:
    folder, port, tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    return serve.run(
        model="fake",
        engine="fake",
        host="127.0.0.1",
        port=port,
        policy="streaming-llm",
        budget=300,
        sinks=None,
        max_tokens=tokens,
        memory=False,
        memory_bytes=1 << 20,
        timeout_s=60,
        folder=folder,
        drain_s=float(sys.argv[4]),
        answer_tokens=None,
    )


if __name__ == "__main__":
    sys.exit(main())
