"""Reading, refusing and writing configurations."""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps.config import RunConfig
from steps.config_loader import config_from_json, config_hash, config_json, config_schema, config_toml, load_config
from steps.errors import ConfigError


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(text, overrides)
    return str(caught.value)


def test_empty_text_is_the_default_run() -> None:
    assert load_config("") == RunConfig()


def test_text_and_file_give_the_same_configuration(tmp_path: Path) -> None:
    text = 'seed = 7\n[train.optimizer]\nlearning_rate = 1\nbetas = [0.8, 0.9]\n[task]\nkind = "sort_digits"\n'
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    cfg = load_config(str(path))
    assert cfg == load_config(text)
    assert (cfg.seed, cfg.train.optimizer.learning_rate, cfg.train.optimizer.betas) == (7, 1.0, (0.8, 0.9))


def test_one_line_of_text_needs_no_line_break() -> None:
    assert load_config("seed = 3").seed == 3


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "seed=4.toml"
    path.write_text("seed = 4")
    assert load_config(str(path)).seed == 4


def test_relative_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[task]\nkind = "jsonl"\ntrain_path = "rows/a.jsonl"\n[warmup]\nstart = "../checkpoint"\n')
    cfg = load_config(str(path))
    assert cfg.task.train_path == str(tmp_path / "rows" / "a.jsonl")
    assert cfg.task.heldout_path == ""
    assert cfg.warmup.start == str(tmp_path.parent / "checkpoint")


def test_relative_paths_of_overrides_start_at_the_working_directory(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[task]\nkind = "jsonl"\n')
    assert load_config(str(path), ["task.train_path=a.jsonl"]).task.train_path == str(Path.cwd() / "a.jsonl")


@pytest.mark.parametrize("start", ["random", "s3://bucket/checkpoint", "/abs/checkpoint"])
def test_names_and_uris_are_no_relative_paths(tmp_path: Path, start: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[warmup]\nstart = "{start}"\n')
    assert load_config(str(path)).warmup.start == start


def test_paths_in_text_stay_as_they_are() -> None:
    assert load_config('[task]\nkind = "jsonl"\ntrain_path = "a.jsonl"\n').task.train_path == "a.jsonl"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=5", "seed", 5),
        ("task.kind=sort_digits", "task.kind", "sort_digits"),
        ('task.kind="sort_digits"', "task.kind", "sort_digits"),
        ("description=12", "description", "12"),
        ("description=true", "description", "true"),
        ("description=a = b", "description", "a = b"),
        ("description=", "description", ""),
        ("reward.shuffle=true", "reward.shuffle", True),
        ("reward.timeout_s=3", "reward.timeout_s", 3.0),
        ("train.optimizer.betas=[0.5, 0.6]", "train.optimizer.betas", (0.5, 0.6)),
        ("train.loss.dual_clip=none", "train.loss.dual_clip", None),
        ("train.loss.correction=none", "train.loss.correction", "none"),
        (" train.loss.clip_low = 0.1 ", "train.loss.clip_low", 0.1),
    ],
)
def test_override_sets_one_field(override: str, path: str, value: object) -> None:
    found: object = load_config("", [override])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_later_overrides_win_and_beat_the_file() -> None:
    assert load_config("seed = 1", ["seed=2", "seed=3"]).seed == 3


def test_task_options_can_be_set_one_by_one_or_as_a_table() -> None:
    task = ["task.kind=reasoning_gym", "task.reasoning_gym_task=spell_backward"]
    one = load_config("", [*task, "task.reasoning_gym_options.max_word_len=4", "task.reasoning_gym_options.a=word"])
    table = load_config("", [*task, 'task.reasoning_gym_options={max_word_len = 4, a = "word"}'])
    assert one == table
    assert one.task.reasoning_gym_options == {"max_word_len": 4, "a": "word"}


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=1", ".seed=1", ""])
def test_malformed_override_shows_how_to_write_it(override: str) -> None:
    assert "--set" in error_of("", override)


def test_override_below_a_value_is_refused() -> None:
    assert "seed is a value and holds no settings" in error_of("seed = 3", "seed.deep.x=1")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[task]\nknd = 1", "task.knd: unknown setting; did you mean task.kind?"),
        ("[rolout]", "rolout: unknown setting; did you mean rollout?"),
        ("group_size = 4", "group_size: unknown setting; did you mean rollout.group_size?"),
        ("[train.loss]\nlearning_rate = 1", "train.optimizer.learning_rate"),
        ("[train.update]\nqqq = 1", "train.update has epochs, optimizer_steps_per_epoch"),
        ("qqq = 1", "qqq: unknown setting; there are name, description"),
        ('"a.b" = 1', '"a.b": unknown setting'),
    ],
)
def test_unknown_key_names_the_nearest(text: str, hint: str) -> None:
    assert hint in error_of(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed = -1", "seed = -1: must be at least 0"),
        ("seed = 1.5", "seed = 1.5: must be an integer"),
        ("seed = true", "seed = true: must be an integer"),
        ('seed = "1"', 'seed = "1": must be an integer'),
        ("seed = 0x10000000000000000", "seed = 0x1000"),
        ("seed = 9223372036854775808", "must fit into 64 bits"),
        ("seed = 1979-05-27", 'seed = "1979-05-27": dates and times are not used here'),
        ("[reward]\ntimeout_s = inf", "reward.timeout_s = inf: must be a finite number"),
        ("[reward]\nshuffle = 1", "reward.shuffle = 1: must be true or false"),
        ("[task]\ndigits = 99", "task.digits = 99: must be at most 12"),
        ("[task]\nverifier = 3", "task.verifier = 3: must be a string"),
        ("[task]\nreasoning_gym_options = 3", "task.reasoning_gym_options = 3: must be a table"),
        ("rollout = 3", "rollout = 3: must be a table of settings"),
        ("[train.loss]\ndual_clip = 1.0", "train.loss.dual_clip = 1.0: must be greater than 1"),
        (
            '[train.loss]\nalgorithm = "grp"',
            "must be one of grpo, dapo, dr_grpo, gspo, rloo, cispo; did you mean grpo?",
        ),
        ("[train.optimizer]\nbetas = [0.9]", "train.optimizer.betas = [0.9]: must have 2 values"),
        ("[train.optimizer]\nbetas = [0.9, 0.9, 0.9]", "must have 2 values, not 3"),
        ("[train.optimizer]\nbetas = [0.9, 7]", "train.optimizer.betas[1] = 7: must be at most 1"),
        ("[train.optimizer]\nbetas = [0.9, nan]", "train.optimizer.betas[1] = nan: must be a finite number"),
        ('name = "A b"', 'name = "A b": must match'),
    ],
)
def test_wrong_value_tells_path_value_and_what_is_allowed(text: str, line: str) -> None:
    message = error_of(text)
    assert line in message
    assert "\n" not in message


def test_every_mistake_has_its_line() -> None:
    message = error_of('seed = -1\nx = inf\n[task]\ndigits = 0\nknd = "a"\n[train.loss]\nclip_low = "a"\n')
    head, *lines = message.split("\n")
    assert head == "configuration: 5 settings are wrong:"
    assert [line.split()[0] for line in sorted(lines)] == [
        "seed",
        "task.digits",
        "task.knd:",
        "train.loss.clip_low",
        "x",
    ]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["model.num_experts_per_token=9"], "model.num_experts_per_token"),
        (["model.hidden_size=97"], "model.hidden_size"),
        (["model.hidden_size=100"], "rotary embeddings need an even number"),
        (["model.num_key_value_heads=3"], "model.num_key_value_heads"),
        (["rollout.prompts_per_unit=65"], "rollout.prompts_per_unit"),
        (["train.update.optimizer_steps_per_epoch=65"], "train.update.optimizer_steps_per_epoch"),
        (["rollout.sampling.max_new_tokens=65"], "model.max_position_embeddings = 128: must be at least 129"),
        (["task.kind=jsonl"], "task.train_path is missing"),
        (["task.train_path=a.jsonl"], "task.train_path is set"),
        (["task.kind=reasoning_gym"], "task.reasoning_gym_task is missing"),
        (["task.verifier=exakt"], "did you mean exact?"),
        (["task.verifier=my.module"], "package.module:function"),
        (["task.verifier=reasoning_gym"], "needs task.kind = reasoning_gym"),
        (["task.digits=2"], "task.heldout_size = 256: must be below the 100 prompts"),
        (["task.train_size=63"], "rollout.prompts_per_iteration = 64: must be at most the 63"),
        (["task.digits=2", "task.heldout_size=90"], "must be at most the 10 training prompts"),
        (["train.update.optimizer_steps_per_epoch=1"], "train.update.optimizer_steps_per_epoch = 1: times"),
        (["train.loss.icepop_low=6"], "train.loss.icepop_low"),
        (["train.optimizer.betas=[0.9, 1.0]"], "train.optimizer.betas"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(overrides: list[str], path: str) -> None:
    assert path in error_of("", *overrides)


def test_model_shape_is_not_checked_when_a_checkpoint_is_given() -> None:
    assert load_config("", ["warmup.start=/checkpoint", "model.hidden_size=97"]).model.hidden_size == 97


@pytest.mark.parametrize(
    ("text", "position"),
    [("a = \n", "line 1, column 5"), ("seed = 1\n[task", "line 2, column 6"), ("seed = 1\nseed = 2\n", "line 2")],
)
def test_toml_syntax_error_has_line_and_column(tmp_path: Path, text: str, position: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    assert f"{path}: not TOML: {position}" in error_of(str(path))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'description = "caf\xe9"')
    assert "no such configuration file" in error_of(str(tmp_path / "absent.toml"))
    assert "can't be read: Is a directory" in error_of(str(tmp_path))
    assert "byte 19 is not UTF-8" in error_of(str(tmp_path / "latin.toml"))
    assert "not a local file" in error_of("s3://bucket/run.toml")
    assert "can't be read" in error_of("x" * 5000)
    assert "can't be read" in error_of("a\0b")


@pytest.mark.parametrize(
    "text", ["a." * 3000 + "b = 1", "a = " + "[" * 3000, "seed = " + "9" * 5000, "seed = 0x" + "f" * 9999]
)
def test_absurd_documents_are_refused_in_one_line(text: str) -> None:
    assert len(error_of(text)) < 300


SETTINGS = [
    "seed=3",
    "description='quotes \" and ünïcode'",
    "train.loss.dual_clip=none",
    "train.loss.clip_high=0.28",
    "train.optimizer.learning_rate=3e-4",
    "train.optimizer.betas=[0.1, 0.2]",
    "reward.shuffle=true",
    "warmup.max_steps=5",
    "task.digits=5",
    "model.dtype=bfloat16",
]


@given(st.lists(st.sampled_from(SETTINGS), unique=True))
def test_written_forms_read_back_equal(overrides: list[str]) -> None:
    cfg = load_config("", overrides)
    assert load_config(config_toml(cfg) or "\n") == cfg
    assert config_from_json(config_json(cfg)) == cfg


def test_task_options_survive_both_written_forms() -> None:
    options = 'task.reasoning_gym_options={a = [1, 2.0, "x"], b = {c = true}}'
    cfg = load_config("", ["task.kind=reasoning_gym", "task.reasoning_gym_task=lcm", options])
    assert load_config(config_toml(cfg)) == cfg == config_from_json(config_json(cfg))


def test_canonical_json_is_sorted_and_compact() -> None:
    text = config_json(RunConfig())
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


def test_hash_depends_on_values_not_on_how_they_were_written() -> None:
    first = load_config("seed = 3\n[reward]\ntimeout_s = 10\n")
    second = load_config("[reward]\ntimeout_s = 1e1\n", ["seed=3"])
    assert config_hash(first) == config_hash(second) != config_hash(RunConfig())


def test_hash_is_the_same_in_another_process() -> None:
    code = "from steps.config_loader import *; print(config_hash(load_config('')))"
    environment = {**os.environ, "PYTHONHASHSEED": "17"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == config_hash(RunConfig())


@pytest.mark.parametrize("text", ["", "[]", "{", '{"sed": 1}', "[" * 100000])
def test_damaged_stored_configuration_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="stored configuration"):
        config_from_json(text)


def test_schema_describes_fields_and_accepts_what_config_toml_writes() -> None:
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for overrides in ([], ["train.loss.dual_clip=none"]):
        jsonschema.validate(tomllib.loads(config_toml(load_config("", overrides))), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"sed": 1}, schema)
    assert schema["$defs"]["RolloutConfig"]["properties"]["prompts_per_unit"]["description"].startswith(
        "Prompts of one"
    )
    assert "Prefix of the run's id" in schema["properties"]["name"]["description"]


def test_schema_covers_every_setting() -> None:
    names = {field.name for field in dataclasses.fields(RunConfig)}
    assert set(config_schema()["properties"]) == names


toml_values = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(["seed", "task", "train", "loss", "kind", "name", "model", "update", "betas", "qq"])


@given(st.dictionaries(field_names, toml_values | st.dictionaries(field_names, toml_values, max_size=3), max_size=4))
def test_any_document_is_read_or_refused_cleanly(document: dict[str, object]) -> None:
    import tomli_w

    try:
        cfg = load_config(tomli_w.dumps(document) + "\n")
    except ConfigError:
        return
    assert config_from_json(config_json(cfg)) == cfg


@given(st.text(max_size=60), st.lists(st.text(st.characters(), max_size=20), max_size=2))
def test_any_text_is_read_or_refused_cleanly(text: str, overrides: list[str]) -> None:
    try:
        load_config(text + "\n", overrides)
    except ConfigError as error:
        assert str(error)


def test_a_table_with_one_setting_keeps_the_other_defaults_of_where_it_stands() -> None:
    config = load_config("[warmup.optimizer]\nwarmup_steps = 5\n", ["warmup.optimizer.weight_decay=0.5"])
    expected = dataclasses.replace(RunConfig().warmup.optimizer, warmup_steps=5, weight_decay=0.5)
    assert config.warmup.optimizer == expected
    assert config.warmup.optimizer.learning_rate != RunConfig().train.optimizer.learning_rate
