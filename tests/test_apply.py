from overlay.apply import apply_series
from overlay.patch import parse_patch


def test_something(upstream, store, import_base):
    base = import_base(store, upstream)  # overlay.store.Commit
    upstream.commit({"a.py": b"print(2)\n"}, "Print two\n")
    patch = parse_patch(upstream.patch(), name="print-two")
    patched = apply_series(store, base, [patch])
    assert patched.tree == upstream.tree()
