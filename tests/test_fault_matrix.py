"""Every leaf step of a campaign, killed before, in the middle of and after its commit point, by SIGTERM and by SIGKILL.

Real steps in the local executor, from the committed manifests. The campaign completes, the steps that were hit are
retried as their retry rules say and no other, and the weights are those of a campaign that nobody disturbed.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steps.adapters import ledger
from steps.adapters.database import open_database
from tests.fixtures_steps import REPOSITORY, TINY_CONFIG
from workflows.local.events import Event
from workflows.local.executor import LocalCluster
from workflows.local.model import Container
from workflows.local.parsing import parse_template_manifest
from workflows.local.status import NodeStatus, load_status
from workflows.local.warm_client import DEFAULT_PRELOAD, Preload
from workflows.run_command import load_templates

CONFIG = TINY_CONFIG.replace("lease_s = 2.0", "lease_s = 0.5") + "\n[reward]\nlease_s = 0.5\n"
RANKS = CONFIG + "[train]\nranks = 2\n[moe]\ndispatcher = 'all_to_all'\n"
SIGNALS = {"sigterm": signal.SIGTERM, "sigkill": signal.SIGKILL}
MOMENTS = ("before", "middle", "after")
# Template -> the step of tests/step_faults.py; which iteration it is hit in. The others of that iteration are not.
HIT = {
    "init": "init_run 0",
    "plan": "plan 1",
    "rollout": "rollout 2",
    "reward": "reward 1",
    "flush": "flush 2",
    "train": "train 1",
    "publish": "publish 2",
    "evaluate": "evaluate 1",
    "report": "report 2",
    "summary": "summary 0",
}
CASES = [(name, moment) for name in SIGNALS for moment in MOMENTS]
# SIGTERM asks. These have work before them and stop; the others are about to end, and finish.
STOP_WHEN_ASKED = {
    "before": {"init", "rollout", "reward", "train", "evaluate"},
    "middle": {"init", "rollout", "reward", "train"},
    "after": {"init", "rollout", "reward"},  # init has responses to score, the others would ask for another unit
}


def run_id(name: str, moment: str) -> str:
    return f"{name}-{moment}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("faults")
    faults = {
        run_id(name, moment): {step: [int(SIGNALS[name]), moment] for step in HIT.values()} for name, moment in CASES
    }
    faults["gang"] = {"train 1": [int(signal.SIGKILL), "middle"]}
    with LocalCluster(
        folder / "runs",
        config_maps={"moerl-environment": {"store": f"{folder}/store"}},
        secrets={"moerl-credentials": {"database-url": f"sqlite:///{folder}/moerl.sqlite"}},
        templates=load_templates(),
        on_event=lambda event: lose_watcher(cluster, event),
        working_dir=REPOSITORY,
        extra_env={
            "MOERL_CACHE_DIR": f"{folder}/cache",
            "FAULTS": json.dumps(faults),
            "FAULTS_DIR": str(folder),
        },
        backoff_scale=0.0,
        preload=Preload(first=(*DEFAULT_PRELOAD.first, "tests.step_faults")),
    ) as cluster:
        yield cluster


def lose_watcher(cluster: LocalCluster, event: Event) -> None:
    """Takes away the pod that watches the first iteration of the campaign "watched" while that trains."""
    began = (event.workflow, event.template, event.node_type, event.phase, event.kind)
    if began == ("watched-00001", "train", "Pod", "Running", "node"):
        status = cluster.status("watched")
        assert status is not None
        (watcher,) = (node.name for node in status.leaves() if (node.template, node.phase) == ("child", "Running"))
        cluster.delete_pod("watched", watcher)


def run_campaign(cluster: LocalCluster, run: str, config: str = CONFIG, training_nodes: int = 0) -> str:
    """Runs it to its end, which has to be a success; the sha256 of the last weights."""
    parameters = {"run": run, "config": config, "iterations": "2", "rollout-workers": "1", "reward-workers": "1"}
    parameters["training-nodes"] = str(training_nodes)
    arguments = {"parameters": [{"name": name, "value": value} for name, value in parameters.items()]}
    spec: dict[str, Any] = {"workflowTemplateRef": {"name": "policy-campaign"}, "arguments": arguments}
    status = cluster.submit({"kind": "Workflow", "metadata": {"name": run}, "spec": spec})
    assert status.phase == "Succeeded", status.message
    return ledger.list_publications(open_database(database_of(cluster)), run)[-1].weights_sha256


def database_of(cluster: LocalCluster) -> str:
    return f"sqlite:///{folder_of(cluster)}/moerl.sqlite"


def folder_of(cluster: LocalCluster) -> Path:
    return cluster.root.parent


def attempts_of(cluster: LocalCluster, run: str) -> dict[str, list[NodeStatus]]:
    """The attempts of each leaf of the campaign and its two iterations, by "template iteration"."""
    found: dict[str, list[NodeStatus]] = {}
    for iteration, name in ((0, run), (1, f"{run}-00001"), (2, f"{run}-00002")):
        status = load_status(cluster.root, name)
        assert status is not None
        for node in status.leaves():
            found.setdefault(f"{node.template} {iteration}", []).append(node)
    return found


@pytest.fixture(scope="module")
def undisturbed_weights(cluster: LocalCluster) -> str:
    weights = run_campaign(cluster, "undisturbed")
    assert {len(attempts) for name, attempts in attempts_of(cluster, "undisturbed").items() if "child" not in name} == {
        1
    }
    return weights


@pytest.mark.parametrize(("name", "moment"), CASES)
def test_a_kill_costs_an_attempt_and_changes_nothing(
    cluster: LocalCluster, name: str, moment: str, undisturbed_weights: str
) -> None:
    run = run_id(name, moment)
    assert run_campaign(cluster, run) == undisturbed_weights
    hit = {f"{template} {step.split()[1]}" for template, step in HIT.items()}
    for leaf, attempts in attempts_of(cluster, run).items():
        template = leaf.split()[0]
        codes = [int(node.exit_code or 0) for node in attempts]
        if leaf not in hit:
            assert codes == [0] * (2 if template == "child" else 1), leaf
        elif name == "sigkill":
            assert codes == [137, 0], leaf
        else:
            assert codes == ([75, 0] if template in STOP_WHEN_ASKED[moment] else [0]), leaf
    marks = {path.name for path in folder_of(cluster).glob(f"{run} *")}
    assert marks == {f"{run} {step}" for step in HIT.values()}


def test_a_lost_watcher_attaches_to_its_iteration_again(cluster: LocalCluster, undisturbed_weights: str) -> None:
    assert run_campaign(cluster, "watched") == undisturbed_weights
    attempts = attempts_of(cluster, "watched")
    watchers = [(node.phase, node.message) for node in attempts.pop("child 0")]
    assert watchers == [("Error", "pod deleted"), ("Succeeded", ""), ("Succeeded", "")]
    assert {len(nodes) for nodes in attempts.values()} == {1}


def test_a_killed_rank_restarts_the_jobset_which_trains_as_local_ranks_do(cluster: LocalCluster) -> None:
    undisturbed = run_campaign(cluster, "ranks", RANKS)
    assert run_campaign(cluster, "gang", RANKS, training_nodes=2) == undisturbed
    pods = sorted(path.name for path in cluster.root.glob("gang-0000*/t-gang-*"))
    first = [f"t-gang-00001-n-0-{pod}{restart}" for pod in (0, 1) for restart in ("", "-restart-1")]
    assert pods == [*first, "t-gang-00002-n-0-0", "t-gang-00002-n-0-1"]
    assert not list((cluster.root / ".jobsets").glob("*.json"))  # the exit handlers have deleted them


def test_the_matrix_holds_every_leaf_step_of_a_campaign() -> None:
    specs = dict(filter(None, (parse_template_manifest(manifest) for manifest in load_templates())))
    leaves = {
        template.name
        for name in ("policy-campaign", "policy-iteration")
        for template in specs[name].templates.values()
        if isinstance(template.body, Container)
    }
    assert leaves == set(HIT)
