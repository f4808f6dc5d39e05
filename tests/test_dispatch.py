"""The readers of C++ and Python: what they make of code, and what they refuse to guess."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from overlay.kernels.cxx import NotUnderstoodError, read_unit
from overlay.kernels.cxxexpressions import RefusedError
from overlay.kernels.cxxvalues import POINTER, Object
from overlay.kernels.dispatch import Dispatch
from overlay.kernels.pypolicy import Policy
from overlay.trees.match import Entry

if TYPE_CHECKING:
    from collections.abc import Mapping


class Files:
    """A tree of texts."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = {path.encode(): text.encode() for path, text in files.items()}

    def get(self, path: bytes) -> Entry | None:
        data = self.files.get(path)
        return None if data is None else Entry(mode=0o100644, data=data)

    def is_folder(self, path: bytes, *, without: object = ()) -> bool:
        return any(name.startswith(path + b"/") for name in self.files)


def dispatch(text: str, **headers: str) -> Dispatch:
    files = {f"include/{name}.h": header for name, header in headers.items()}
    return Dispatch(read_unit(Files({"csrc/a.cu": text, **files}), "csrc/a.cu"))


def value(body: str, before: str = "", **given: Any) -> Any:
    names = ", ".join(f"int {name}" for name in given)
    return dispatch(f"{before}\nint f({names}) {{ {body} }}").run("f", given).value


@pytest.mark.parametrize(
    ("body", "given", "expected"),
    [
        ("return a / b;", {"a": -7, "b": 2}, -3),
        ("return a % b;", {"a": -7, "b": 2}, -1),
        ("return (a + 63) / 64 * 64;", {"a": 65}, 128),
        ("return a ? 1 : 2;", {"a": 0}, 2),
        ("if (a > 1 && b) return 1; else if (!b) return 2; return 3;", {"a": 2, "b": 0}, 2),
        ("int n = 0; for (int i = 0; i < a; ++i) { if (i == 2) continue; n += i; } return n;",
         {"a": 5}, 8),
        ("int n = 0; while (true) { n++; if (n == a) break; } return n;", {"a": 4}, 4),
        ("do { switch (a) { case 1: return 10; default: return 20; } } while (0); return 30;",
         {"a": 1}, 10),
        ("switch (a) { case 1: case 2: return 12; case 3: a = 5; break; } return a;", {"a": 2}, 12),
        ("switch (a) { case 1: case 2: return 12; case 3: a = 5; break; } return a;", {"a": 3}, 5),
        ("switch (a) { default: return 1; case 4: return 4; }", {"a": 4}, 4),
        ("int n = 1; { int n = 2; n = 3; } return n;", {"a": 0}, 1),
        ("auto g = [&](auto h) { return h + a; }; return g(3);", {"a": 2}, 5),
        ("return a == (A) && b == (2);", {"a": 1, "b": 2}, True),
        ("return static_cast<int>(1.9f) + int(a);", {"a": 1}, 2),
    ],
)  # fmt: skip
def test_statements_mean_what_they_mean(body: str, given: dict[str, int], expected: Any) -> None:
    assert value(body, "constexpr int A = 1;", **given) == expected


def test_macros_templates_structs_and_enumerations() -> None:
    code = dispatch(
        """
        #include <sizes.h>
        enum class Model { A, B = 4, C };
        template <Model M> struct Traits { static constexpr int SIZE = 2 * BASE; };
        template <> struct Traits<Model::B> : Scale<3> {
          using Own = Scale<5>;
          static constexpr int SIZE = Own::times(BASE) + FACTOR;
        };
        template <Model M, typename F> int visit(int heads, F&& call) {
        #define HEAD(H) if (heads == H) return call(std::integral_constant<int, H>{});
          HEAD(8)
          if constexpr (M == Model::B) { HEAD(16) }
        #undef HEAD
          return 0;
        }
        int f(Model m, int heads) {
          if (m == Model::B) {
            return visit<Model::B>(heads, [](auto h) { return Traits<Model::B>::SIZE + int(h); });
          }
          return visit<Model::A>(heads, [](auto h) { return Traits<Model::A>::SIZE; });
        }
        """,
        sizes="""
        #pragma once
        constexpr int BASE = 10;
        template <int F> struct Scale {
          static constexpr int FACTOR = F;
          static constexpr int times(int n) { return n * FACTOR; }
        };
        """,
    )
    assert code.run("f", {"m": 4, "heads": 16}).value == 50 + 3 + 16
    assert code.run("f", {"m": 0, "heads": 8}).value == 20
    assert code.run("f", {"m": 0, "heads": 16}).value == 0
    assert code.unit.enums["Model"] == {"A": 0, "B": 4, "C": 5}


def test_a_launch_is_noted_and_not_entered() -> None:
    outcome = dispatch(
        """
        template <int HEADS, int TOPK = 7> void launch(int x) { kernel<HEADS><<<1, 2>>>(x); }
        #define TAKE(H) case H: launch<H>(topk); return true
        bool f(int heads, int topk) {
          if (topk != 512)
            return false;
          switch (heads) { TAKE(8); TAKE(16); default: return false; }
        }
        """
    )
    done = outcome.run("f", {"heads": 16, "topk": 512})
    assert [(one.name, one.arguments) for one in done.launches] == [
        ("launch", {"HEADS": 16, "TOPK": 7})
    ]
    refused = outcome.run("f", {"heads": 16, "topk": 64})
    assert (refused.value, refused.because, refused.where) == (False, "topk != 512", "csrc/a.cu:6")
    assert outcome.run("f", {"heads": 9, "topk": 512}).because == "heads is 9"


def test_checks_refuse_with_their_words_and_can_be_caught() -> None:
    code = dispatch(
        """
        int g(int a) { TVM_FFI_ICHECK_LE(a, 3) << "too " << "many: " << a; return a; }
        int f(int a) { try { return g(a); } catch (const Error& e) { } return -1; }
        """
    )
    assert code.run("g", {"a": 3}).value == 3
    assert code.run("f", {"a": 4}).value == -1
    with pytest.raises(RefusedError, match=r"^too many: TVM_FFI_ICHECK_LE\(a, 3\)") as caught:
        code.run("g", {"a": 4})
    assert caught.value.where == "csrc/a.cu:2"


def test_only_checks_about_what_is_given_are_made() -> None:
    code = dispatch(
        """
        void entry(Tensor q, int heads) {
          TVM_FFI_ICHECK_EQ(q.ndim(), 3) << "of the caller's making";
          TVM_FFI_ICHECK(heads <= 128) << "heads";
          if (q.size(0)) { TVM_FFI_ICHECK(heads != 7); }
        }
        """
    )
    code.check("entry", {"heads": 8})
    with pytest.raises(RefusedError, match="heads"):
        code.check("entry", {"heads": 129})
    with pytest.raises(NotUnderstoodError, match="may refuse"):
        code.check("entry", {"heads": 7})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("if (unknown_limit > a) return 1; return 0;", "depends on 'unknown_limit'"),
        ("if (probe(a)) return 1; return 0;", "calls 'probe'"),
        ("probe(a); return 1;", "calls 'probe'"),
        ("goto end; end: return 1;", "can't read"),
        ("static int n = 0; return n;", "can't read"),
        ("int n[2] = {1, 2}; return n[a];", "can't read"),
        ("return a / 0;", "zero"),
        ("while (true) { } return 1;", "too many steps"),
        ("return f(a);", "nested too deeply"),
        ("unknown = 3; return 1;", "sets 'unknown'"),
        ("if (a) { return 1;", "can't read|no such|0 functions"),
        ("return T<int>::of(a);", "calls 'of'"),
    ],
)
def test_what_is_not_known_is_never_guessed(body: str, why: str) -> None:
    with pytest.raises(NotUnderstoodError, match=why):
        value(body, a=1)


def test_what_no_shape_reaches_may_be_anything() -> None:
    assert value('if (a == 1) return 5; goto out; out: asm("nop"); return probe();', a=1) == 5
    assert value("return a == 1 || unknown;", a=1) is True
    assert value("return unknown && a == 2;", a=1) is False


def test_a_partial_specialisation_is_not_taken_for_the_general_one() -> None:
    before = """
    template <int A, bool B> struct T { static constexpr int N = 1; };
    template <bool B> struct T<8, B> { static constexpr int N = 2; };
    """
    assert value("if (T<9, true>::N == 1) return 1; return 0;", before, a=1) == 1
    with pytest.raises(NotUnderstoodError):
        value("if (T<8, true>::N == 1) return 1; return 0;", before, a=1)


def test_structs_copy_and_references_do_not() -> None:
    code = dispatch(
        """
        struct P { int n; int m = 4; };
        struct R { bool ok; R(bool ok) : ok(ok) {} };
        void by_value(P p) { p.n = 9; }
        void by_reference(P& p) { p.n = 9; }
        R result(int a) { return a > 2; }
        int f(int a) {
          P p{a}; P q = p; q.n = 7;
          by_value(p);
          if (a == 1) by_reference(p);
          return p.n * 100 + q.n * 10 + p.m + (result(a).ok ? 1000 : 0);
        }
        """
    )
    assert code.run("f", {"a": 1}).value == 974
    assert code.run("f", {"a": 3}).value == 1374


def test_headers_come_from_the_tree_alone() -> None:
    code = dispatch('#include "../../../../etc/hostname"\n#include <cuda.h>\nint f() { return 1; }')
    assert code.run("f", {}).value == 1
    with pytest.raises(NotUnderstoodError, match="can't be preprocessed"):
        dispatch("#if 1\nint f() { return 1; }")


def test_arguments_are_given_by_name() -> None:
    code = dispatch("bool f(Params p, const float* x) { return p.n == 2 && x != nullptr; }")
    assert code.run("f", {"p": Object("Params", {"n": 2}), "x": POINTER}).value is True
    assert code.run("f", {"p": Object("Params", {"n": 2}), "x": None}).value is False


POLICY = """
import torch
_HEADS = frozenset({8, 16})
_LIMIT: int = 64
class Kind(enum.IntEnum):
    A = 0
    B = 3
class Envelope:
    def __init__(self, least): self.least = least
    def __contains__(self, pair):
        if not isinstance(pair, tuple):
            return False
        h, k = pair
        return 1 <= h <= 128 and k >= self.least
_TABLE = Envelope(100)
def ok(heads, topk, rows):
    "Words."
    return rows <= _LIMIT and (heads, topk) in _TABLE
def first(heads):
    order: tuple = (Kind.B, *(1, 2))
    return next((one for one in order if one in native(heads)), None)
def strange(heads):
    return torch.cuda.device_count() + heads
def loops(heads):
    return loops(heads)
"""


def test_python_is_evaluated_and_not_run() -> None:
    policy = Policy("p.py", POLICY, {"native": lambda heads: frozenset({2} if heads else ())})
    assert policy.constant("_LIMIT") == 64
    assert policy.constant("_HEADS") == frozenset({8, 16})
    assert policy.call("ok", {"heads": 8, "topk": 128, "rows": 64, "more": 1}) is True
    assert policy.call("ok", {"heads": 8, "topk": 99, "rows": 64}) is False
    assert policy.call("ok", {"heads": 8, "topk": 128, "rows": 65}) is False
    assert policy.call("first", {"heads": 1}) == 2
    assert policy.call("first", {"heads": 0}) is None
    for name in ("strange", "loops", "absent"):
        with pytest.raises(NotUnderstoodError):
            policy.call(name, {"heads": 1})
    with pytest.raises(NotUnderstoodError, match="wants"):
        policy.call("ok", {"heads": 8})
    with pytest.raises(NotUnderstoodError, match="no Python"):
        Policy("p.py", "def (")
