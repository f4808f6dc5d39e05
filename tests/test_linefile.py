from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from overlay.lines.line import Pin, Settings, read_toml
from overlay.lines.linefile import comments_on, set_pin

PATCHES = Path(__file__).parents[1] / "patches"
TEXT = (PATCHES / "infernal" / "line.toml").read_text()
OLD = read_toml(PATCHES / "infernal" / "line.toml", Settings)
NEW = read_toml(PATCHES / "next" / "line.toml", Settings)


def decoded(text: str) -> Settings:
    return msgspec.toml.decode(text, type=Settings)


def comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#")]


@pytest.mark.parametrize("upstream", ["vllm", "flashinfer"])
def test_there_and_back_is_the_same_text(upstream: str) -> None:
    old, new = getattr(OLD, upstream), getattr(NEW, upstream)
    there = set_pin(TEXT, upstream, new, {"flashinfer-python": "==0.7.2.post1"})  # type: ignore[arg-type]
    settings = decoded(there)
    assert getattr(settings, upstream) == new
    assert comments(there) == comments(TEXT)
    assert settings.requirements["flashinfer-python"].upstream == "==0.7.2.post1"
    back = set_pin(there, upstream, old, {"flashinfer-python": "==0.6.16.post3"})  # type: ignore[arg-type]
    assert back == TEXT


def test_only_what_the_line_replaces_is_taken_over() -> None:
    made = decoded(set_pin(TEXT, "vllm", NEW.vllm, {"torch": "==9", "numpy": "<3"}))
    assert made.requirements == OLD.requirements
    assert made.torch == OLD.torch


def test_keys_come_and_go_in_any_form_of_table() -> None:
    inline = TEXT.replace(
        '[vllm.sdist]\nfile = "vllm-0.28.0.tar.gz"\nsha256 =', "[vllm.sdist]\nsha256 ="
    )
    head, rest = inline.split("[vllm.sdist]\n", 1)
    sha, rest = rest.split("\n", 1)
    value = sha.partition("= ")[2]
    text = f'{head}sdist = {{ file = "vllm-0.28.0.tar.gz", sha256 = {value} }}  # both\n{rest}'
    assert decoded(text) == OLD
    bare = msgspec.structs.replace(
        NEW.vllm, tree=None, tag=None, generated=(),
        wheel=msgspec.structs.replace(NEW.vllm.wheel, commit="abcdef0"),
    )  # fmt: skip
    there = set_pin(text, "vllm", bare, {})
    assert decoded(there).vllm == bare
    again = set_pin(there, "vllm", OLD.vllm, {})
    assert decoded(again).vllm == OLD.vllm
    assert "# both" in again


def test_a_pin_without_release_files_keeps_the_line_readable() -> None:
    pin = Pin(
        version="0.dev0", repository=OLD.flashinfer.repository, commit="a" * 40,
        sdist=OLD.flashinfer.sdist, wheel=OLD.flashinfer.wheel, sources=("git",),
    )  # fmt: skip
    made = decoded(set_pin(TEXT, "flashinfer", pin, {}))
    assert made.flashinfer == pin
    assert made.requirements["flashinfer-python"].line == "==0.dev0"


def test_words_about_the_old_version_are_found() -> None:
    text = (
        "# On 0.28.0.\nsummary = 'vLLM 0.28.0'\nversion = '0.28.0'\n# 0.28.0.post1, 10.28.0\n"
        "x = 1  # not 0.28.0\n"
    )
    assert [at for at, _ in comments_on(text, ("0.28.0",))] == [1, 2, 5]
