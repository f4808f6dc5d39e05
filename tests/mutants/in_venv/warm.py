"""A process that has imported what no defect changes, and forks one child a run of pytest.

Started in the patched environment by its path: TESTS MODULE..., where TESTS is tests/patched. It
says what it has imported, then answers each request on a line of its own: the child's process id,
and its exit code.
"""

import importlib
import json
import os
import sys
from typing import Any


def shadow(folder: str, package: str) -> None:
    """Let what is yet to be imported of a package come from ``folder``."""
    sys.path.insert(0, folder)
    for name, module in list(sys.modules.items()):
        inside = os.path.join(folder, *name.split("."))  # noqa: PTH118 - quick
        if name.partition(".")[0] == package and hasattr(module, "__path__"):
            module.__path__ = [inside]
    importlib.invalidate_caches()


def child(request: dict[str, Any]) -> int:
    """Run pytest as a fresh process would."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["env"])
    os.chdir(request["root"])
    if request["shadow"]:
        shadow(request["shadow"], "vllm")
    import pytest

    code = int(pytest.main(request["argv"]))
    sys.stdout.flush()
    return code


def main(tests: str, *names: str) -> None:
    """Import, then serve until standard input ends."""
    sys.path.insert(0, tests)
    importlib.import_module("device")  # sets what Triton and vLLM read from the environment
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a package that prints must not be taken for an answer
    for name in names:
        importlib.import_module(name)
    print(json.dumps({"loaded": sorted(sys.modules)}), file=answers, flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 70
            try:
                code = child(json.loads(line))
            finally:
                os._exit(code)
        print(json.dumps({"pid": pid}), file=answers, flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
