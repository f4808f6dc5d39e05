"""Recipes: what a file may say, what is refused, and values from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.errors import RecipeError
from overlay.kernels.recipe import _TABLES, Recipe, find_recipes, override, read_recipe

if TYPE_CHECKING:
    from overlay.lines.line import Strict

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "images" / "recipes"
NAMES = find_recipes(FOLDER)
PLAIN = """
format = 1
summary = "One"
[model]
name = "M"
family = "glm"
heads = 64
index_topk = 2048
[attention]
backend = "FLASHINFER_MLA_SPARSE_SM120"
calls = ["sparse"]
[parallel]
tp = 8
[limits]
max_num_seqs = 4
max_num_batched_tokens = 4096
max_model_len = 8192
"""


def write(folder: Path, text: str = PLAIN) -> Path:
    (folder / "one.toml").write_text(text)
    return folder


def test_there_is_a_recipe_for_each_way_of_serving() -> None:
    assert len(NAMES) >= 11
    for name in NAMES:
        recipe = read_recipe(FOLDER, name)
        assert recipe.summary
        assert recipe.serve.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"


# Heads that a call has, ids of the target, most rows of a decode step: the community's table
@pytest.mark.parametrize(
    ("name", "heads", "topk", "rows"),
    [
        ("glm-tp8", 8, 2048, 32),
        ("glm-tp8-dcp2", 16, 2048, 32),
        ("glm-tp8-dcp4", 32, 2048, 32),
        ("glm-tp8-dcp8", 64, 2048, 32),
        ("glm-tp4-dcp4-mtp3", 64, 2048, 64),
        ("dsv4-dspark-tp8", 8, 512, 96),
        ("dsv4-dspark-mtp0-tp8", 8, 512, 16),
        ("dsv4-dspark-tp4", 16, 512, 384),
        ("dsv4-dspark-tp4-draft", 16, 512, 96),
    ],
)
def test_recipes_are_the_communitys(name: str, heads: int, topk: int, rows: int) -> None:
    recipe = read_recipe(FOLDER, name)
    assert recipe.heads == heads
    assert recipe.model.index_topk == topk
    assert recipe.limits.max_num_seqs * recipe.rows_a_request == rows


@pytest.mark.parametrize(
    ("old", "new", "says", "fix"),
    [
        ("tp = 8", "tpp = 8", "parallel", "did you mean 'tp'?"),
        ("heads = 64", 'heads = "64"', "model.heads: expected `int`", ""),
        ("heads = 64", "heads = 0", "model.heads", ""),
        ('family = "glm"', 'family = "gml"', "model.family", ""),
        ('calls = ["sparse"]', "calls = []", "attention.calls", ""),
        ("[limits]", "[limit]", "limit", "did you mean 'limits'?"),
        ("tp = 8", "tp = 5", "can't be shared by 'parallel.tp' 5", ""),
        ("format = 1", "format = 2", "format", ""),
        ("max_num_seqs = 4\n", "", "missing required field `max_num_seqs`", ""),
        ("[limits]", "[drafts]\ntokens = 3\n[limits]", "exactly where 'drafts.tokens' is 0", ""),
        ('calls = ["sparse"]', 'calls = ["c4"]', "need 'model.sliding_window'", ""),
        ("tp = 8", "tp = = 8", "is no TOML", ""),
    ],
)
def test_a_wrong_file_is_named_with_its_key(
    tmp_path: Path, old: str, new: str, says: str, fix: str
) -> None:
    assert old in PLAIN
    with pytest.raises(RecipeError) as caught:
        read_recipe(write(tmp_path, PLAIN.replace(old, new)), "one")
    assert "one.toml" in caught.value.what
    assert says in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.exit_code == 21


@pytest.mark.parametrize("name", ["two", "../one", "", "One", "one.toml"])
def test_an_unknown_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="there is no recipe"):
        read_recipe(write(tmp_path), name)


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(FOLDER, "glm-tp8-dcp3")
    assert "glm-tp8-dcp" in caught.value.fix


def test_values_from_the_command_line(tmp_path: Path) -> None:
    folder = write(tmp_path)
    settings = ["tp=4", "parallel.dcp=2", "kv_cache_dtype=bfloat16", "sizes=[8, 16]"]
    settings += ["method=mtp", "tokens=3", "serve.environment.A_B=1", "summary=Two words"]
    recipe = read_recipe(folder, "one", settings)
    assert (recipe.parallel.tp, recipe.parallel.dcp, recipe.heads) == (4, 2, 32)
    assert recipe.attention.kv_cache_dtype == "bfloat16"
    assert recipe.graphs.sizes == (8, 16)
    assert (recipe.drafts.method, recipe.rows_a_request) == ("mtp", 4)
    assert recipe.serve.environment == {"A_B": "1"}
    assert recipe.summary == "Two words"
    assert read_recipe(folder, "one", ["index_topk="]).model.index_topk is None


@pytest.mark.parametrize(
    ("settings", "says", "fix"),
    [
        (["tp"], "no '='", "KEY=VALUE"),
        (["tpp=4"], "no such key", "did you mean 'tp'?"),
        (["limits.tp=4"], "no such key", ""),
        (["tp=5"], "can't be shared", ""),
        (["tp=four"], "parallel.tp: expected `int`", ""),
        (["tp="], "missing required field `tp`", ""),
        (["tokens=3"], "exactly where", ""),
        (["gpu_memory_utilization=1.5"], "limits.gpu_memory_utilization", ""),
        (["weights_gib=inf"], "model.weights_gib", ""),
        (["weights_gib=nan"], "model.weights_gib", ""),
        (["tp=99999999999999999999"], "parallel.tp", ""),
        (["max_size=16777216"], "graphs.max_size", ""),
        (["environment=x"], "serve.environment", ""),
        (["=4"], "no such key", ""),
    ],
)
def test_a_wrong_value_from_the_command_line(
    tmp_path: Path, settings: list[str], says: str, fix: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(write(tmp_path), "one", settings)
    assert says in caught.value.what
    assert fix in caught.value.fix


@given(st.sampled_from(NAMES), st.data())
def test_setting_what_is_there_changes_nothing(name: str, data: st.DataObject) -> None:
    recipe = read_recipe(FOLDER, name)
    table = data.draw(st.sampled_from(sorted(set(_TABLES) - {"serve"})))
    raw = msgspec.to_builtins(getattr(recipe, table))
    key = data.draw(st.sampled_from(sorted(key for key, value in raw.items() if value is not None)))
    value = msgspec.toml.encode({"v": raw[key]}).decode().partition("=")[2].strip()
    assert override(recipe, [f"{table}.{key}={value}"]) == recipe


def test_the_page_names_every_key() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    kinds: list[type[Strict]] = [Recipe, *_TABLES.values()]
    for kind in kinds:
        for field in msgspec.structs.fields(kind):
            assert f"`{field.name}`" in page or f"[{field.name}]" in page, field.name
    for name in NAMES:
        assert f"`{name}`" in page
