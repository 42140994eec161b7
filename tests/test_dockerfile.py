"""The Dockerfile, read and not built: targets, pins, users, and labels that the image's own file repeats."""

import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moe.transport.versions import IMAGE_FILE
from workflows.containers import USER_ID

REPOSITORY = Path(__file__).resolve().parent.parent
TEXT = (REPOSITORY / "Dockerfile").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
LOCK = dict(line.split("==") for line in (REPOSITORY / "requirements.lock").read_text().splitlines() if "==" in line)
TARGETS = ("control", "cpu", "gpu", "engine")


@dataclass
class Stage:
    base: str
    lines: list[str] = field(default_factory=list)

    def values(self, instruction: str) -> list[str]:
        return [line.split(maxsplit=1)[1] for line in self.lines if line.startswith(f"{instruction} ")]


def read() -> tuple[dict[str, str], dict[str, Stage]]:
    """Global arguments, and the stages by name; a line that goes on, or a here-document, is one instruction."""
    lines = re.sub(r"(?m)^\s*#.*\n", "", TEXT).replace("\\\n", " ")
    lines = re.sub(r"<<JSON (\S+)\n(.*)\nJSON", r"<<JSON \1 \2", lines)
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(None, map(str.strip, lines.splitlines())):
        if found := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            current = stages[found[2]] = Stage(base=found[1])
        elif current is None:
            name, _, value = line.removeprefix("ARG ").partition("=")
            arguments[name] = value
        else:
            current.lines.append(line)
    return arguments, stages


ARGUMENTS, STAGES = read()
each_target = pytest.mark.parametrize("target", TARGETS)


def arguments_of(target: str) -> dict[str, str]:
    pairs = [value.partition("=") for value in STAGES[target].values("ARG")]
    return {name: value if separator else ARGUMENTS[name] for name, separator, value in pairs}


def labels_of(target: str) -> dict[str, str]:
    (text,) = STAGES[target].values("LABEL")
    return dict(re.findall(r'(\S+)="([^"]*)"', text))


def image_file_of(target: str) -> dict[str, str]:
    (found,) = [re.fullmatch(r"<<JSON (\S+) (.*)", v) for v in STAGES[target].values("COPY") if v.startswith("<<")]
    assert found is not None
    assert found[1] == f"/{IMAGE_FILE}"
    content: dict[str, str] = json.loads(found[2])
    return content


def test_there_are_the_four_targets_and_no_moving_base() -> None:
    assert set(TARGETS) < STAGES.keys()
    for image in ARGUMENTS.values():
        assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+[a-z0-9.-]*", image), f"{image}: a full version, not latest"
    bases = {stage.base for stage in STAGES.values()}
    assert bases == {"${PYTHON_IMAGE}", "${GPU_BASE_IMAGE}", "${ENGINE_BASE_IMAGE}", "scratch", "python"}


@each_target
def test_images_run_as_the_numeric_user_of_the_manifests(target: str) -> None:
    assert STAGES[target].values("USER") == [f"{USER_ID}:{USER_ID}"]
    instructions = [line.split()[0] for line in STAGES[target].lines]
    assert instructions[-2:] == ["USER", "CMD"]
    assert "ENTRYPOINT" not in instructions, "Argo needs the command, not an entrypoint, in front of its own"


@each_target
def test_every_requirement_is_held_to_the_lock(target: str) -> None:
    installs = [value for value in STAGES[target].values("RUN") if "pip install" in value]
    assert len(installs) == 1
    assert "-c requirements.lock" in installs[0]


def test_control_has_no_torch_and_the_others_have_what_the_steps_need() -> None:
    (written,) = STAGES["requirements"].values("RUN")
    assert "extras['torch'] + extras['tasks']" in written
    assert [target for target in TARGETS if any("control.txt" in line for line in STAGES[target].lines)] == ["control"]
    assert not [one for one in PROJECT["dependencies"] if one.startswith(("torch", "transformers"))]


def test_the_engines_server_keeps_its_own_python_and_the_host_has_another() -> None:
    (variables,) = [value for value in STAGES["engine"].values("ENV") if "MOERL_ENGINE_PYTHON" in value]
    assert variables == "PATH=/opt/moerl/bin:${PATH} MOERL_ENGINE_PYTHON=/usr/bin/python3"
    (install,) = [value for value in STAGES["engine"].values("RUN") if "pip install" in value]
    assert "/usr/bin/python3 -m venv /opt/moerl" in install


def test_the_gpu_base_has_the_locked_torch() -> None:
    found = re.fullmatch(r"pytorch/pytorch:([\d.]+)-cuda[\d.]+-cudnn\d+-devel", ARGUMENTS["GPU_BASE_IMAGE"])
    assert found is not None and found[1] == LOCK["torch"]


def test_deepep_is_a_build_argument_whose_default_the_extra_allows() -> None:
    name, _, version = arguments_of("gpu")["DEEPEP_REQUIREMENT"].partition("==")
    (extra,) = PROJECT["optional-dependencies"]["deepep"]
    allowed = re.fullmatch(r"([a-z-]+)>=([\d.]+),<=([\d.]+); .*", extra)
    assert allowed is not None
    assert (name, version) == (allowed[1], allowed[3])
    (install,) = [value for value in STAGES["gpu"].values("RUN") if "pip install" in value]
    assert install.endswith("${DEEPEP_REQUIREMENT}")


@each_target
def test_labels_and_the_file_that_steps_read_back_say_the_same(target: str) -> None:
    labels, content, arguments = labels_of(target), image_file_of(target), arguments_of(target)
    assert labels["org.opencontainers.image.version"] == content["version"] == "${VERSION}"
    assert labels["org.opencontainers.image.revision"] == content["revision"] == "${REVISION}"
    assert labels["org.opencontainers.image.base.name"] == content["base"]
    assert labels["org.opencontainers.image.licenses"] == PROJECT["license"]
    ours = {name.removeprefix("argo-moe-rl."): value for name, value in labels.items() if name.startswith("argo-")}
    assert ours == {name: value for name, value in content.items() if name not in ("version", "revision", "base")}
    assert arguments["VERSION"] == PROJECT["version"]
    used = {name for value in content.values() for name in re.findall(r"\$\{(\w+)\}", value)}
    assert used <= arguments.keys()


def test_sources_that_are_copied_exist_and_reach_the_builder() -> None:
    copied = {name for value in STAGES["sources"].values("COPY") for name in value.split()[:-1]}
    assert all((REPOSITORY / name).exists() for name in copied)
    packages = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {package.split(".")[0] for package in packages} <= copied
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert ignored[ignored.index("*") :][0] == "*"
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied | {"requirements.lock"}


def test_no_secret_and_no_index_host_but_pytorchs_is_built_in() -> None:
    assert not re.search(r"(?i)(password|token|secret)\s*=", TEXT)
    hosts = set(re.findall(r"https?://([^/\"\s]+)", TEXT))
    assert hosts == {"download.pytorch.org", "efa-installer.amazonaws.com"}
