"""Every field of every configuration dataclass, by TOML key and by flag; what is refused, and in which words."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import pytest

from treadle.decoders import DecodeOptions
from treadle.launch.config import ConfigError, Leaf, Tree, build, convert, describe, field_docs, leaves, parse_flag, read_toml, set_path
from treadle.launch.demo_data import DatasetPlan
from treadle.launch.flags import configuration
from treadle.launch.inspect import InspectSettings
from treadle.launch.settings import DataSettings, HeldOutSettings, PackSettings, RunSettings, SourceSettings, WorkerSettings
from treadle.launch.toml_text import to_tree, toml_text, value_text
from treadle.launch.train import train_command
from treadle.model.config import (
    Choices,
    Contrastive,
    LateInteraction,
    Masking,
    MeshOptions,
    OptimizerConfig,
    Schedule,
    TrainerConfig,
)
from treadle.pipeline import Schema
from treadle.shape import AudioShape, BatchShape, ImageShape, Negatives, Objective, PairLossForm, VideoShape

AT_RUN_TIME = {"trainer.mesh", "trainer.progress"}
"""Fields that hold live objects: a meeting of processes, a callback."""

LEAVES = leaves(RunSettings)


def minimal() -> Tree:
    return {
        "output": "out",
        "trainer": {
            "depth": 2,
            "hidden": 128,
            "batch": {"max_rows_per_device": 2, "max_segments_per_device": 8, "max_columns_per_row": 64, "max_choices_per_item": 4},
            "schedule": {"steps": 100},
        },
        "data": {"sources": "shards/*.tar"},
        "held_out": {"sources": ["held.tar"]},
    }


# One legal value for every leaf that differs from its default, as TOML holds it.
_SPECIAL: dict[str, object] = {
    "output": "elsewhere",
    "trainer.hidden": 256,
    "trainer.batch.image.channels": 3,
    "trainer.batch.video.channels": 1,
    "trainer.masking.token_mean_span": 4.5,
    "trainer.masking.replace_fraction": 0.5,
    "trainer.masking.random_fraction": 0.05,
    "held_out.sources": ["h.tar"],
    "trainer.contrastive.matryoshka_dimensions": [64, 128],
    "trainer.contrastive.inverse_temperature": 20.0,
    "trainer.contrastive.negatives": "named",
    "trainer.contrastive.pair_loss": "ranked",
    "trainer.late_interaction.pair_loss": "balanced",
    "trainer.late_interaction.width": 64,
    "trainer.objective": "joint",
    "trainer.optimizer.beta1": 0.8,
    "trainer.optimizer.beta2": 0.9,
    "trainer.precision": "bf16",
    "trainer.parallel": "shard",
    "trainer.device": "cpu",
    "trainer.resume": "some.safetensors",
    "trainer.init": "other.safetensors",
    "trainer.schedule.min_learning_rate": 1e-6,
    "data.sources": ["a.tar", "b-{0..3}.tar"],
    "data.packed": "packed",
    "data.on_error": "raise",
    "data.quarantine": "skipped.jsonl",
    "data.max_quarantined": 0.01,
    "data.epochs": 3,
    "data.threads": 2,
    "data.processes": 1,
    "data.decode.strict": False,
    "data.schema.fields": ["txt", "png"],
    "data.schema.sides": {"txt": "query"},
    "data.schema.pairs": [["txt", "png"]],
    "data.schema.temperature_groups": {"png": 1},
    "data.schema.group_field": "group.txt",
    "held_out.kinds": {"txt": "caption"},
    "held_out.best_by": "loss",
    "workers.rendezvous": "host:29500",
    "mesh.directory": "meet",
    "mesh.job": "a",
}
SPECIAL = _SPECIAL | {
    name.replace("data.", "held_out.", 1): value for name, value in _SPECIAL.items() if name.startswith(("data.schema", "data.decode"))
}

# Fields that another field must allow.
BESIDE: dict[str, Tree] = {
    "data.packed": {"data": {"packed": "packed"}},
    "workers.node_rank": {"workers": {"nodes": 8, "rendezvous": "host:29500"}},
    "workers.nodes": {"workers": {"rendezvous": "host:29500"}},
    "mesh.host_domain_index": {"mesh": {"host_domain_count": 8, "directory": "meet"}},
    "mesh.host_domain_count": {"mesh": {"directory": "meet"}},
}


def another(leaf: Leaf) -> object:
    """A legal value, as TOML holds it, that is not the leaf's default."""
    shown = leaf.name
    if shown in SPECIAL:
        return SPECIAL[shown]
    default = leaf.default if leaf.default is not dataclasses.MISSING else 0
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 7
    if isinstance(default, float):
        return (default or 0.25) * 1.5
    return ["text"] if isinstance(default, tuple) else "text"


def picked(config: object, path: tuple[str, ...]) -> object:
    for name in path:
        config = getattr(config, name)
    return config


def plain(value: object) -> object:
    """A value as its TOML would be read again."""
    return tomllib.loads(toml_text({"value": to_tree_value(value)}))["value"]


def to_tree_value(value: object) -> object:
    @dataclass(frozen=True)
    class Holder:
        value: object

    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [to_tree_value(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_tree_value(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_tree(value)
    return value


def merged(tree: Tree, over: Mapping[str, Any]) -> Tree:
    out = dict(tree)
    for key, value in over.items():
        out[key] = merged(out.get(key, {}), value) if isinstance(value, Mapping) else value  # type: ignore[arg-type]
    return out


def expected_of(leaf: Leaf, value: object) -> object:
    if leaf.name.endswith("sources"):
        return [{"urls": list(value), "weight": 1.0, "repeat": False}]  # type: ignore[call-overload]
    return value


def starting_point(leaf: Leaf) -> Tree:
    tree = merged(minimal(), BESIDE.get(leaf.name, {}))
    if leaf.name == "data.packed":
        tree["data"] = {}
    return tree


def all_fields(owner: type, path: tuple[str, ...] = ()) -> list[str]:
    """Dotted names of every field, found without the code under test."""
    nested = {
        "trainer": TrainerConfig,
        "batch": BatchShape,
        "image": ImageShape,
        "video": VideoShape,
        "audio": AudioShape,
        "schedule": Schedule,
        "masking": Masking,
        "contrastive": Contrastive,
        "late_interaction": LateInteraction,
        "choices": Choices,
        "optimizer": OptimizerConfig,
        "data": DataSettings,
        "held_out": HeldOutSettings,
        "workers": WorkerSettings,
        "mesh": MeshOptions,
        "schema": Schema,
        "decode": DecodeOptions,
    }
    names: list[str] = []
    for entry in dataclasses.fields(owner):
        here = (*path, entry.name)
        if entry.name in nested and ".".join(here) not in AT_RUN_TIME:
            names += all_fields(nested[entry.name], here)
        elif ".".join(here) not in AT_RUN_TIME:
            names.append(".".join(here))
    return names


def test_every_field_is_a_leaf() -> None:
    assert sorted(leaf.name for leaf in LEAVES) == sorted(all_fields(RunSettings))


def test_every_field_says_what_it_means() -> None:
    silent = [leaf.name for leaf in LEAVES if not leaf.doc]
    known_silent = {"beta1", "beta2", "eps", "steps", "objective"}  # their names say it, or their class does
    assert {name.rpartition(".")[2] for name in silent} <= known_silent, silent


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.name)
def test_a_toml_key_sets_its_field(leaf: Leaf, tmp_path: Path) -> None:
    value = another(leaf)
    tree = starting_point(leaf)
    set_path(tree, leaf.path, value)
    file = tmp_path / "run.toml"
    file.write_text(toml_text(tree), encoding="utf-8")
    config = configuration(RunSettings, file, [])
    assert plain(picked(config, leaf.path)) == expected_of(leaf, value)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.name)
def test_a_flag_sets_its_field(leaf: Leaf, tmp_path: Path) -> None:
    value = another(leaf)
    file = tmp_path / "run.toml"
    file.write_text(toml_text(starting_point(leaf)), encoding="utf-8")
    text = value if isinstance(value, str) else value_text(value)
    config = configuration(RunSettings, file, [(leaf, parse_flag(leaf, text))])
    assert plain(picked(config, leaf.path)) == expected_of(leaf, value)


def test_the_train_command_has_a_flag_for_every_field() -> None:
    flags = {name for parameter in train_command.params if isinstance(parameter, click.Option) for name in parameter.opts}
    assert {f"--{leaf.name}" for leaf in LEAVES} <= flags


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.name)
def test_a_wrong_type_is_one_clear_line(leaf: Leaf) -> None:
    for wrong in ({"no": {"such": 1}}, [[["deep"]]], 1.5, True, 17):
        tree = starting_point(leaf)
        set_path(tree, leaf.path, wrong)
        try:
            build(RunSettings, tree)
        except ConfigError as error:
            message = str(error)
            assert leaf.path[-1] in message, message
            assert "\n" not in message and len(message) < 600, message
            return
        # Some field takes some of these; no field takes all of them.
    pytest.fail(f"{leaf.name} takes anything")


def is_number(leaf: Leaf) -> bool:
    members = get_args(leaf.hint) if get_origin(leaf.hint) not in (tuple,) and get_args(leaf.hint) else (leaf.hint,)
    return int in members or float in members


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if is_number(leaf)], ids=lambda leaf: leaf.name)
def test_a_number_out_of_range_is_refused(leaf: Leaf) -> None:
    if leaf.path[-1] == "bias":
        wrong: object = float("nan")  # any finite bias will do
    else:
        wrong = -1 if isinstance(leaf.default, int) or leaf.default in (None, dataclasses.MISSING) else -1.0
    tree = starting_point(leaf)
    set_path(tree, leaf.path, wrong)
    with pytest.raises(ConfigError) as caught:
        build(RunSettings, tree)
    assert leaf.path[-1] in str(caught.value)


def test_round_trip_of_every_setting() -> None:
    tree = minimal()
    for leaf in LEAVES:
        if leaf.name not in ("trainer.init", "data.packed", "trainer.choices.weight"):
            set_path(tree, leaf.path, another(leaf))
    tree = merged(tree, {"workers": {"nodes": 9, "node_rank": 8}, "mesh": {"host_domain_count": 9, "host_domain_index": 7}})
    tree["trainer"]["batch"] |= {"image": {"patch_side": 16, "channels": 3}}  # type: ignore[index]
    config = build(RunSettings, tree)
    again = build(RunSettings, tomllib.loads(toml_text(to_tree(config))))
    assert again == config
    assert toml_text(to_tree(again)) == toml_text(to_tree(config))


def test_the_resolved_configuration_stays_itself() -> None:
    config = build(RunSettings, minimal() | {"trainer": minimal()["trainer"] | {"objective": "joint"}}).resolved()  # type: ignore[operator]
    assert config.trainer.contrastive.matryoshka_dimensions == (128,)
    assert config.trainer.schedule.warmup_steps == 10
    assert build(RunSettings, tomllib.loads(toml_text(to_tree(config)))).resolved() == config


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"trainer": {"contrastve": {}}}, "trainer.contrastve is not a key of trainer: did you mean 'contrastive'?"),
        ({"trainer": {"contrastive": {"bais": 1.0}}}, "trainer.contrastive.bais is not a key of trainer.contrastive: did you mean 'bias'?"),
        ({"ouput": "x"}, "ouput is not a key of the configuration: did you mean 'output'?"),
        ({"data": {"schema": {"feilds": []}}}, "data.schema.feilds is not a key of data.schema: did you mean 'fields'?"),
        ({"data": {"sources": [{"url": "a"}]}}, r"data.sources\[0\].url is not a key of data.sources\[0\]: did you mean 'urls'?"),
        ({"trainer": {"optimizer": {"zzzzzz": 1}}}, "known are beta1, beta2, eps, max_gradient_norm, weight_decay"),
    ],
)
def test_an_unknown_key_names_the_nearest(tree: Tree, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(RunSettings, merged(minimal(), tree))


def test_a_message_says_the_line_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('output = "out"\n\n[trainer.contrastive]\n# comment\npair_loss = "rnaked"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml:5: trainer\.contrastive\.pair_loss is 'rnaked': it must be one of derived, balanced"):
        configuration(RunSettings, file, [])
    with pytest.raises(ConfigError) as caught:
        leaf = next(leaf for leaf in LEAVES if leaf.name == "trainer.contrastive.pair_loss")
        configuration(RunSettings, file, [(leaf, "worse")])
    assert "run.toml" not in str(caught.value)


def test_missing_fields_say_how_to_give_them() -> None:
    with pytest.raises(ConfigError, match=r"output is missing: give a path \(Folder of the run.*in the file or as --output VALUE"):
        build(RunSettings, {})
    tree = minimal()
    del tree["trainer"]["batch"]["max_rows_per_device"]  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"trainer\.batch\.max_rows_per_device is missing: give an integer \(Rows of a batch\)"):
        build(RunSettings, tree)


def test_a_range_is_refused_with_its_table() -> None:
    with pytest.raises(ConfigError, match=r"trainer: TrainerConfig.hidden is 100: it must lie between 128"):
        build(RunSettings, merged(minimal(), {"trainer": {"hidden": 100}}))
    with pytest.raises(ConfigError, match=r"data: DataSettings.window is 1025: it must lie between 1 and 1024"):
        build(RunSettings, merged(minimal(), {"data": {"window": 1025}}))


def test_a_path_that_no_file_system_takes_is_refused() -> None:
    for path in ("", "a\0b"):
        with pytest.raises(ConfigError, match=r"output is .*: it must be a path"):
            build(RunSettings, minimal() | {"output": path})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = ", "not valid TOML"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_toml(file)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot read the configuration: No such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)


class TestSources:
    def one(self, value: object) -> tuple[SourceSettings, ...]:
        return build(DataSettings, {"sources": value}).sources

    def test_text_is_one_source(self) -> None:
        assert self.one("a-{0..9}.tar") == (SourceSettings(urls=("a-{0..9}.tar",)),)

    def test_a_list_of_texts_is_one_source(self) -> None:
        assert self.one(["a.tar", "b.tar"]) == (SourceSettings(urls=("a.tar", "b.tar")),)

    def test_tables_blend(self) -> None:
        found = self.one([{"urls": "a.tar", "weight": 2}, {"urls": ["b.tar", "c.tar"], "repeat": True}])
        assert found == (SourceSettings(urls=("a.tar",), weight=2.0), SourceSettings(urls=("b.tar", "c.tar"), repeat=True))

    def test_flags_keep_the_commas_of_braces(self) -> None:
        leaf = next(leaf for leaf in LEAVES if leaf.name == "data.sources")
        assert parse_flag(leaf, "s-{a,b}.tar") == ["s-{a,b}.tar"]
        assert parse_flag(leaf, '[{urls = "a", weight = 0.5}]') == [{"urls": "a", "weight": 0.5}]

    def test_none_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"data\.sources is empty"):
            build(RunSettings, merged(minimal(), {"data": {"sources": []}}))

    def test_both_kinds_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="sources and packed are both set"):
            build(DataSettings, {"sources": "a", "packed": "b"})


class TestFlags:
    def leaf(self, name: str) -> Leaf:
        return next(leaf for leaf in LEAVES if leaf.name == name)

    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("trainer.contrastive.matryoshka_dimensions", "64,128", [64, 128]),
            ("trainer.contrastive.matryoshka_dimensions", "[64, 128]", [64, 128]),
            ("data.schema.pairs", "txt,png", [["txt", "png"]]),
            ("data.schema.sides", '{png = "document"}', {"png": "document"}),
            ("data.epochs", "none", None),
            ("data.epochs", "3", 3),
            ("data.decode.strict", "false", False),
            ("trainer.optimizer.eps", "1e-6", 1e-6),
            ("trainer.seed", "18446744073709551615", 2**64 - 1),
            ("trainer.depth", "two", "two"),
        ],
    )
    def test_parsing(self, name: str, text: str, value: object) -> None:
        assert parse_flag(self.leaf(name), text) == value

    def test_bad_toml_in_a_flag(self) -> None:
        with pytest.raises(ConfigError, match=r"--trainer\.contrastive\.matryoshka_dimensions.*not valid TOML"):
            parse_flag(self.leaf("trainer.contrastive.matryoshka_dimensions"), "[64,")

    def test_a_flag_that_is_no_number(self) -> None:
        leaf = self.leaf("trainer.depth")
        with pytest.raises(ConfigError, match=r"trainer\.depth is 'two': it must be an integer"):
            build(RunSettings, merged(minimal(), {"trainer": {"depth": parse_flag(leaf, "two")}}))


class TestConversion:
    def test_enumerations_go_by_name(self) -> None:
        assert convert(Objective, "joint", "x") is Objective.JOINT
        assert convert(PairLossForm, "SIGMOID", "x") is PairLossForm.SIGMOID
        assert convert(Negatives, Negatives.NAMED, "x") is Negatives.NAMED
        with pytest.raises(ConfigError, match="x is 2: it must be one of ambient, named"):
            convert(Negatives, 2, "x")

    def test_integers_are_integers(self) -> None:
        with pytest.raises(ConfigError, match=r"x is 1\.0: it must be an integer"):
            convert(int, 1.0, "x")
        with pytest.raises(ConfigError, match="x is True: it must be an integer"):
            convert(int, True, "x")

    def test_numbers_take_integers(self) -> None:
        value = convert(float, 3, "x")
        assert value == 3.0 and isinstance(value, float)

    def test_literals(self) -> None:
        assert convert(Literal["fp32", "bf16"] | None, None, "x") is None
        with pytest.raises(ConfigError, match="one of fp32, bf16 or none"):
            convert(Literal["fp32", "bf16"] | None, "fp16", "x")

    def test_descriptions(self) -> None:
        assert describe(tuple[int, ...]) == "a list, each an integer"
        assert describe(dict[str, float]) == "a table, each value a number"
        assert describe(Path | None) == "a path or none"


@pytest.mark.parametrize("owner", [PackSettings, InspectSettings, DatasetPlan, HeldOutSettings])
def test_other_commands_reach_all_their_fields(owner: type) -> None:
    names = {leaf.path[0] for leaf in leaves(owner)}
    assert names == {entry.name for entry in dataclasses.fields(owner)}
    assert all(leaf.doc for leaf in leaves(owner) if len(leaf.path) == 1)


def test_field_docs_join_their_lines() -> None:
    assert field_docs(SourceSettings)["weight"] == "Share of the blend, against the other sources'."


def test_a_default_factory_keeps_its_values() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Inner:
        number: int = 1

    @dataclass(frozen=True, kw_only=True)
    class Outer:
        names: dict[str, int] = field(default_factory=dict)

    assert build(Inner, {}) == Inner()
    assert build(Outer, {"names": {"a": 1}}).names == {"a": 1}


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("depth = 1\n", encoding="utf-8-sig")
    assert read_toml(file) == {"depth": 1}
