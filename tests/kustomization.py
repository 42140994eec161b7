"""What kustomize would build, without its binary: the subset that templates/ uses, and anything else refused."""

import copy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATES = REPOSITORY / "templates"
INSTALL = TEMPLATES / "install"
LAPTOP = TEMPLATES / "overlays" / "laptop"
EKS = TEMPLATES / "overlays" / "eks-p5en"
NODES = EKS / "nodes"
CLUSTER_SCOPED = {"Namespace", "ClusterRole", "EC2NodeClass", "NodePool", "NodeOverlay"}
KNOWN_FIELDS = {"apiVersion", "kind", "namespace", "resources", "patches"}
HAS_KUBECTL = shutil.which("kubectl") is not None

Document = dict[str, Any]


@dataclass
class Build:
    """The documents of a folder, and the files that they came from."""

    documents: list[Document] = field(default_factory=list)
    files: set[Path] = field(default_factory=set)

    def one(self, kind: str, name: str) -> Document:
        found = [one for one in self.documents if (one["kind"], one["metadata"]["name"]) == (kind, name)]
        assert len(found) == 1, f"{len(found)} of {kind} {name}"
        return found[0]

    def all(self, *kinds: str) -> list[Document]:
        return [one for one in self.documents if one["kind"] in kinds]


def identity(document: Document) -> tuple[str, str, str]:
    metadata = document["metadata"]
    return (document["kind"], metadata.get("namespace", ""), metadata["name"])


def build(folder: Path) -> Build:
    """All documents of the kustomization in `folder`; AssertionError for what kustomize would refuse."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization["kind"] == "Kustomization"
    assert set(kustomization) <= KNOWN_FIELDS, set(kustomization) - KNOWN_FIELDS
    built = Build(files={folder / "kustomization.yaml"})
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        if path.is_dir():
            assert not folder.is_relative_to(path), f"{folder} is inside its base {path}"
            base = build(path)
            built.documents += base.documents
            built.files |= base.files
        else:
            assert path.parent == folder, f"{path} is not in {folder}"
            built.documents += documents_of(path)
            built.files.add(path)
    for patch in kustomization.get("patches", []):
        for change in documents_of(folder / patch["path"]):
            _merge(built.one(change["kind"], change["metadata"]["name"]), change)
        built.files.add(folder / patch["path"])
    for document in built.documents:
        if "namespace" in kustomization and document["kind"] not in CLUSTER_SCOPED:
            document["metadata"]["namespace"] = kustomization["namespace"]
    identities = [identity(document) for document in built.documents]
    assert len(set(identities)) == len(identities), "one object twice"
    return built


def documents_of(path: Path) -> list[Document]:
    return copy.deepcopy(_parsed(path))


@cache
def _parsed(path: Path) -> list[Document]:
    return parse(path.read_text())


def parse(text: str) -> list[Document]:
    """The C parser is five times as fast where PyYAML has it, and the rendered workflows are long."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [document for document in yaml.load_all(text, loader) if document]


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """(name of the owner, pod spec) of every workload that is no Workflow."""
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def _merge(target: Document, patch: Document) -> None:
    """A strategic merge patch as our patches use it: maps alone."""
    for key, value in patch.items():
        assert not isinstance(value, list), f"{key}: kustomize merges lists by rules of its own"
        if isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value
