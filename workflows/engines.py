"""Rollout engines that outlive an iteration: a StatefulSet of hosts, each beside a vLLM or SGLang server of its own.

A campaign applies it once, after `init`, and deletes it when it ends; its iterations' workers know each host by the
name that the headless Service gives it. A host that is lost (Spot) comes back empty: the next worker that asks has it
fetch, load and prove the policy. Every name comes from the run alone, so that a campaign that goes on with a run finds
what an earlier one left behind.
"""

import re
from typing import Any

import yaml
from hera.workflows import Parameter, Resource

from workflows.cleanup import WATCHER_POD_PATCH
from workflows.containers import (
    DISPLAY_NAME,
    capacity_affinity,
    container_security,
    dump,
    from_field,
    pod_security_context,
    resource_requirements,
    shm_mounts,
    shm_volumes,
    stage_metrics,
    step_environment,
    tolerations,
)
from workflows.parameters import ENGINE_IMAGE, ENGINE_PODS, ROLLOUT_CAPACITY, RUN
from workflows.platform import PlatformProfile
from workflows.retries import attach_retry

ENGINES_NAME = f"e-{RUN.reference}"
"""Of the StatefulSet and of its Service, whose name must begin with a letter; a run's id may begin with a digit."""
ENGINE_LABEL = "moerl/engines"
DOMAIN_LABEL = "moerl/domain"
"""Of nodes; those of the training domain are not for engines, which would hold them from one iteration to the next."""
CONTAINER = "engine"
PORT = 8700
GRACE_S = 30
SERVICE_ACCOUNT = "moerl-engines"
POD_TEMPLATE = "engine-pods"
SERVICE_TEMPLATE = "engine-service"
START_DEADLINE_S = 7200
"""For nodes to come and the image to be pulled, until every host answers; a policy is loaded when it is asked for."""
_PODS = f"{{{{inputs.parameters.{ENGINE_PODS.name}}}}}"
_GIVEN_PODS = f"asInt(workflow.parameters['{ENGINE_PODS.name}'])"
_CAPACITY = "moerl/capacity"
_CAPACITY_TAG = f"\"{{{{=workflow.parameters['{ROLLOUT_CAPACITY.name}'] == 'on-demand' ? 'on-demand' : 'spot'}}}}\""
"""A host has no last attempt: `spot-then-on-demand` prefers Spot, and takes what there is. Argo reads the tag before
the text is YAML, where single quotes within single quotes would stand doubled."""
_REPLICAS = re.compile(r"^(\s+replicas: )'(\{\{[^{}]+\}\})'$", re.MULTILINE)


def worker_url(worker: str) -> str:
    """Tag with the URL of the host for a worker of an iteration; empty where the run has none.

    worker: an expression, the worker's number. Argo knows `workflow.parameters` as texts.
    """
    name = "'e-' + workflow.parameters['run']"
    number = f"string({worker} % {_GIVEN_PODS})"
    url = f"'http://' + {name} + '-' + {number} + '.' + {name} + ':{PORT}'"
    return f"{{{{={_GIVEN_PODS} > 0 ? {url} : ''}}}}"


def pods_resource(profile: PlatformProfile) -> Resource:
    """Applies the StatefulSet and waits until every host answers; call it inside a WorkflowTemplate's context.

    Unlike the watcher of a JobSet it has a deadline: it waits for a start, and the exit handler deletes what it made.
    """
    return _resource(
        POD_TEMPLATE,
        pods_manifest(profile),
        profile,
        success_condition=f"status.readyReplicas == {_PODS}",
        inputs=[Parameter(name=ENGINE_PODS.name)],
        active_deadline_seconds=str(START_DEADLINE_S),
    )


def service_resource(profile: PlatformProfile) -> Resource:
    """Applies the headless Service that names the pods; call it inside a WorkflowTemplate's context."""
    return _resource(SERVICE_TEMPLATE, service_manifest(), profile, active_deadline_seconds="600")


def _resource(name: str, manifest: str, profile: PlatformProfile, **fields: Any) -> Resource:
    return Resource(
        name=name,
        action="apply",
        set_owner_reference=True,
        manifest=manifest,
        annotations={DISPLAY_NAME: name},
        service_account_name=SERVICE_ACCOUNT,
        affinity=capacity_affinity(profile.capacity["stable"]),
        pod_spec_patch=WATCHER_POD_PATCH,
        retry_strategy=attach_retry(20),
        metrics=stage_metrics(name),
        **fields,
    )


def pods_manifest(profile: PlatformProfile) -> str:
    """The StatefulSet as text; its number of pods is a tag without quotes: it is YAML once Argo has replaced it."""
    manifest = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": ENGINES_NAME, "labels": _labels()},
        "spec": {
            "serviceName": ENGINES_NAME,
            "replicas": _PODS,
            # They don't wait for each other: each serves its own workers.
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {ENGINE_LABEL: RUN.reference}},
            "template": {
                "metadata": {"labels": _labels() | {"workflows.argoproj.io/workflow": "{{workflow.name}}"}},
                "spec": _pod(profile),
            },
        },
    }
    text = yaml.safe_dump(manifest, sort_keys=False, width=1000)
    return _REPLICAS.sub(r"\1\2", text).replace(_CAPACITY, _CAPACITY_TAG)


def service_manifest() -> str:
    """Without an address of its own: its name leads to each pod's."""
    manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": ENGINES_NAME, "labels": _labels()},
        "spec": {
            "clusterIP": "None",
            "selector": {ENGINE_LABEL: RUN.reference},
            "ports": [{"name": "control", "port": PORT}],
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False, width=1000)


def deletion_flags() -> list[str]:
    """Arguments of `kubectl delete` for the run's engines."""
    return [f"statefulsets.apps/{ENGINES_NAME}", f"services/{ENGINES_NAME}", "--wait=false"]


def _labels() -> dict[str, str]:
    return {"app.kubernetes.io/name": "argo-moe-rl", ENGINE_LABEL: RUN.reference}


def _pod(profile: PlatformProfile) -> dict[str, Any]:
    size = profile.resources["engine"]
    spec: dict[str, Any] = {
        "serviceAccountName": "moerl-step",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": dump(pod_security_context()),
        "affinity": _affinity(),
    }
    if size.gpus:
        spec |= {
            "nodeSelector": dict(profile.node_selector),
            "tolerations": [
                *(dump(item) for item in tolerations(profile, size) or ()),
                # Of nodes with EFA on capacity that may go away: no trainer bears it.
                {"key": ENGINE_LABEL, "operator": "Exists"},
            ],
        }
    if size.shm:
        spec["volumes"] = [dump(volume) for volume in shm_volumes(size)]
    return spec | {"containers": [_container(profile)]}


def _affinity() -> dict[str, Any]:
    """Any capacity will do in the end, but no node of the training domain; most nodes do not have the label."""
    affinity = dump(capacity_affinity(_CAPACITY))
    other = {"key": DOMAIN_LABEL, "operator": "NotIn", "values": ["training"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [other]}]}
    affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] = required
    return affinity


def _container(profile: PlatformProfile) -> dict[str, Any]:
    size = profile.resources["engine"]
    environment = [*step_environment(_CAPACITY, "0"), from_field("POD_IP", "status.podIP")]
    variables = {"OMP_NUM_THREADS": str(profile.threads)} | (profile.engine_environment if size.gpus else {})
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": ENGINE_IMAGE.reference,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "steps.engine_host"],
        # Kubernetes puts the pod's address in the place of $(POD_IP).
        "args": ["--run", RUN.reference, "--address", "$(POD_IP)", "--port", str(PORT)],
        "env": [
            *(dump(variable) for variable in environment),
            *({"name": name, "value": value} for name, value in variables.items()),
        ],
        "ports": [{"containerPort": PORT, "name": "control"}],
        "readinessProbe": {"httpGet": {"path": "/status", "port": PORT}, "periodSeconds": 5},
        "resources": dump(resource_requirements(size)),
        "securityContext": dump(container_security(profile, size)),
    }
    if size.shm:
        container["volumeMounts"] = [dump(mount) for mount in shm_mounts(size)]
    return container
