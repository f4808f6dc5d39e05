"""Exits 0 when the server in this container answers ``/health``, else 1."""

import os
import sys
import urllib.error
import urllib.request

url = f"http://127.0.0.1:{os.environ.get('PORT', '8000')}/health"
try:
    with urllib.request.urlopen(url, timeout=5) as answer:
        sys.exit(answer.status != 200)
except (OSError, ValueError) as error:
    sys.exit(f"{url}: {error}")
