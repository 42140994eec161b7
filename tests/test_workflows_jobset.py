"""The training gang: its pods, its rendezvous, which failures start it again, and how it ends with its workflow."""

import re
from typing import Any

import pytest
import yaml

from workflows import catalog, jobset
from workflows.containers import USER_ID
from workflows.iteration import TRAIN
from workflows.local.expressions import evaluate_bool
from workflows.local.variables import substitute
from workflows.platform import CPU, load_profile

SCOPE = {
    "workflow.name": "run-1-00007",
    "workflow.parameters.run": "run-1",
    "workflow.parameters.iteration": "00007",
    "workflow.parameters.training-nodes": "4",
    "workflow.parameters.ranks-per-node": "8",
    "workflow.parameters.queue": "",
    "workflow.parameters.image": "moerl:gpu",
    "workflow.parameters.environment": "moerl-environment",
    "workflow.parameters.credentials": "moerl-credentials",
}


def filled_in(profile: str = "p5en", **parameters: str) -> dict[str, Any]:
    scope = SCOPE | {f"workflow.parameters.{name}": value for name, value in parameters.items()}
    text = jobset.gang_manifest(TRAIN, load_profile(profile))
    manifest: dict[str, Any] = yaml.safe_load(substitute(text, scope, "test"))
    return manifest


GANG = filled_in()
JOB: dict[str, Any] = GANG["spec"]["replicatedJobs"][0]["template"]["spec"]
POD: dict[str, Any] = JOB["template"]["spec"]
CONTAINER: dict[str, Any] = POD["containers"][0]
RESOURCE: dict[str, Any] = next(
    template
    for template in yaml.safe_load(catalog.render_all()["policy-iteration.yaml"])["spec"]["templates"]
    if template["name"] == "train-gang"
)


def test_numbers_of_pods_are_numbers_once_argo_has_replaced_the_tags() -> None:
    assert JOB["parallelism"] == JOB["completions"] == 4
    assert JOB["completionMode"] == "Indexed"
    (replicated,) = GANG["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1


def test_everything_else_is_text_whatever_the_tags_become() -> None:
    manifest = filled_in(run="007", iteration="00010", image="1")
    container = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert all(isinstance(word, str) for word in container["args"])
    assert container["args"][-4:] == ["--run", "007", "--iteration", "00010"]
    assert container["image"] == "1"


def test_torchrun_meets_at_the_first_pods_host_name() -> None:
    options = dict(word.removeprefix("--").split("=") for word in CONTAINER["args"] if "=" in word)
    name = GANG["metadata"]["name"]
    assert CONTAINER["command"] == ["python", "-m", "steps.torchrun"]
    assert options["nnodes"] == "4"
    assert options["nproc-per-node"] == "8"
    assert options["node-rank"] == "$(JOB_COMPLETION_INDEX)"
    assert options["master-addr"] == f"{name}-n-0-0.{name}"
    assert {"containerPort": int(options["master-port"]), "name": "rendezvous"} in CONTAINER["ports"]
    # The first pod is found before it is ready, and so are the others by it.
    assert GANG["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert CONTAINER["args"][CONTAINER["args"].index("-m") :][:2] == ["-m", "steps.train"]


def test_ranks_save_their_state_within_the_pods_grace_period() -> None:
    (timeout,) = (word for word in CONTAINER["args"] if word.startswith("--shutdown-timeout="))
    assert 60 <= int(timeout.split("=")[1]) < POD["terminationGracePeriodSeconds"]


def test_name_is_a_valid_dns_label_also_for_a_run_that_begins_with_a_digit() -> None:
    name = jobset.JOBSET_NAME.replace("{{workflow.name}}", "2026-run-00001")
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
    longest = jobset.JOBSET_NAME.replace("{{workflow.name}}", "x" * jobset.LONGEST_NAME)
    assert len(f"{longest}-{jobset.REPLICATED_JOB}-0-99-abcde") == 63


def test_a_gang_that_nobody_deleted_goes_but_not_before_its_end_was_seen() -> None:
    assert GANG["spec"]["ttlSecondsAfterFinished"] >= 3600


def test_pods_never_run_twice_alone_since_the_gang_starts_together() -> None:
    assert POD["restartPolicy"] == "Never"
    assert JOB["backoffLimit"] == 0


def test_a_users_error_and_a_deadline_fail_the_gang_and_a_disruption_costs_no_restart() -> None:
    final, disrupted = JOB["podFailurePolicy"]["rules"]
    assert final["onExitCodes"] == {"containerName": "trainer", "operator": "In", "values": [64, 65, 78]}
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    policy = GANG["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0

    def action(reason: str, message: str) -> str:
        """As JobSet chooses: the first rule that the Job's failure matches."""
        for rule in policy["rules"]:
            patterns = rule.get("onJobFailureMessagePatterns", [""])
            if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
                return str(rule["action"])
        return "RestartJobSet"

    by_exit_code = "Container trainer for pod moerl/x failed with exit code 78 matching FailJob rule at index 0"
    by_condition = "Pod moerl/x has condition DisruptionTarget matching FailJob rule at index 1"
    assert action("PodFailurePolicy", by_exit_code) == "FailJobSet"
    assert action("PodFailurePolicy", by_condition) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action("DeadlineExceeded", "Job was active longer than specified deadline") == "FailJobSet"
    assert action("BackoffLimitExceeded", "Job has reached the specified backoff limit") == "RestartJobSet"


def test_rule_names_are_those_that_jobset_takes() -> None:
    names = [rule["name"] for rule in GANG["spec"]["failurePolicy"]["rules"]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", name) for name in names)


def test_whole_nodes_are_asked_for_where_there_are_gpus() -> None:
    limits = CONTAINER["resources"]["limits"]
    assert limits == CONTAINER["resources"]["requests"]
    assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"], limits["hugepages-2Mi"]) == ("8", "16", "5120Mi")
    assert POD["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5en.48xlarge"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in POD["tolerations"]
    assert POD["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "200Gi"}}]
    assert CONTAINER["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    cpu_pod = filled_in("cpu")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert not {"nodeSelector", "tolerations", "volumes"} & set(cpu_pod)


def test_pods_are_not_root_hold_no_token_and_know_their_restart() -> None:
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["runAsUser"] == USER_ID
    assert POD["automountServiceAccountToken"] is False
    environment = {variable["name"]: variable for variable in CONTAINER["env"]}
    attempt = environment["MOERL_ATTEMPT"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert attempt == "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    for name, variable in environment.items():
        if any(word in name for word in ("KEY", "SECRET", "DATABASE")):
            assert set(variable["valueFrom"]) == {"secretKeyRef"}


def test_karpenter_leaves_the_gang_alone() -> None:
    assert JOB["template"]["metadata"]["annotations"] == {"karpenter.sh/do-not-disrupt": "true"}


def test_manifest_is_the_same_for_every_attempt_of_the_watcher() -> None:
    """JobSet's template is immutable: with another one, applying it again would be refused."""
    assert "retries" not in jobset.gang_manifest(TRAIN, CPU)


def test_logs_of_the_pods_are_found_by_the_workflows_name() -> None:
    assert JOB["template"]["metadata"]["labels"]["workflows.argoproj.io/workflow"] == "run-1-00007"


@pytest.mark.parametrize(
    ("queue", "label"), [("", {"moerl/queue": ""}), ("training", {"kueue.x-k8s.io/queue-name": "training"})]
)
def test_kueues_label_is_there_only_with_a_queue_since_it_may_not_be_empty(queue: str, label: dict[str, str]) -> None:
    labels = filled_in(queue=queue)["metadata"]["labels"]
    assert {key: value for key, value in labels.items() if "queue" in key} == label


def test_watcher_applies_a_fixed_name_and_ends_with_the_jobsets_terminal_state() -> None:
    resource = RESOURCE["resource"]
    assert resource["action"] == "apply"
    assert "generateName" not in resource["manifest"]
    assert resource["flags"] == ["--server-side"], "else applying it again undoes what Kueue wrote, and JobSet refuses"
    assert resource["setOwnerReference"] is True
    assert resource["successCondition"] == "status.terminalState == Completed"
    assert resource["failureCondition"] == "status.terminalState == Failed"
    assert "activeDeadlineSeconds" not in RESOURCE
    assert JOB["activeDeadlineSeconds"] == int(TRAIN.deadline)


@pytest.mark.parametrize(
    ("message", "again"),
    [
        ("pod deleted", True),
        ("main: Error (exit code 64): context canceled", True),
        ("main: Error (exit code 64): failure condition 'status.terminalState in (Failed)' evaluated true", False),
        ('main: Error (exit code 64): admission webhook "vjobset.kb.io" denied the request: too long', False),
        ('main: Error (exit code 64): no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"', False),
    ],
)
def test_lost_watcher_finds_the_gang_again_and_a_failed_gang_is_final(message: str, again: bool) -> None:
    last_retry = {"exitCode": "64", "status": "Failed", "duration": "60", "message": message}
    scope: dict[str, Any] = {"lastRetry": last_retry, "retries": "0"}
    assert evaluate_bool(RESOURCE["retryStrategy"]["expression"], scope) is again
