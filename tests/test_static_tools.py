"""The tools of tests/static see the faults that they are for, on sources made for it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from overlay.trees.match import Entry
from tests.static.api import Absent, Api, Unresolved, misfit
from tests.static.calls import find_calls, lazy_wrappers
from tests.static.fakes import Calls, Tensor
from tests.static.postconditions import POSTCONDITIONS, Postcondition
from tests.static.source import Missing, cpp_code, cpp_function, cut
from tests.static.trees import Pair, View

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class Files:
    """A tree that is a mapping."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = {path.encode(): text.encode() for path, text in files.items()}

    def get(self, path: bytes) -> Entry | None:
        data = self._files.get(path)
        return None if data is None else Entry(mode=0o100644, data=data)

    def is_folder(self, path: bytes, *, without: Collection[bytes] = ()) -> bool:
        raise NotImplementedError


PACKAGE = View(
    Files(
        {
            "pkg/__init__.py": "from .a import f as f, Thing\nfrom .b import *\ntry:\n"
            "    from .gone import lost\nexcept ImportError:\n    lost = None\n",
            "pkg/a.py": "import functools\nfrom other import far\n"
            "@functools.cache\ndef f(x, y=1, *, z): ...\n"
            "class Thing:\n    def __init__(self, size): ...\n"
            "    @staticmethod\n    def make(n): ...\n"
            "@dataclass\nclass Data:\n    a: int\n    b: int = 0\n"
            "alias = f\nmade = functools.partial(f)\n"
            "@strange\ndef odd(x): ...\n",
            "pkg/b.py": "@backend_requirement({})\ndef g(*, n): ...\n"
            "@overload\ndef h(x: int): ...\n@overload\ndef h(x: str, y: int): ...\n"
            "def h(x, y=None): ...\n",
        }
    )
)


def faults(source: str, wrappers: dict[str, str] | None = None) -> list[str | None]:
    """Why each call into the package doesn't fit, in order."""
    api = Api(PACKAGE, "pkg")
    found = []
    for call in find_calls("vllm/x.py", ast.parse(source), wrappers or {}, package="pkg"):
        whys = [misfit(call.node, one) for one in api.signatures(call.target)]
        found.append(next((why for why in whys if why), None))
    return found


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("f(1, z=2)", None),
        ("f(1, 2, z=3)", None),
        ("f(x=1, z=2)", None),
        ("f(1)", "missing a required"),
        ("f(z=1)", "missing a required"),
        ("f(1, 2, 3, z=4)", "too many positional"),
        ("f(1, z=2, lse=3)", "unexpected keyword argument 'lse'"),
        ("f(1, x=1, z=2)", "multiple values"),
        ("f(*a, **k)", None),
        ("f(**k, lse=1)", "unexpected keyword argument 'lse'"),
        ("Thing(1)", None),
        ("Thing()", "missing a required"),
        ("Thing.make(1)", None),
        ("Thing.make()", "missing a required"),
        ("g(n=1, skip_check=True)", None),
        ("g(1)", "too many positional"),
        ("h(1)", None),
        ("h(1, 2, 3)", "too many positional"),
    ],
)
def test_calls_are_bound(call: str, why: str | None) -> None:
    (found,) = faults(f"from pkg import f, Thing, g, h\n{call}\n")
    assert (found is None) if why is None else (found is not None and why in found)


@pytest.mark.parametrize(
    "source",
    [
        "import pkg\npkg.f(1)\n",
        "import pkg.a\npkg.a.f(1)\n",
        "import pkg.a as p\np.f(1)\n",
        "from pkg.a import f as q\nq(1)\n",
        "from pkg.a import alias\nalias(1)\n",
        "def run():\n    from pkg import f\n    def inner():\n        return f(1)\n",
        "class C:\n    def m(self):\n        from pkg import f\n        return [f(1) for _ in x]\n",
        "try:\n    from pkg import f\nexcept ImportError:\n    f = None\nf(1)\n",
        "w = _lazy_import_wrapper('pkg', 'f')\ndef run():\n    return w(1)\n",
    ],
)
def test_names_are_followed(source: str) -> None:
    (found,) = faults(source)
    assert found is not None
    assert "missing a required" in found


def test_vllms_wrappers_are_followed() -> None:
    names = lazy_wrappers(ast.parse("wrapped = _lazy_import_wrapper('pkg.a', 'f')\nother = 1\n"))
    assert names == {"wrapped": "pkg.a.f"}
    source = (
        "def m():\n    from vllm.utils.flashinfer import wrapped, other\n    wrapped(1); other(1)\n"
    )
    assert len(faults(source, names)) == 1


@pytest.mark.parametrize(
    "source",
    ["from pkg import f\ndef m(f):\n    f()\n", "from pkg import f\ndef m():\n    f = 1\n    f()\n",
     "class C:\n    from pkg import f\n    def m(self):\n        f()\n", "f()\n"],
)  # fmt: skip
def test_what_is_no_call_into_the_package_is_left_alone(source: str) -> None:
    assert faults(source) == []


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("pkg.a.nothing", Absent),
        ("pkg.nowhere.f", Absent),
        ("pkg.a.odd", Unresolved),
        ("pkg.a.made", Unresolved),
        ("pkg.a.far", Unresolved),
        ("pkg.a", Unresolved),
        ("pkg.lost", Unresolved),
    ],
)
def test_what_cannot_be_resolved_is_said(target: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        Api(PACKAGE, "pkg").signatures(target)


def test_a_dataclass_has_the_signature_that_is_made_for_it() -> None:
    assert faults("from pkg.a import Data\nData(1)\nData()\nData(1, 2, 3)\n")[0] is None
    assert None not in faults("from pkg.a import Data\nData()\nData(1, 2, 3)\n")


def test_cpp_is_read_without_comments_and_strings() -> None:
    code = cpp_code('int f(int a);  // f() {\n/* g() { */ int f(int a) {\n  s("}"); return g(a); }')
    assert cpp_function(code, "f") == '{ s(""); return g(a); }'
    with pytest.raises(Missing):
        cpp_function(code, "g")


def test_a_function_is_cut_out_with_what_it_is_given() -> None:
    function = ast.parse("@jit\ndef f(x: Unknown) -> Gone:\n    return x + ONE\n").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert cut(function, {"ONE": 1})(2) == 3
    calls = Calls({"kernel": 7})
    caller = ast.parse("def f(t):\n    from m import kernel\n    return kernel(t, n=1)\n").body[0]
    assert isinstance(caller, ast.FunctionDef)
    given = Tensor(2, 3)
    assert cut(caller, calls.namespace(caller, {}))(given[:1]) == 7
    (((passed,), words),) = calls.of("kernel")
    assert (passed.shape, passed.root is given, words) == ((1, 3), True, {"n": 1})


def test_a_missing_fake_is_no_failing_postcondition() -> None:
    def holds(pair: Pair) -> None:
        cut(ast.parse("def f(): return unknown").body[0], {})()  # type: ignore[arg-type]

    one = Postcondition(patch="p", name="n", holds=holds, on_pin={})
    with pytest.raises(NameError):
        one.fails(Pair(vllm=PACKAGE, flashinfer=PACKAGE))


def test_every_postcondition_fails_on_a_tree_without_anything() -> None:
    """None holds because what it looks for is gone."""
    empty = View(Files({}))
    for conditions in POSTCONDITIONS.values():
        for one in conditions:
            assert one.fails(Pair(vllm=empty, flashinfer=empty)), one.name
