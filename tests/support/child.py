"""Applies a small series in a process of its own, to be run under hostile conditions::

    python -m tests.support.child CACHE [--die NAME:N]

Standard output gets one JSON object: all ids and effects, or ``error`` and ``message``.
``--die`` makes the process kill itself when the function NAME is called for the N-th time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import overlay.trees.apply
import overlay.trees.store
from overlay.errors import OverlayError
from overlay.patches.patch import parse_patch
from overlay.sources.archive import Member

FILES = 400
PATCHES = 4
HEADER = (
    "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
    "From: =?UTF-8?q?M=C3=BCller?= <m@example.invalid>\n"
    "Date: Mon, 30 Nov 2026 12:00:00 +0130\n"
    "Subject: [PATCH] change {number}\n\nBecause \u6f22.\n\n"
)
DIFF = """diff --git a/dir/{number} b/dir/{number}
--- a/dir/{number}
+++ b/dir/{number}
@@ -1,3 +1,3 @@
 first\r
-{number}
+new  \r
 {end}
\\ No newline at end of file
diff --git a/new{number} b/new{number}
new file mode 100755
--- /dev/null
+++ b/new{number}
@@ -0,0 +1 @@
+$Id$\tx
"""
MORTAL = {
    "create": (overlay.trees.store.Store, "_create"),
    "put": (overlay.trees.store.FastImport, "put"),
    "made": (overlay.trees.store.FastImport, "made"),
    "exit": (overlay.trees.store.FastImport, "__exit__"),
    "write": (overlay.trees.apply, "write_atomic"),
    "replace": (os, "replace"),
}


def members() -> list[Member]:
    attributes = b"* text=auto eol=crlf ident filter=evil working-tree-encoding=UTF-16\n"
    found = [Member(path=b".gitattributes", mode=0o100644, data=attributes)]
    for number in range(FILES):
        data = b"first\r\n%d\n" % number + b"%d" % (number * 7919) * 100
        found.append(Member(path=b"dir/%d" % number, mode=0o100644, data=data))
    return found


def patches() -> list[Any]:
    made = []
    for number in range(PATCHES):
        mail = (HEADER + DIFF).format(number=number, end=f"{number * 7919}" * 100)
        made.append(parse_patch(mail.encode(), name=f"p{number}"))
    return made


def main(cache: Path, die: str = "") -> None:
    if die:
        name, count = die.split(":")
        _make_mortal(*MORTAL[name], int(count))
    store = overlay.trees.store.Store(cache, "vllm")
    try:
        base = store.find("refs/overlay/base/child") or store.import_tree(
            members(), ref="refs/overlay/base/child", message="base\n", expect={}
        )
        done = overlay.trees.apply.apply_series(store, base, patches())
    except OverlayError as error:
        sys.stdout.write(json.dumps({"error": error.kind, "message": str(error)}))
        return
    document = {
        "base": [base.commit, base.tree],
        "tree": done.tree,
        "processes": store.git.processes,
        "cached": [patch.cached for patch in done.patches],
        "patches": [
            [patch.name, patch.verdict, patch.commit, patch.tree]
            + [[effect.path, effect.mode, effect.blob] for effect in patch.effects]
            for patch in done.patches
        ],
    }
    sys.stdout.write(json.dumps(document))


def _make_mortal(owner: Any, name: str, last: int) -> None:
    original = getattr(owner, name)
    calls = 0

    def mortal(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(owner, name, mortal)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3] if len(sys.argv) > 3 else "")
