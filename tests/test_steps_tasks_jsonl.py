"""The user's rows: every mistake has its file, line and remedy; the frozen copy is exact."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steps.adapters.store import open_store
from steps.config import TaskConfig
from steps.errors import DataError
from steps.records import Prompt
from steps.tasks.catalog import build_dataset
from steps.tasks.dataset import make_dataset, make_prompt, prompt_content
from steps.tasks.frozen import dataset_from_jsonl, dataset_to_jsonl
from tests.fixtures_s3 import use_server
from tests.s3_servers import S3Server

GOOD = '{"prompt": "1+1=", "answer": "2"}'


def write(folder: Path, *lines: str | bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def rows(count: int, start: int = 0) -> list[str]:
    return [json.dumps({"prompt": f"q{n}", "answer": f"a{n}"}) for n in range(start, start + count)]


def task(path: Path | str, heldout: Path | str = "", heldout_size: int = 3, verifier: str = "exact") -> TaskConfig:
    return TaskConfig(
        kind="jsonl", train_path=str(path), heldout_path=str(heldout), heldout_size=heldout_size, verifier=verifier
    )


def read(folder: Path, path: Path | str, verifier: str = "exact") -> list[Prompt]:
    """The rows of a file, which is used whole and in order when it is the held-out one."""
    train = write(folder, '{"prompt": "the only training prompt", "answer": "0"}', name="train.jsonl")
    return build_dataset(task(train, path, verifier=verifier), 0).heldout


def test_rows_are_read_in_their_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        b"\xef\xbb\xbf" + GOOD.encode() + b"\r",
        "",
        '  {"answer": "\\u00e9\\u2028", "prompt": "caf\u00e9 \u2028", "id": "x", "meta": {"n": [1, null, 2.5]}}',
        '{"prompt": "p", "answer": "a", "id": 7}',
    )
    first, second, third = read(tmp_path, path)
    assert (first.text, first.answer, first.meta) == ("1+1=", "2", {})
    assert (second.text, second.answer) == ("caf\u00e9 \u2028", "\u00e9\u2028")
    assert second.meta == {"n": [1, None, 2.5], "id": "x"}
    assert third.meta == {"id": 7}


def test_uid_is_a_hash_of_the_content(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, write(tmp_path, GOOD))
    assert prompt.uid == make_prompt("1+1=", "2").uid
    assert prompt.uid != make_prompt("1+1=", "2", {"id": "x"}).uid
    assert len(prompt.uid) == 16


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("prompt,answer", "not JSON"),
        ('["a"]', "an array, not an object"),
        ("null", "null, not an object"),
        ('"a"', "a string, not an object"),
        ('{"answer": "2"}', "prompt is missing"),
        ('{"prompt": "a"}', "answer is missing"),
        ('{"prompt": "", "answer": "2"}', "prompt is empty"),
        ('{"prompt": "a", "answer": " "}', "answer is empty"),
        ('{"prompt": "a", "answer": 2}', "answer is a number, not a string"),
        ('{"prompt": "a", "answer": true}', "answer is a boolean, not a string"),
        ('{"prompt": null, "answer": "2"}', "prompt is null, not a string"),
        ('{"prompt": "a", "answer": "2", "Id": 1}', 'unknown key "Id"'),
        ('{"prompt": "a", "answer": "2", "meta": []}', "meta is an array, not an object"),
        ('{"prompt": "a", "answer": "2", "id": null}', "id is null"),
        ('{"prompt": "a", "answer": "2", "id": false}', "id is a boolean"),
        ('{"prompt": "a", "answer": "2", "id": "1", "meta": {"id": 1}}', "id is given twice"),
        ('{"prompt": "a", "answer": "2", "answer": "3"}', 'the key "answer" is there twice'),
        ('{"prompt": "a", "answer": "2", "meta": {"x": NaN}}', "NaN is not JSON"),
        ('{"prompt": "a", "answer": "2", "meta": {"x": -Infinity}}', "-Infinity is not JSON"),
        ('{"prompt": "a", "answer": "2", "meta": {"x": 1e999}}', "1e999 is too large"),
        ('{"prompt": "a", "answer": "2", "meta": {"x": ' + "9" * 5000 + "}}", "not usable JSON"),
        ('{"prompt": "a", "answer": "2", "meta": ' + "[" * 100_000, "nested too deeply"),
        ('{"prompt": "a\\ud800", "answer": "2"}', "half of a surrogate pair"),
        ('{"prompt": "a\\u0000", "answer": "2"}', "U+0000"),
        (b'{"prompt": "caf\xe9", "answer": "2"}', "byte 16 of the line is not UTF-8"),
        ("\ufffe".encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line_with_a_remedy(tmp_path: Path, line: str | bytes, reason: str) -> None:
    path = write(tmp_path, GOOD, "", line)
    with pytest.raises(DataError) as caught:
        read(tmp_path, path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert reason in message
    assert message.endswith(")")
    assert "\n" not in message


def test_an_escaped_backslash_before_u0000_is_text(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, write(tmp_path, r'{"prompt": "\\u0000", "answer": "2"}'))
    assert prompt.text == r"\u0000"


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ('{"prompt": "a", "answer": "3"}', 'the prompt "a" is already on line 1'),
        ('{"prompt": "b", "answer": "3", "id": "i"}', 'the id "i" is already on line 1'),
    ],
)
def test_duplicates_name_both_lines(tmp_path: Path, second: str, reason: str) -> None:
    path = write(tmp_path, '{"prompt": "a", "answer": "2", "id": "i"}', second)
    with pytest.raises(DataError, match=reason) as caught:
        read(tmp_path, path)
    assert str(caught.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("verifier", "answer", "reason"),
    [("regex", "(", "is not a regular expression"), ("numeric", "two", "holds no number")],
)
def test_an_answer_that_the_verifier_cannot_use_is_a_wrong_row(
    tmp_path: Path, verifier: str, answer: str, reason: str
) -> None:
    path = write(tmp_path, json.dumps({"prompt": "a", "answer": answer}))
    assert read(tmp_path, path)
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{reason}"):
        read(tmp_path, path, verifier)


def test_files_that_hold_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent.jsonl: no such file"):
        read(tmp_path, tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="can't be read: Is a directory"):
        read(tmp_path, tmp_path)
    with pytest.raises(DataError, match="rows.jsonl: no rows"):
        read(tmp_path, write(tmp_path, ""))
    with pytest.raises(DataError, match="can't be read"):
        read(tmp_path, "a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    path.chmod(0)
    with pytest.raises(DataError, match="Permission denied"):
        read(tmp_path, path)


def test_rows_of_an_s3_object_are_those_of_the_file(
    tmp_path: Path, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, *rows(20))
    folder = f"s3://{use_server(moto_server, monkeypatch)}/data"
    open_store(folder).put_bytes("rows.jsonl", path.read_bytes())
    assert build_dataset(task(f"{folder}/rows.jsonl"), 3) == build_dataset(task(path), 3)
    with pytest.raises(DataError, match="missing.jsonl"):
        build_dataset(task(f"{folder}/missing.jsonl"), 3)


def test_held_out_rows_are_split_off_by_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path, *rows(20))
    data = build_dataset(task(path), 0)
    assert (len(data.train), len(data.heldout)) == (17, 3)
    assert {p.text for p in data.train} | {p.text for p in data.heldout} == {f"q{n}" for n in range(20)}
    assert build_dataset(task(path), 0) == data
    assert build_dataset(task(path), 1).heldout != data.heldout


def test_a_held_out_file_is_used_whole_and_in_order(tmp_path: Path) -> None:
    heldout = write(tmp_path, *rows(5, start=100), name="heldout.jsonl")
    data = build_dataset(task(write(tmp_path, *rows(4)), heldout), 0)
    assert [p.text for p in data.heldout] == [f"q{n}" for n in range(100, 105)]
    assert sorted(p.text for p in data.train) == ["q0", "q1", "q2", "q3"]


def test_a_prompt_in_both_files_is_refused(tmp_path: Path) -> None:
    heldout = write(tmp_path, *rows(2, start=3), name="heldout.jsonl")
    with pytest.raises(DataError, match=r"heldout.jsonl:1: this prompt is also in .*rows.jsonl:4 "):
        build_dataset(task(write(tmp_path, *rows(4)), heldout), 0)


def test_too_few_rows_to_hold_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 rows, of which task.heldout_size = 3 are held out"):
        build_dataset(task(write(tmp_path, *rows(3))), 0)


def test_alphabet_covers_prompts_and_answers_and_for_patterns_all_of_ascii(tmp_path: Path) -> None:
    path = write(tmp_path, *rows(5))
    assert build_dataset(task(path), 0).alphabet == "01234aq"
    assert len(build_dataset(task(path, verifier="regex"), 0).alphabet) == 95


def test_frozen_copy_reads_back_equal() -> None:
    data = make_dataset([make_prompt("é\u2028", "2", {"x": [1, {"y": None}]})], [make_prompt("b", "3")])
    assert dataset_from_jsonl(dataset_to_jsonl(data)) == data
    assert dataset_to_jsonl(dataset_from_jsonl(dataset_to_jsonl(data))) == dataset_to_jsonl(data)


def test_a_damaged_frozen_copy_is_refused() -> None:
    copy = dataset_to_jsonl(make_dataset([make_prompt("a", "2")], [make_prompt("b", "3")]))
    for damaged in (
        b"",
        copy[:-1],
        copy + copy,
        copy.replace(b'"2"', b'"4"'),
        copy.replace(b"heldout", b"held"),
        b"[]\n",
    ):
        with pytest.raises(DataError, match="frozen data set"):
            dataset_from_jsonl(damaged)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
row_objects = st.dictionaries(st.sampled_from(["prompt", "answer", "id", "meta", "x"]), json_values, max_size=4)
anything = st.binary(max_size=40) | row_objects.map(lambda row: json.dumps(row).encode()) | st.just(GOOD.encode())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(anything, max_size=4), st.sampled_from(["exact", "regex", "numeric"]))
def test_any_file_is_read_or_refused_cleanly(tmp_path: Path, lines: list[bytes], verifier: str) -> None:
    path = write(tmp_path, *lines)
    try:
        prompts = read(tmp_path, path, verifier)
    except DataError:
        return
    data = make_dataset(prompts, [])
    assert dataset_from_jsonl(dataset_to_jsonl(data)) == data


@given(st.lists(anything, max_size=4))
def test_any_frozen_copy_is_read_or_refused_cleanly(lines: list[bytes]) -> None:
    try:
        dataset_from_jsonl(b"\n".join(lines))
    except DataError as error:
        assert str(error)


def chat_row(*messages: tuple[str, str], answer: str = "2") -> str:
    return json.dumps({"prompt": [{"role": role, "content": content} for role, content in messages], "answer": answer})


def read_chat(folder: Path, *lines: str) -> list[Prompt]:
    train = write(folder, '{"prompt": "the only training prompt", "answer": "0"}', name="train.jsonl")
    heldout = write(folder, *lines)
    return build_dataset(replace(task(train, heldout), prompt_format="chat", system_prompt="Be short."), 0).heldout


def test_a_prompt_may_be_messages(tmp_path: Path) -> None:
    turns = ("system", "Count."), ("user", "1+0="), ("assistant", "1"), ("user", "1+1=")
    several, single, text = read_chat(
        tmp_path, chat_row(*turns), chat_row(("user", "1+1="), answer="3"), '{"prompt": "1+2=", "answer": "3"}'
    )
    assert several.text == "system: Count.\n\nuser: 1+0=\n\nassistant: 1\n\nuser: 1+1="
    assert single == make_prompt("1+1=", "3")
    config = TaskConfig(prompt_format="chat", system_prompt="Be short.")
    assert [(m["role"], m["content"]) for m in prompt_content(config, several)] == list(turns)
    assert prompt_content(config, text) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "1+2="},
    ]
    assert prompt_content(TaskConfig(), text) == "1+2="


def test_the_frozen_copy_keeps_messages(tmp_path: Path) -> None:
    prompts = read_chat(tmp_path, chat_row(("system", "Count."), ("user", "1+1=")), GOOD.replace("1+1", "1+2"))
    data = dataset_to_jsonl(make_dataset([], prompts))
    assert dataset_from_jsonl(data).heldout == prompts
    with pytest.raises(DataError, match="uid does not match"):
        dataset_from_jsonl(data.replace(b"Count.", b"count."))
    with pytest.raises(DataError, match="role of message 1"):
        dataset_from_jsonl(data.replace(b'"system"', b'"judge!"'))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "does not end with a message of the user"),
        ([{"role": "assistant", "content": "1"}], "does not end with a message of the user"),
        ([{"role": "user", "content": "1"}, "2"], "message 2 of prompt is not an object of role and content"),
        ([{"role": "user", "content": "1", "name": "x"}], "message 1 of prompt is not an object of role and content"),
        ([{"role": "tool", "content": "1"}], "role of message 1 is .*tool"),
        ([{"role": "user", "content": "1"}, {"role": "system", "content": "1"}], "message 2 is the system's"),
        ([{"role": "user", "content": " "}], "content of message 1 is no text"),
        ([{"role": "user", "content": 1}], "content of message 1 is no text"),
    ],
)
def test_messages_that_make_no_prompt_are_refused(tmp_path: Path, prompt: list[object], reason: str) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{reason}"):
        read_chat(tmp_path, json.dumps({"prompt": prompt, "answer": "1"}))


def test_messages_need_the_chat_format(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='rows.jsonl:1: prompt is a list of messages .set task.prompt_format = "chat"'):
        read(tmp_path, write(tmp_path, chat_row(("user", "1+1="))))
