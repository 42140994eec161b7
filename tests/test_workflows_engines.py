"""Rollout engines that outlive an iteration: their manifests, who finds them, who needs no GPU, and their end."""

import copy
import re
from typing import Any

import pytest
import yaml

from steps.paths import validate_run_id
from tests.kustomization import INSTALL, build
from workflows import catalog, engines
from workflows.lint import kubernetes_models
from workflows.local.expressions import WHEN, evaluate_bool
from workflows.local.variables import substitute
from workflows.platform import EFA_RESOURCE, GPU_RESOURCE, HUGEPAGES_RESOURCE, load_profile
from workflows.run_command import build_campaign
from workflows.run_folder import RunRecord

RUN = "9-" + "r" * 38
"""Of the longest kind; it begins with a digit."""


def templates(name: str, profile: str = "p5en") -> dict[str, dict[str, Any]]:
    spec = yaml.safe_load(catalog.render_all(load_profile(profile))[f"policy-{name}.yaml"])["spec"]
    return {template["name"]: template for template in spec["templates"]}


def scope(**parameters: str) -> dict[str, str]:
    given = {"run": RUN, "engine-pods": "2", "rollout-capacity": "spot", "engine-image": "mine:1.0.0"} | parameters
    return {"workflow.name": "wf", "inputs.parameters.engine-pods": given["engine-pods"]} | {
        f"workflow.parameters.{name}": value for name, value in given.items()
    }


def applied(template: str, profile: str = "p5en", **parameters: str) -> dict[str, Any]:
    """What a resource template of the campaign applies, once the tags are replaced."""
    text = templates("campaign", profile)[template]["resource"]["manifest"]
    filled = {"workflow.parameters.environment": "e", "workflow.parameters.credentials": "c"} | scope(**parameters)
    manifest: dict[str, Any] = yaml.safe_load(substitute(text, filled, template))
    return manifest


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def url_of(template: str, worker: str = "0", **parameters: str) -> str:
    container = templates("iteration")[template]["container"]
    given = scope(**parameters) | {"inputs.parameters.worker": worker}
    return substitute(environment(container)["MOERL_ENGINE_URL"], given, template)


# --- the pods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["cpu", "p5en"])
def test_both_objects_have_the_fields_that_kubernetes_knows(profile: str) -> None:
    for template in (engines.POD_TEMPLATE, engines.SERVICE_TEMPLATE):
        made = applied(template, profile)
        model = kubernetes_models.model_of(made)
        assert model is not None
        assert list(kubernetes_models.problems(made, model)) == []


def test_every_pod_has_the_name_under_which_workers_ask_for_it() -> None:
    pods, service = applied(engines.POD_TEMPLATE), applied(engines.SERVICE_TEMPLATE)
    name = pods["metadata"]["name"]
    assert service["metadata"]["name"] == pods["spec"]["serviceName"] == name
    assert service["spec"]["clusterIP"] == "None"
    labels = pods["spec"]["template"]["metadata"]["labels"]
    for selector in (pods["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selector == {"moerl/engines": RUN}
        assert selector.items() <= labels.items()
    container = pods["spec"]["template"]["spec"]["containers"][0]
    (port,) = container["ports"]
    assert url_of("rollout", "1") == f"http://{name}-1.{name}:{port['containerPort']}"
    assert container["args"] == ["--run", RUN, "--address", "$(POD_IP)", "--port", str(port["containerPort"])]
    assert container["readinessProbe"]["httpGet"] == {"path": "/status", "port": port["containerPort"]}


def test_names_fit_for_the_longest_run_id_and_begin_with_a_letter() -> None:
    assert validate_run_id(RUN) == RUN
    name = applied(engines.POD_TEMPLATE)["metadata"]["name"]
    assert re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", name), "the name of a Service"
    assert len(f"{name}-9999") <= 63
    assert len(f"{name}-0123456789") <= 63, "the label controller-revision-hash"


def test_pods_take_a_whole_node_of_the_profile_and_what_deepep_needs_over_efa() -> None:
    profile = load_profile("p5en")
    pod = applied(engines.POD_TEMPLATE)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    limits = container["resources"]["limits"]
    assert (limits[GPU_RESOURCE], limits[EFA_RESOURCE]) == (str(profile.gpus), str(profile.efa))
    assert limits[HUGEPAGES_RESOURCE] and limits == container["resources"]["requests"]
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "200Gi"}}]
    assert pod["nodeSelector"] == profile.node_selector
    taints = {item.key for item in profile.tolerations} | {engines.ENGINE_LABEL}
    assert {item["key"] for item in pod["tolerations"]} == taints
    given = environment(container)
    assert profile.engine_environment.items() <= given.items()
    assert {"NCCL_GIN_TYPE", "EP_REUSE_NCCL_COMM", "NCCL_SOCKET_IFNAME"} <= profile.engine_environment.keys()
    assert container["image"] == "mine:1.0.0"


def test_engines_of_both_kinds_get_their_variables_on_every_accelerated_profile() -> None:
    for name in ("p5", "p5e", "p5en", "p6-b200", "p6-b300", "g6e"):
        profile = load_profile(name)
        assert set(profile.engines) == {"vllm", "sglang"}
        assert profile.resources["engine"] == profile.resources["trainer"]
        assert profile.resources["engine_client"].gpus == 0


def test_pods_run_on_spot_unless_the_submission_asks_for_on_demand() -> None:
    for capacity, wanted in (("spot", "spot"), ("spot-then-on-demand", "spot"), ("on-demand", "on-demand")):
        pod = applied(engines.POD_TEMPLATE, **{"rollout-capacity": capacity})["spec"]["template"]["spec"]
        assert f"'values': ['{wanted}']" in str(pod["affinity"])
        assert environment(pod["containers"][0])["MOERL_CAPACITY_TYPE"] == wanted
        assert pod["terminationGracePeriodSeconds"] <= 110
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert "karpenter.sh" not in str(required), "where there is no such node, others will do"


def test_watcher_waits_for_as_many_hosts_as_it_asked_for_and_not_for_ever() -> None:
    watcher = templates("campaign")[engines.POD_TEMPLATE]
    assert applied(engines.POD_TEMPLATE, **{"engine-pods": "4"})["spec"]["replicas"] == 4
    assert watcher["resource"]["successCondition"] == "status.readyReplicas == {{inputs.parameters.engine-pods}}"
    assert int(watcher["activeDeadlineSeconds"]) > 0


def test_pods_stay_the_same_when_only_their_number_changes() -> None:
    few, many = (applied(engines.POD_TEMPLATE, **{"engine-pods": number}) for number in ("1", "9"))
    assert few["spec"].pop("replicas") != many["spec"].pop("replicas")
    assert few == many, "another pod template restarts every server"


def test_only_pods_of_workflows_reach_the_engines() -> None:
    policy = build(INSTALL).one("NetworkPolicy", "moerl-engines")["spec"]
    labels = applied(engines.POD_TEMPLATE)["spec"]["template"]["metadata"]["labels"]
    (selected,) = policy["podSelector"]["matchExpressions"]
    assert selected["operator"] == "Exists" and selected["key"] in labels
    (rule,) = policy["ingress"]
    assert rule["from"] == [
        {"podSelector": {"matchExpressions": [{"key": "workflows.argoproj.io/workflow", "operator": "Exists"}]}}
    ]
    (ports,) = rule["ports"]
    assert ports["port"] <= engines.PORT <= ports["endPort"]


# --- the workers ------------------------------------------------------------------------------------------------------


def test_workers_share_the_hosts_evenly_and_evaluation_takes_the_first() -> None:
    hosts = [re.sub(r"\..*", "", url_of("rollout", str(worker))).rpartition("-")[2] for worker in range(5)]
    assert hosts == ["0", "1", "0", "1", "0"]
    assert url_of("evaluate") == url_of("rollout")


def test_workers_of_a_run_without_engines_get_no_address() -> None:
    assert url_of("rollout", **{"engine-pods": "0"}) == ""
    assert url_of("evaluate", **{"engine-pods": "0"}) == ""


def strategic_merge(base: Any, patch: Any) -> Any:
    """As Kubernetes does it: null deletes a key, containers are matched by name."""
    if isinstance(base, list):
        merged = {item["name"]: item for item in base}
        for item in patch:
            merged[item["name"]] = strategic_merge(merged[item["name"]], item)
        return list(merged.values())
    if not isinstance(patch, dict):
        return patch
    result = dict(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = strategic_merge(result[key], value) if key in result else value
    return result


def pod_of(template: str, engine_pods: str) -> dict[str, Any]:
    body = copy.deepcopy(templates("iteration")[template])
    pod = {"nodeSelector": body["nodeSelector"], "containers": [body["container"] | {"name": "main"}]}
    given = scope(**{"engine-pods": engine_pods})
    patch = substitute(body["podSpecPatch"], given, template)
    merged: dict[str, Any] = strategic_merge(pod, yaml.safe_load(patch))
    return merged


@pytest.mark.parametrize("template", ["rollout", "evaluate"])
def test_a_worker_needs_a_gpu_only_where_it_samples_itself(template: str) -> None:
    alone, client = pod_of(template, "0"), pod_of(template, "4")
    assert alone["containers"][0]["resources"]["limits"][GPU_RESOURCE] == "1"
    assert alone["nodeSelector"] == load_profile("p5en").node_selector
    size = load_profile("p5en").resources["engine_client"]
    resources = client["containers"][0]["resources"]
    assert resources["limits"] == {"cpu": size.cpu_limit, "memory": size.memory}
    assert resources["requests"] == {"cpu": size.cpu_request, "memory": size.memory}
    assert client["nodeSelector"] == {}
    assert client["terminationGracePeriodSeconds"] == alone["terminationGracePeriodSeconds"]


# --- beginning and end ------------------------------------------------------------------------------------------------


def test_engines_are_made_where_init_says_so_and_deleted_where_they_may_have_been_made() -> None:
    campaign = templates("campaign", "cpu")
    (step,) = campaign["campaign"]["steps"][1]
    for count, made in (("0", False), ("4", True)):
        condition = step["when"].replace("{{steps.init.outputs.parameters.engine-pods}}", count)
        assert evaluate_bool(condition, {}, WHEN) is made
    ((_, deletion),) = campaign["exit"]["steps"]
    for submitted, deleted in (("0", False), ("from-config", True), ("4", True)):
        condition = deletion["when"].replace("{{workflow.parameters.engine-pods}}", submitted)
        assert evaluate_bool(condition, {}, WHEN) is deleted
    assert campaign[deletion["template"]]["resource"] == {
        "action": "delete",
        "flags": [
            "statefulsets.apps/e-{{workflow.parameters.run}}",
            "services/e-{{workflow.parameters.run}}",
            "--wait=false",
        ],
    }


def test_objects_belong_to_the_workflow_and_are_found_again_by_a_watcher_that_was_lost() -> None:
    for name in (engines.POD_TEMPLATE, engines.SERVICE_TEMPLATE):
        template = templates("campaign")[name]
        assert template["resource"]["setOwnerReference"] is True
        assert template["resource"]["action"] == "apply"
        assert template["serviceAccountName"] == engines.SERVICE_ACCOUNT


def test_a_campaign_on_this_machine_makes_no_pods_for_engines() -> None:
    record = RunRecord(
        run_id="here", config="", created="", iterations=1, rollout_workers=2, reward_workers=1, working_dir="/"
    )
    parameters = build_campaign(record, "")["spec"]["arguments"]["parameters"]
    assert {"name": "engine-pods", "value": "0"} in parameters
