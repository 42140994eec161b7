"""What the cluster commands ask of the API server: what our Role grants, no more and no less; and their refusals."""

from pathlib import Path

import pytest

from tests.cluster_runs import TEMPLATES, add_pod, failed_run, half_done_run
from tests.doubles.kubernetes_api import KubernetesApi
from tests.doubles.kubernetes_rbac import role_rules
from tests.doubles.kubernetes_store import ApiError
from tests.fixtures_cluster import Moerl
from workflows.cluster.access import OPERATOR_RIGHTS

Call = tuple[str, str, str]
"""Verb, API group, resource with its subresource."""
RBAC = TEMPLATES / "install" / "rbac.yaml"
DOCTOR_TRIES = {"secrets", "nodes", "nodepools", "deployments", "subjectaccessreviews", "selfsubjectaccessreviews"}
"""What `moerl doctor` looks at where it may: it says which it could not see."""
COMMANDS = [
    ["submit", "--run-id", "new"],
    ["status", "digits"],
    ["watch", "digits"],
    ["logs", "digits"],
    ["stop", "digits"],
    ["resume", "digits", "-n", "moerl"],
]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=[command[0] for command in COMMANDS])


def granted() -> set[Call]:
    return {
        (verb, group, resource)
        for rule in role_rules(RBAC, "moerl-operator")
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_the_role_grants_what_the_commands_call_and_nothing_else(api: KubernetesApi, moerl: Moerl) -> None:
    half_done_run(api)
    add_pod(api, "digits-init-1", "digits", "made the run")
    declared = api.get("workflowtemplates", "policy-campaign")["spec"]["arguments"]["parameters"]
    queued = [entry | ({"value": "gpu"} if entry["name"] == "queue" else {}) for entry in declared]
    api.patch("workflowtemplates", "policy-campaign", {"spec": {"arguments": {"parameters": queued}}})
    for arguments in (["submit", "--run-id", "new"], ["status", "digits"], ["logs", "digits"], ["stop", "digits"]):
        assert moerl(*arguments)[0] == 0
    moerl("doctor")
    api.watch_limit_s = 0.05
    api.refuse("WATCH workflows", times=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workflows.cluster.watch.PAUSES_S", ())
        assert moerl("watch", "digits")[0] == 69
    made = {(request.verb, request.group, request.full_resource) for _, request in api.calls}
    made = {call for call in made if call[2] not in DOCTOR_TRIES}
    assert made == granted()
    rights = {(right.verb, right.resource.group, right.resource.plural, right.subresource) for right in OPERATOR_RIGHTS}
    assert {(verb, group, f"{one}/{sub}" if sub else one) for verb, group, one, sub in rights} == granted()


@each_command
def test_no_cluster_is_one_line(
    api: KubernetesApi, moerl: Moerl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    code, out, err = moerl(*command)
    assert (code, out, err.count("\n")) == (78, "", 1)
    assert "no cluster is configured" in err and "KUBECONFIG" in err


@each_command
def test_a_cluster_that_is_down_is_one_line(api: KubernetesApi, moerl: Moerl, command: list[str]) -> None:
    api.refuse("GET", times=100)
    code, out, err = moerl(*command)
    assert (code, out, err.count("\n")) == (69, "", 1)
    assert api.url in err


@each_command
def test_a_cluster_without_argo_is_one_line(api: KubernetesApi, moerl: Moerl, command: list[str]) -> None:
    api.remove_group("argoproj.io")
    code, out, err = moerl(*command)
    assert (code, out, err.count("\n")) == (78, "", 1)
    assert "install Argo Workflows" in err


@each_command
def test_what_is_forbidden_is_one_line(api: KubernetesApi, moerl: Moerl, kubeconfig: Path, command: list[str]) -> None:
    api.kubeconfig(kubeconfig, api.add_user("guest", []))
    code, out, err = moerl(*command)
    assert (code, out, err.count("\n")) == (78, "", 1)
    assert 'User "guest" cannot' in err and "moerl-operator" in err


@each_command
def test_an_expired_sign_in_is_one_line(api: KubernetesApi, moerl: Moerl, kubeconfig: Path, command: list[str]) -> None:
    api.kubeconfig(kubeconfig, "old-token")
    code, out, err = moerl(*command)
    assert (code, out, err.count("\n")) == (78, "", 1)
    assert "sign in again" in err


@each_command
def test_a_server_in_trouble_is_one_line(api: KubernetesApi, moerl: Moerl, command: list[str]) -> None:
    api.refuse("GET", ApiError(503, "ServiceUnavailable", "the server is currently unable to handle the request"), 100)
    code, out, err = moerl(*command)
    assert (code, out, err.count("\n")) == (69, "", 1)
    assert "503" in err


@pytest.mark.parametrize("command", [["submit", "--run-id", "new"], ["resume", "digits"]], ids=["submit", "resume"])
def test_a_conflict_is_one_line(api: KubernetesApi, moerl: Moerl, command: list[str]) -> None:
    failed_run(api)
    api.add("workflows", {"metadata": {"name": "new"}, "spec": {}})
    api.add("workflows", {"metadata": {"name": "digits-2"}, "spec": {"arguments": _run_argument("digits")}})
    code, out, err = moerl(*command)
    assert (code, out, err.count("\n")) == (64, "", 1)
    assert "exists in namespace moerl" in err


def test_stop_gives_up_on_a_conflict_that_stays(api: KubernetesApi, moerl: Moerl) -> None:
    half_done_run(api)
    api.refuse("PATCH", ApiError(409, "Conflict", "the object has been modified"), 100)
    code, out, err = moerl("stop", "digits")
    assert (code, out, err.count("\n")) == (64, "", 1)


def test_a_cluster_that_is_away_does_not_hide_that_the_run_is_not_here(api: KubernetesApi, moerl: Moerl) -> None:
    api.refuse("GET", times=100)
    code, _, err = moerl("resume", "absent")
    assert code == 69
    assert "no run 'absent' in runs" in err and api.url in err


def test_without_a_cluster_resume_speaks_of_the_runs_here_alone(
    moerl: Moerl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    code, _, err = moerl("resume", "absent")
    assert code == 65 and "no run 'absent' in runs" in err and "cluster" not in err


def _run_argument(run: str) -> dict[str, list[dict[str, str]]]:
    return {"parameters": [{"name": "run", "value": run}]}
