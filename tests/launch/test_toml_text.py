"""Configurations as TOML text: values survive, tables nest, the template names every field."""

import tomllib

import pytest

from treadle.launch.config import Tree, build, leaves
from treadle.launch.settings import DataSettings, RunSettings
from treadle.launch.toml_text import template, toml_text, value_text


@pytest.mark.parametrize(
    "value",
    [
        0,
        -3,
        2**64 - 1,
        0.1,
        1e-8,
        1e300,
        float("inf"),
        True,
        "",
        'quote " and \\',
        "line\nbreak\ttab",
        "Ελλάδα 日本 🙂",
        "\x7f\x00",
        [1, 2],
        [],
        {"a b": 1},
    ],
)
def test_values_survive(value: object) -> None:
    assert tomllib.loads(f"value = {value_text(value)}")["value"] == value


def test_nested_tables_and_lists_of_tables() -> None:
    tree: Tree = {"a": 1, "b": {"c": {"d": [1.5]}, "e": {}}, "f": [{"g": 1, "h": {"i": 2}}, {"g": 3, "h": {"i": 4}}], "k y": {"l": "m"}}
    assert tomllib.loads(toml_text(tree)) == tree


def test_the_template_is_toml_and_names_every_field() -> None:
    text = template(RunSettings)
    tomllib.loads(text)
    for leaf in leaves(RunSettings):
        assert f"# {leaf.path[-1]} =" in text


def test_every_default_of_the_template_is_accepted() -> None:
    lines = [
        line[2:] if line.startswith("# ") and " = " in line and not line.endswith("=") else line
        for line in template(DataSettings).splitlines()
    ]
    kept = [line for line in lines if line.startswith("[") or (" = " in line and not line.startswith("#"))]
    assert build(DataSettings, tomllib.loads("\n".join(kept))) == DataSettings()
