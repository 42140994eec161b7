"""Files and texts -> manifests, those that resource templates hold as text included."""

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from steps.errors import DataError, UsageError
from workflows.lint.model import Manifest, Template, mapping, strings, templates_of
from workflows.lint.tags import replace_tags, samples_for

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML was built without libyaml: the same, slower
    from yaml import SafeLoader  # type: ignore[assignment]

SUFFIXES = (".yaml", ".yml")
KUSTOMIZATION = "kustomization.yaml"
NO_OBJECTS = ("Kustomization", "Component")
"""Kinds that only kustomize reads."""
WHOLE = ("create", "apply", "replace")
"""Actions of a resource template that hold a whole manifest; the others hold as much as names an object."""


def read_files(paths: Iterable[Path]) -> dict[str, str]:
    """File name -> text; a folder stands for what its kustomization lists, or without one for the manifests in it.

    Patches are not applied. UsageError for what can't be read.
    """
    found: dict[str, str] = {}
    for path in paths:
        for file in _files(path):
            found[str(file)] = _read(file)
    return found


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    kustomization = path / KUSTOMIZATION
    if kustomization.is_file():
        listed = _load(str(kustomization), _read(kustomization))
        resources = [name for document in listed for name in strings(mapping(document).get("resources"))]
        return [file for name in resources for file in _files(Path(os.path.normpath(path / name)))]
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise UsageError(f"{path}: there is no manifest (*.yaml, *.yml) in this folder")
    return files


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}; give a file or folder of manifests") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text at byte {error.start}") from None


def parse(texts: Mapping[str, str]) -> list[Manifest]:
    """The documents of these texts by file name. DataError, one line, for text that is no manifest."""
    return [manifest for source, text in texts.items() for manifest in _parse(source, text)]


def _parse(source: str, text: str) -> Iterator[Manifest]:
    for document in _load(source, text):
        if document is None:
            continue
        if not isinstance(document, dict) or not document.get("kind"):
            raise DataError(f"{source}: a document without `kind`: it is no manifest")
        if document["kind"] in NO_OBJECTS:
            continue
        items = document.get("items") if document["kind"] == "List" else [document]
        for item in items if isinstance(items, list) else []:
            yield from expand(Manifest(source=source, body=mapping(item)))


def _load(source: str, text: str) -> list[object]:
    try:
        return list(yaml.load_all(text, Loader=_UniqueKeys))
    except yaml.YAMLError as error:
        raise DataError(f"{source}: not YAML: {_one_line(error)}") from None


def expand(manifest: Manifest) -> Iterator[Manifest]:
    """A manifest, and those that its resource templates hold."""
    yield manifest
    for template in templates_of(manifest):
        resource = mapping(template.body.get("resource"))
        text = resource.get("manifest")
        if resource.get("action") in WHOLE and isinstance(text, str) and text.strip():
            yield from _held(template, text)


def _held(template: Template, text: str) -> Iterator[Manifest]:
    """Once with the parameters' defaults and, where that gives another text, once with those that are empty filled."""
    parent = template.manifest
    place = f"{template.path}.resource.manifest"
    previous = ""
    for filled in (False, True):
        samples = samples_for(parent.body, parent.spec, template.body, filled=filled)
        replaced = replace_tags(text, samples, place)
        if replaced == previous:
            return
        previous = replaced
        try:
            body = yaml.load(replaced, Loader=_UniqueKeys)
        except yaml.YAMLError as error:
            raise DataError(
                f"{parent.source}: {place}: not YAML once its tags are replaced: {_one_line(error)}"
            ) from None
        if not isinstance(body, dict) or not body.get("kind"):
            raise DataError(f"{parent.source}: {place}: it has no `kind`")
        yield from expand(Manifest(source=parent.source, body=body, place=place, holder=template))


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {problem}" if mark else problem


class _UniqueKeys(SafeLoader):
    """Two equal keys in a mapping: the API server takes the last, silently or not at all."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool):
                raise yaml.constructor.ConstructorError(None, None, "a key that is no text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
