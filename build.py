#!/usr/bin/env python3
"""The command from a checkout; the same verbs as the installed ``vllm-overlay``."""

import sys

from overlay.cli import main

if __name__ == "__main__":
    sys.exit(main())
