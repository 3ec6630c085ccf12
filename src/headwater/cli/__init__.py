"""The command line: each command parses, makes one call into the library, and prints.

Knows options, exit codes and how an error reaches the terminal. Does not know models, caches or dialogue. Imports
of the rooms happen inside the commands, so that help comes at once. The commands are listed in `app`.
"""

from __future__ import annotations

from headwater.cli.app import headwater, main

__all__ = ["headwater", "main"]
