#!/usr/bin/env python3
"""The command from a checkout; the same verbs as the installed ``vllm-overlay``."""

import sys

try:
    from overlay.cli import main
except ImportError as error:
    have = ".".join(map(str, sys.version_info[:2]))
    sys.stderr.write(
        f"error: {error.name or error} can't be imported by Python {have} ({sys.executable})\n"
        "fix: with Python 3.11 or newer: python3 -m venv .venv && .venv/bin/pip install -e .\n"
        "     then run .venv/bin/vllm-overlay\n"
    )
    sys.exit(11)

if __name__ == "__main__":
    sys.exit(main())
