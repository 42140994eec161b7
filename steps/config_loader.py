"""Reads a run's configuration: TOML text or file, `--set` overrides, and the canonical forms that are kept.

TOML has no null: a setting that may be off takes the string "none" (`dual_clip = "none"`).
"""

import ast
import dataclasses
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import TypeAdapter, ValidationError

import moe.config
import steps.config
from steps.config import RunConfig
from steps.config_checks import cross_field_problems
from steps.config_messages import describe, dotted, field_type, field_types, shown
from steps.errors import ConfigError

_NONE = "none"
_TEXT = "configuration"
_PATH_FIELDS = (("task", "train_path"), ("task", "heldout_path"), ("warmup", "start"))
_TOML_POSITION = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)
_INTEGER_BITS = 63
_REFUSED = object()


def load_config(text_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read TOML text or the path of a TOML file, then apply overrides `a.b=value` in their order.

    Relative paths in a file (task.train_path, task.heldout_path, warmup.start) are relative to the file's folder,
    those in an override to the working directory; those in TOML text stay as they are.

    Raises:
        ConfigError: the file can't be read, is not TOML, or a setting is unknown or wrong: one line for each mistake,
            with the dotted path, what was given and what is allowed.
    """
    source, text = _read(text_or_path)
    document = _parse_toml(source, text)
    if source != _TEXT:
        _resolve_paths(document, Path(source).resolve().parent)
    for override in overrides:
        _apply_override(document, override)
    return _validate(source, document)


def config_from_json(text: str) -> RunConfig:
    """The configuration that `config_json` wrote.

    Raises:
        ConfigError: it is not such a configuration.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"stored configuration: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError("stored configuration: not a JSON object")
    return _validate("stored configuration", document)


def config_json(cfg: RunConfig) -> str:
    """Canonical JSON: sorted keys, no spaces; equal configurations give equal text."""
    return json.dumps(dataclasses.asdict(cfg), sort_keys=True, separators=(",", ":"), allow_nan=False)


def config_hash(cfg: RunConfig) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal."""
    return hashlib.sha256(config_json(cfg).encode()).hexdigest()


def config_toml(cfg: RunConfig) -> str:
    """TOML with every setting; `load_config` of it gives an equal configuration."""
    return tomli_w.dumps(_without_null(dataclasses.asdict(cfg), dataclasses.asdict(RunConfig())))


def _without_null(settings: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            result[name] = _without_null(value, defaults.get(name, {}))
        elif value is not None:
            result[name] = value
        elif defaults.get(name) is not None:
            result[name] = _NONE
    return result


def config_schema() -> dict[str, Any]:
    """JSON schema of the TOML file; a field's description is the docstring below it."""
    schema = _adapter().json_schema()
    docs = _field_docs()
    for name, table in {**schema["$defs"], "RunConfig": schema}.items():
        for field_name, field_schema in table["properties"].items():
            if (name, field_name) in docs:
                field_schema["description"] = docs[name, field_name]
            _name_null(field_schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _name_null(field_schema: dict[str, Any]) -> None:
    null = {"type": "null"}
    if null in field_schema.get("anyOf", []):
        field_schema["anyOf"] = [{"const": _NONE} if option == null else option for option in field_schema["anyOf"]]
        if field_schema["default"] is None:
            field_schema["default"] = _NONE


def _field_docs() -> dict[tuple[str, str], str]:
    """Docstrings below fields, which Python itself does not keep."""
    docs: dict[tuple[str, str], str] = {}
    for module in (moe.config, steps.config):
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                docs.update({(node.name, field): text for field, text in _class_docs(node).items()})
    return docs


def _class_docs(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = following.value.value
    return docs


def prepare_validation() -> None:
    """Build the validator now; the first configuration that is read would wait for it otherwise."""
    _adapter()


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[RunConfig]:
    return TypeAdapter(RunConfig)


def _read(text_or_path: str) -> tuple[str, str]:
    """(where it comes from, TOML text)."""
    if text_or_path.startswith("s3://"):
        raise ConfigError(f"{text_or_path}: not a local file (download it first)")
    if _is_text(text_or_path):
        return _TEXT, text_or_path
    try:
        return text_or_path, Path(text_or_path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{text_or_path}: no such configuration file (check the path)") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{text_or_path}: byte {error.start + 1} is not UTF-8 (save the file as UTF-8)") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{text_or_path[:200]!r}: can't be read: {reason} (give a readable TOML file)") from error


def _is_text(text_or_path: str) -> bool:
    """TOML has a line break or an equals sign, or is empty; a path that exists wins over the latter two."""
    if "\n" in text_or_path or not text_or_path.strip():
        return True
    try:
        exists = Path(text_or_path).exists()
    except (OSError, ValueError):
        exists = False
    return not exists and ("=" in text_or_path or text_or_path.lstrip().startswith(("[", "#")))


def _parse_toml(source: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply") from error
    except ValueError as error:
        found = _TOML_POSITION.fullmatch(str(error))
        if not found:
            raise ConfigError(f"{source}: not TOML: {error}") from error
        lines = text.split("\n")
        line, column = found[2] or len(lines), found[3] or len(lines[-1]) + 1
        raise ConfigError(f"{source}: not TOML: line {line}, column {column}: {found[1]}") from error


def _resolve_paths(document: Mapping[str, Any], folder: Path) -> None:
    for table_name, name in _PATH_FIELDS:
        table = document.get(table_name)
        if isinstance(table, dict) and isinstance(table.get(name), str):
            table[name] = _resolved(table[name], folder)


def _resolved(path: str, folder: Path) -> str:
    is_name = path in ("", "random") or "://" in path
    return path if is_name else str((folder / Path(path).expanduser()).resolve())


def _apply_override(document: dict[str, Any], override: str) -> None:
    path, equals, raw = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"--set {override!r}: write --set name=value or --set table.name=value")
    table = document
    for depth, key in enumerate(keys[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override!r}: {dotted(keys[:depth])} is a value and holds no settings")
    value = _override_value(raw.strip(), field_type(keys))
    if tuple(keys) in _PATH_FIELDS and isinstance(value, str):
        value = _resolved(value, Path.cwd())
    table[keys[-1]] = value


def _override_value(raw: str, hint: Any) -> Any:
    """A TOML value; a string needs no quotes, and where the setting is a string nothing else is made of it."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    if parsed.keys() != {"value"}:
        return raw
    is_string_field = hint is str or get_origin(hint) is Literal
    return raw if is_string_field and not isinstance(parsed["value"], str) else parsed["value"]


def _validate(source: str, document: dict[str, Any]) -> RunConfig:
    problems: list[str] = []
    try:
        plain = _plain(document, RunConfig, (), problems)
        cfg = _adapter().validate_json(json.dumps(_over_defaults(plain, dataclasses.asdict(RunConfig()))), strict=True)
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply") from error
    except ValidationError as error:
        problems += [describe(dict(item)) for item in error.errors(include_url=False)]
        raise ConfigError(_message(source, problems)) from error
    problems = problems or cross_field_problems(cfg)
    if problems:
        raise ConfigError(_message(source, problems))
    return cfg


def _over_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Settings laid over the defaults of where they stand: two tables of one type may have other defaults each."""
    merged = {**defaults, **settings}
    for name, value in settings.items():
        if isinstance(value, Mapping) and isinstance(defaults.get(name), Mapping):
            merged[name] = _over_defaults(value, defaults[name])
    return merged


def _message(source: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    return "\n  ".join([f"{source}: {len(problems)} settings are wrong:", *problems])


def _plain(value: Any, hint: Any, keys: tuple[str | int, ...], problems: list[str]) -> Any:
    """The document as JSON can have it; what JSON can't hold becomes a problem and is left out.

    "none" becomes null where a setting may be off.
    """
    if value == _NONE and type(None) in get_args(hint):
        return None
    if isinstance(value, dict):
        types = field_types(hint) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else {}
        items = {name: _plain(item, types.get(name), (*keys, name), problems) for name, item in value.items()}
        return {name: item for name, item in items.items() if item is not _REFUSED}
    if isinstance(value, list):
        values = [_plain(item, None, (*keys, index), problems) for index, item in enumerate(value)]
        return _REFUSED if any(item is _REFUSED for item in values) else values
    problem = _scalar_problem(value)
    if problem:
        problems.append(f"{dotted(keys)} = {problem}")
    return _REFUSED if problem else value


def _scalar_problem(value: object) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}: must be a finite number"
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        return f"{hex(value)[:20]}...: must fit into 64 bits"
    if isinstance(value, str) and value.encode(errors="ignore").decode() != value:
        return f"{shown(value)}: not valid Unicode text"
    if not isinstance(value, str | int | float | None):
        return f"{shown(value)}: dates and times are not used here; quote it if it is text"
    return None
