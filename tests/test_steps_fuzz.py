"""Any bytes at all where a file is read: accepted, or refused by one of our errors; never another exception.

The examples start from good files with random edits: these get past the first check of a reader.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moe.batch import TrainingBatch
from moe.checkpoint_index import FORMAT, STATE_FILE, read_state
from moe.config import ModelConfig
from moe.delta import apply_delta, write_delta
from moe.model import build_model, load_model
from moe.probe import read_probe
from moe.publication import save_publication, weights_sha256
from moe.tokenizer import build_char_tokenizer, load_tokenizer
from steps.adapters.publications_manifest import parse_manifest
from steps.batches import BATCH_FILE, load_batch
from steps.config import RunConfig, TaskConfig
from steps.config_loader import config_from_json, config_json, config_toml, load_config
from steps.errors import ConfigError, DataError, UsageError
from steps.tasks.dataset import make_dataset, make_prompt
from steps.tasks.frozen import dataset_from_jsonl, dataset_to_jsonl
from steps.tasks.jsonl import build_jsonl
from workflows.local.chaos_plan import parse_plan
from workflows.local.parsing import parse_template_manifest, parse_workflow
from workflows.run_command import load_templates
from workflows.shared_options import read_parameters

FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck))

NASTY = [b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"[" * 5000, b"{" * 5000, b'{"a":' * 3000, b"NaN"]
NASTY += [
    b"-0",
    b"1e999",
    b"9" * 5000,
    b"null",
    b"true",
    b'"\\ud800"',
    b"\\u0000",
    b"../",
    b"\r",
    b"\n\n",
    b"-1",
    b"1.5",
]


@st.composite
def edited(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with a few random edits; sometimes something else entirely."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300) | st.sampled_from(NASTY))
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 1, 2, 8, 40]))
        data[start : start + length] = draw(st.binary(max_size=8) | st.sampled_from(NASTY))
    return bytes(data) if draw(st.booleans()) else bytes(data[: draw(st.integers(0, len(data)))])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def replaced(draw: st.DrawFn, document: Any) -> Any:
    """A document with one value, anywhere in it, replaced, removed or renamed."""
    copy = json.loads(json.dumps(document))
    places = list(_places(copy))
    if not places:
        return draw(JSON)
    parent, key = draw(st.sampled_from(places))
    change = draw(st.sampled_from(["replace", "remove", "rename"]))
    if change == "replace":
        parent[key] = draw(JSON)
    elif change == "remove" or isinstance(parent, list):
        del parent[key]
    else:
        parent[draw(st.text(max_size=8))] = parent.pop(key)
    return copy


def _places(value: Any) -> Any:
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def accepted_or_refused(use: Callable[[], object], *errors: type[Exception]) -> None:
    try:
        use()
    except errors as error:
        assert str(error)


# -- what a user writes ----------------------------------------------------------------------------------------------

ROWS = b"".join(
    json.dumps({"prompt": f"{n} é>", "answer": str(n), "id": str(n), "meta": {"k": [n, None, {"x": 1.5}]}}).encode()
    + b"\n"
    for n in range(4)
)


@FUZZ
@given(rows=edited(ROWS), verifier=st.sampled_from(["exact", "numeric", "regex"]))
def test_rows_of_a_user(tmp_path_factory: pytest.TempPathFactory, rows: bytes, verifier: str) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    path.write_bytes(rows)
    task = TaskConfig(kind="jsonl", train_path=str(path), heldout_size=1, verifier=verifier)
    accepted_or_refused(lambda: dataset_from_jsonl(dataset_to_jsonl(build_jsonl(task, 0))), DataError)


@FUZZ
@given(row=replaced({"prompt": "p", "answer": "a", "id": "1", "meta": {"a": [1, {"b": None}]}}))
def test_a_row_of_a_user(tmp_path_factory: pytest.TempPathFactory, row: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "row.jsonl"
    path.write_bytes(json.dumps(row).encode() + b'\n{"prompt": "q", "answer": "b"}\n')
    task = TaskConfig(kind="jsonl", train_path=str(path), heldout_size=1)
    accepted_or_refused(lambda: dataset_from_jsonl(dataset_to_jsonl(build_jsonl(task, 0))), DataError)


TOML = config_toml(RunConfig()).encode()


@FUZZ
@given(data=edited(TOML))
def test_a_configuration_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_bytes(data)
    accepted_or_refused(lambda: config_from_json(config_json(load_config(str(path)))), ConfigError)


@FUZZ
@given(text=st.text(max_size=200) | edited(TOML).map(lambda data: data.decode(errors="replace")))
def test_a_configuration_as_text(text: str) -> None:
    accepted_or_refused(lambda: load_config(text), ConfigError)


@FUZZ
@given(document=replaced(json.loads(config_json(RunConfig()))))
def test_a_stored_configuration(document: Any) -> None:
    accepted_or_refused(lambda: config_toml(config_from_json(json.dumps(document))), ConfigError)


NAMES = st.sampled_from(
    ["seed", "rollout.group_size", "moe", "task.reasoning_gym_options.a", "a.b", "", "rollout..x", "name"]
)


@FUZZ
@given(
    name=NAMES | st.text(max_size=12),
    value=st.text(max_size=20) | JSON.map(str) | st.sampled_from(["[" * 3000, "9" * 5000]),
)
def test_an_override(name: str, value: str) -> None:
    accepted_or_refused(lambda: load_config('name = "x1"\n', [f"{name}={value}"]), ConfigError)
    accepted_or_refused(lambda: load_config('name = "x1"\n', [name + value]), ConfigError)
    accepted_or_refused(lambda: read_parameters([f"{name}={value}", name + value]), UsageError)


TEMPLATES = load_templates()


@FUZZ
@given(manifest=st.sampled_from(TEMPLATES).flatmap(replaced))
def test_a_manifest_for_the_local_executor(manifest: Any) -> None:
    accepted_or_refused(lambda: parse_template_manifest(manifest), ConfigError)
    accepted_or_refused(lambda: parse_workflow(manifest), ConfigError)


@FUZZ
@given(document=replaced({"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "x"},
    "spec": {"workflowTemplateRef": {"name": "policy-campaign"},
             "arguments": {"parameters": [{"name": "run", "value": "x"}]}}}))  # fmt: skip
def test_a_workflow_for_the_local_executor(document: Any) -> None:
    accepted_or_refused(lambda: parse_workflow(document), ConfigError)


PLAN = b'[[fault]]\nstep = "rollout"\niteration = 1\nworker = 0\nattempt = 1\nafter_s = 0.5\nkind = "sigkill"\n'


@FUZZ
@given(data=edited(PLAN))
def test_a_chaos_plan(data: bytes) -> None:
    accepted_or_refused(lambda: parse_plan(data.decode(errors="replace"), "plan.toml"), ConfigError)


# -- what a run has written, and somebody changed ---------------------------------------------------------------------

FROZEN = dataset_to_jsonl(
    make_dataset([make_prompt("1>", "1", {"a": [1]}), make_prompt("2>", "2")], [make_prompt("3>", "3")])
)


@FUZZ
@given(data=edited(FROZEN))
def test_a_frozen_data_set(data: bytes) -> None:
    accepted_or_refused(lambda: dataset_from_jsonl(data), DataError)


ENTRY = {"path": "model.safetensors", "size_bytes": 10, "sha256": "0" * 64}
MANIFEST = {
    "format": 2,
    "files": [ENTRY, ENTRY | {"path": "config.json"}],
    "extra": {"policy_version": 3},
    "upload_id": "0" * 16,
    "delta": {
        "parent": "runs/x/publications/00001",
        "parent_sha256": "0" * 64,
        "depth": 1,
        "overwrites": [ENTRY],
        "inherited": ["config.json"],
    },
}


def use_manifest(data: bytes) -> None:
    manifest = parse_manifest(data, "file:///m.json")
    assert manifest.sha256 and manifest.stored_bytes >= 0 and manifest.depth >= 0
    assert parse_manifest(manifest.to_bytes(), "file:///m.json") == manifest


@FUZZ
@given(document=replaced(MANIFEST))
def test_a_manifest_with_another_value(document: Any) -> None:
    accepted_or_refused(lambda: use_manifest(json.dumps(document).encode()), DataError)


@FUZZ
@given(data=edited(json.dumps(MANIFEST).encode()))
def test_a_manifest_of_any_bytes(data: bytes) -> None:
    accepted_or_refused(lambda: use_manifest(data), DataError)


BATCH = TrainingBatch.from_rows(
    prompts=[[1, 2], [1, 2]],
    responses=[[3], [3, 4]],
    logprobs=[[-0.5], [-0.5, -1.0]],
    versions=[[0], [0, 0]],
    rewards=[1.0, 0.0],
    groups=[0, 0],
    routings=[None, None],
).to_bytes()


@FUZZ
@given(data=edited(BATCH))
def test_a_batch(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / BATCH_FILE).write_bytes(data)
    accepted_or_refused(lambda: load_batch(folder), DataError)


@pytest.fixture(scope="module")
def publication(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("publication")
    tokenizer = build_char_tokenizer("0123456789>")
    sizes = {"hidden_size": 8, "num_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = build_model(ModelConfig(**sizes, moe_intermediate_size=8, num_experts=2), len(tokenizer), seed=0)
    save_publication(model, tokenizer, folder)
    return folder


USED = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "probe.json",
)


@settings(FUZZ, max_examples=60)
@given(data=st.data())
def test_a_publication(publication: Path, data: st.DataObject) -> None:
    names = sorted(path.name for path in publication.iterdir() if path.name in USED)
    path = publication / data.draw(st.sampled_from(names))
    good = path.read_bytes()
    try:
        path.write_bytes(data.draw(edited(good)))
        accepted_or_refused(lambda: weights_sha256(publication), ValueError)
        accepted_or_refused(lambda: load_model(publication), ValueError)
        accepted_or_refused(lambda: load_tokenizer(publication), ValueError)
        accepted_or_refused(lambda: read_probe(publication), ValueError)
    finally:
        path.write_bytes(good)


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delta")
    old = {"a": torch.zeros(64, 8), "b": torch.zeros(5, dtype=torch.bfloat16)}
    save_file(old, folder / "old.safetensors")
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][3, 1:7] = 1.0
    save_file(new, folder / "new.safetensors")
    write_delta(folder / "old.safetensors", folder / "new.safetensors", folder / "good.delta")
    return folder


@FUZZ
@given(data=st.data())
def test_a_delta(delta: Path, data: st.DataObject) -> None:
    (delta / "target").write_bytes((delta / "old.safetensors").read_bytes())
    (delta / "bad.delta").write_bytes(data.draw(edited((delta / "good.delta").read_bytes())))
    accepted_or_refused(lambda: apply_delta(delta / "bad.delta", delta / "target"), ValueError)
    assert (delta / "target").stat().st_size == (delta / "old.safetensors").stat().st_size


STATE = {
    "format": FORMAT,
    "progress": {"version": 1},
    "files": {"rank-0.safetensors": {"size_bytes": 10, "sha256": "0" * 64}},
    "tensors": {"a": {"shape": [4, 2], "dtype": "float32", "pieces": [["rank-0.safetensors", [0, 0], [4, 2]]]}},
}


@FUZZ
@given(data=edited(json.dumps(STATE).encode()) | replaced(STATE).map(lambda document: json.dumps(document).encode()))
def test_a_trainers_state(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / STATE_FILE).write_bytes(data)
    accepted_or_refused(lambda: read_state(folder), ValueError)
