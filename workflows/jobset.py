"""The training gang: a JobSet of N pods, one a node, that torchrun turns into one world of ranks.

The JobSet is the second way to train; with one node the `train` container runs instead. A resource template applies it
under a fixed name, so that a watcher that was lost finds it again, and the workflow's exit handler deletes it: neither
stopping nor failing a workflow does.

Whatever ends one pod ends the gang, since the others can't go on without its ranks; the JobSet then starts all of them
again and they continue from the last saved state. A user's error fails it at once, and a pod that the platform took
away does not count as one of the restarts.
"""

import re
from typing import Any

import yaml
from hera.workflows import Resource

from workflows.cleanup import JOBSET_RESOURCE, WATCHER_POD_PATCH
from workflows.containers import (
    DISPLAY_NAME,
    Stage,
    capacity_affinity,
    container_security,
    dump,
    field_source,
    platform_environment,
    pod_security_context,
    resource_requirements,
    shm_mounts,
    shm_volumes,
    stage_metrics,
    step_environment,
    tolerations,
    undisturbed,
)
from workflows.parameters import IMAGE, QUEUE, RANKS_PER_NODE, TRAINING_NODES
from workflows.platform import PlatformProfile
from workflows.retries import FINAL_EXIT_CODES, attach_retry

API_VERSION = "jobset.x-k8s.io/v1alpha2"
JOBSET_NAME = "t-{{workflow.name}}"
"""JobSet wants a name that begins with a letter, and room in 63 characters for a pod's: -n-0-15-abcde."""
REPLICATED_JOB = "n"
CONTAINER = "trainer"
LONGEST_NAME = 63 - len("t-") - len("-n-0-99-abcde")
"""Characters of a Workflow's name that leave room for the pods of 100 nodes."""
MASTER_PORT = 29500
MAX_RESTARTS = 6
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
RESTART_ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
TEMPLATE = "train-gang"
_LINGER_S = 86400
"""A finished JobSet that nobody deleted is gone after this."""
_QUEUE_KEY = "moerl/queue"
_QUEUE_KEY_TAG = f"\"{{{{=workflow.parameters.{QUEUE.name} == '' ? '{_QUEUE_KEY}' : '{QUEUE_LABEL}'}}}}\""
"""Kueue refuses its label with an empty value, so without a queue the label has another name."""
_NUMBERS = re.compile(r"^(\s+(?:parallelism|completions): )'(\{\{[^{}]+\}\})'$", re.MULTILINE)


def gang_resource(stage: Stage, profile: PlatformProfile, service_account: str) -> Resource:
    """The resource template that trains `stage` on several nodes; call it inside a WorkflowTemplate's context.

    Without a deadline: it would end the watcher and leave the JobSet running. The pods have theirs.

    Applied on the server's side, which leaves alone what others wrote: Kueue labels the pods of a JobSet that it
    admits, and JobSet refuses any change of them while they run (ValidateUpdate of its webhook).
    """
    return Resource(
        name=TEMPLATE,
        action="apply",
        flags=["--server-side"],
        set_owner_reference=True,
        manifest=gang_manifest(stage, profile),
        success_condition="status.terminalState == Completed",
        failure_condition="status.terminalState == Failed",
        annotations={DISPLAY_NAME: f"{stage.display_name}-gang"},
        service_account_name=service_account,
        affinity=capacity_affinity(profile.capacity["stable"]),
        pod_spec_patch=WATCHER_POD_PATCH,
        retry_strategy=attach_retry(20),
        metrics=stage_metrics(TEMPLATE),
    )


def gang_manifest(stage: Stage, profile: PlatformProfile) -> str:
    """The JobSet as text. Its numbers of pods are tags without quotes: it is YAML once Argo has replaced them."""
    text = yaml.safe_dump(_jobset(stage, profile), sort_keys=False, width=1000)
    return _NUMBERS.sub(r"\1\2", text).replace(f"{_QUEUE_KEY}:", f"{_QUEUE_KEY_TAG}:")


def _jobset(stage: Stage, profile: PlatformProfile) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": {"name": JOBSET_NAME, "labels": _labels() | {_QUEUE_KEY: QUEUE.reference}},
        "spec": {
            "ttlSecondsAfterFinished": _LINGER_S,
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": _failure_policy(),
            "replicatedJobs": [
                {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": _job(stage, profile)}},
            ],
        },
    }


def _labels() -> dict[str, str]:
    """Labels of the JobSet and of its pods; `argo logs WORKFLOW -c trainer` finds pods by the second."""
    return {
        "app.kubernetes.io/name": "argo-moe-rl",
        "workflows.argoproj.io/workflow": "{{workflow.name}}",
    }


def _failure_policy() -> dict[str, Any]:
    """By the rule of the pods' policy that failed the Job: Kubernetes says its index in the Job's message.

    "Container C for pod NS/POD failed with exit code N matching FailJob rule at index I", or "Pod NS/POD has condition
    DisruptionTarget matching FailJob rule at index I" (kubernetes pkg/controller/job/pod_failure_policy.go).
    """
    return {
        "maxRestarts": MAX_RESTARTS,
        "rules": [
            {
                "name": "UserError",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": ["rule at index 0"],
            },
            {
                "name": "Deadline",
                "action": "FailJobSet",
                "onJobFailureReasons": ["DeadlineExceeded"],
            },
            {
                "name": "Disruption",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": ["rule at index 1"],
            },
        ],
    }


def _job(stage: Stage, profile: PlatformProfile) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "parallelism": TRAINING_NODES.reference,
        "completions": TRAINING_NODES.reference,
        "backoffLimit": 0,
        "activeDeadlineSeconds": int(stage.deadline),
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": CONTAINER,
                        "operator": "In",
                        "values": sorted(FINAL_EXIT_CODES),
                    },
                },
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "metadata": {"labels": _labels(), "annotations": undisturbed(stage.domain)},
            "spec": _pod(stage, profile),
        },
    }


def _pod(stage: Stage, profile: PlatformProfile) -> dict[str, Any]:
    size = profile.resources["trainer"]
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": "moerl-step",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": stage.grace_s,
        "securityContext": dump(pod_security_context()),
        "affinity": dump(capacity_affinity(profile.capacity["training"])),
    }
    if size.gpus:
        spec |= {
            "nodeSelector": dict(profile.node_selector),
            "tolerations": [dump(item) for item in tolerations(profile, size) or ()],
        }
    if size.shm:
        spec["volumes"] = [dump(volume) for volume in shm_volumes(size)]
    return spec | {"containers": [_container(stage, profile)]}


def _container(stage: Stage, profile: PlatformProfile) -> dict[str, Any]:
    size = profile.resources["trainer"]
    environment = step_environment(profile.capacity["training"], field_source(RESTART_ATTEMPT))
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": IMAGE.reference,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "steps.torchrun"],
        "args": [*_torchrun_options(stage), "-m", f"steps.{stage.module}", *stage.flags],
        "env": [dump(variable) for variable in [*environment, *platform_environment(profile, size)]],
        "ports": [{"containerPort": MASTER_PORT, "name": "rendezvous"}],
        "resources": dump(resource_requirements(size)),
        "securityContext": dump(container_security(profile, size)),
    }
    if size.shm:
        container["volumeMounts"] = [dump(mount) for mount in shm_mounts(size)]
    return container


def _torchrun_options(stage: Stage) -> list[str]:
    """Kubernetes puts the pod's number in the place of $(JOB_COMPLETION_INDEX)."""
    return [
        f"--nnodes={TRAINING_NODES.reference}",
        f"--nproc-per-node={RANKS_PER_NODE.reference}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={JOBSET_NAME}-{REPLICATED_JOB}-0-0.{JOBSET_NAME}",
        f"--master-port={MASTER_PORT}",
        # The ranks save their state within the pod's grace period; the last seconds are the agent's own.
        f"--shutdown-timeout={stage.grace_s - 20}",
    ]


def deletion_flags() -> list[str]:
    """Arguments of `kubectl delete` for this workflow's JobSet."""
    return [JOBSET_RESOURCE, JOBSET_NAME, "--wait=false"]
