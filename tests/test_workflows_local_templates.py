"""This repository's campaign, as it is committed, with stand-ins for the steps' modules."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.local_cluster import Cluster
from workflows.local.status import WorkflowStatus

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATES = [
    yaml.safe_load((REPOSITORY / "templates" / f"policy-{name}.yaml").read_text()) for name in ("campaign", "iteration")
]
ENVIRONMENT: dict[str, Any] = {
    "config_maps": {"moerl-environment": {"store": "/store"}},
    "secrets": {"moerl-credentials": {"database-url": "sqlite:////tmp/x.db"}},
}

# Writes every output that its templates ask for; fails as $FAULT says: "module:exit code:attempts that fail".
STAND_IN = """
import os, sys
from pathlib import Path

with open(os.environ["TRACE"], "a") as trace:
    trace.write(f"{{os.environ['POD_NAME']}} {name} {{' '.join(sys.argv[1:])}}\\n")
module, code, attempts = os.environ["FAULT"].split(":")
if module == "{name}" and int(os.environ["MOERL_ATTEMPT"]) < int(attempts):
    sys.exit(int(code))
for output in {outputs}:
    value = {{"iterations": os.environ["ITERATIONS"], "rollout-workers": "2", "engine-pods": "0"}}.get(output, "1")
    Path(os.environ["MOERL_OUTPUTS_DIR"], output).write_text(value)
"""


def write_stand_ins(folder: Path) -> None:
    outputs: dict[str, set[str]] = {}
    for manifest in TEMPLATES:
        for template in manifest["spec"]["templates"]:
            if "container" in template:
                module = template["container"]["command"][2].removeprefix("steps.")
                parameters = template.get("outputs", {}).get("parameters", [])
                outputs.setdefault(module, set()).update(parameter["name"] for parameter in parameters)
    (folder / "modules" / "steps").mkdir()
    (folder / "modules" / "steps" / "__init__.py").touch()  # otherwise a real package elsewhere on the path wins
    for module, names in outputs.items():
        (folder / "modules" / "steps" / f"{module}.py").write_text(STAND_IN.format(name=module, outputs=sorted(names)))


def run_campaign(cluster: Cluster) -> WorkflowStatus:
    arguments = {"run": "r", "config": "a = '{x}'", "rollout-workers": "2"}
    parameters = [{"name": name, "value": value} for name, value in arguments.items()]
    spec = {"workflowTemplateRef": {"name": "policy-campaign"}, "arguments": {"parameters": parameters}}
    return cluster.submit({"kind": "Workflow", "metadata": {"name": "r"}, "spec": spec})


def open_campaign(folder: Path, fault: str, iterations: int = 2) -> Cluster:
    variables = {"FAULT": fault, "ITERATIONS": str(iterations)}
    cluster = Cluster(folder, templates=TEMPLATES, extra_env=variables, **ENVIRONMENT)
    if not (folder / "modules" / "steps").exists():
        write_stand_ins(folder)
    return cluster


def names_of(cluster: Cluster) -> list[str]:
    return [line.split()[0] for line in cluster.trace()]


def test_a_campaign_runs_its_iterations_one_after_the_other(tmp_path: Path) -> None:
    with open_campaign(tmp_path, "none:0:0") as cluster:
        status = run_campaign(cluster)
        assert (status.phase, status.message) == ("Succeeded", "")
        iteration = ["plan", "rollout", "rollout", "reward", "flush", "train", "publish", "evaluate", "report"]
        assert names_of(cluster) == ["init_run", *iteration, *iteration, "report"]
        assert "train --run r --iteration 00002" in cluster.trace()
        child = cluster.status("r-00002")
        assert child is not None and child.outputs["summary"] == "1"


@pytest.mark.parametrize("module", ["plan", "rollout", "reward", "flush", "train", "publish", "evaluate", "report"])
@pytest.mark.parametrize("code", [75, 137])
def test_an_interrupted_step_is_run_again_alone(tmp_path: Path, module: str, code: int) -> None:
    with open_campaign(tmp_path, f"{module}:{code}:1", iterations=1) as cluster:
        assert run_campaign(cluster).phase == "Succeeded"
        ran = names_of(cluster)
    expected = {"init_run": 1, "rollout": 2, "report": 2}
    for name in set(ran):
        count = expected.get(name, 1) * (2 if name == module else 1)
        assert ran.count(name) == count, name


def test_bad_data_stops_the_campaign_and_resuming_it_goes_on_where_it_was(tmp_path: Path) -> None:
    with open_campaign(tmp_path, "train:65:99") as cluster:
        status = run_campaign(cluster)
        assert status.phase == "Failed"
        assert names_of(cluster).count("train") == 1
        assert cluster.status("r-00002") is None
    with open_campaign(tmp_path, "none:0:0") as cluster:
        assert run_campaign(cluster).phase == "Succeeded"
        ran = names_of(cluster)
    assert (ran.count("init_run"), ran.count("plan"), ran.count("rollout"), ran.count("train")) == (1, 2, 4, 3)
