"""Rules on a Workflow as a whole, its schedule, its artifacts (Argo: docs/cron-workflows.md, docs/upgrading.md,
workflow/cron/operator.go, workflow/artifacts/s3).
"""

import re
from collections.abc import Iterator

from workflows.lint.model import Body, Manifest, Manifests, Place, Rule, Template, listing, mapping, strings

_CRON_FIELD = re.compile(r"[0-9*/,?LW#A-Za-z-]+")


def _with_templates(manifests: Manifests) -> Iterator[Manifest]:
    return (manifest for manifest in manifests.workflows() if manifest.spec.get("templates"))


def clean_up(manifests: Manifests) -> Iterator[Place]:
    for manifest in _with_templates(manifests):
        collection = mapping(manifest.spec.get("podGC"))
        path = manifest.at(f"{manifest.spec_path}.podGC")
        if not collection.get("strategy"):
            yield Place(manifest=manifest, path=path, problem="finished pods stay until the workflow is deleted")
        elif collection["strategy"] in ("OnPodCompletion", "OnWorkflowCompletion"):
            yield Place(
                manifest=manifest, path=path, problem=f"{collection['strategy']} takes the logs of failed pods away"
            )
        ttl = mapping(manifest.spec.get("ttlStrategy"))
        if not ("secondsAfterCompletion" in ttl or {"secondsAfterSuccess", "secondsAfterFailure"} <= set(ttl)):
            path = manifest.at(f"{manifest.spec_path}.ttlStrategy")
            yield Place(manifest=manifest, path=path, problem="finished workflows stay in etcd for ever")


def artifact_collection(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.workflows():
        if mapping(manifest.spec.get("artifactGC")).get("strategy", "Never") != "Never":
            path = manifest.at(f"{manifest.spec_path}.artifactGC")
            yield Place(
                manifest=manifest, path=path, problem="Argo would delete objects of the store with the workflow"
            )


def _artifacts(manifests: Manifests) -> Iterator[tuple[Template, str, Body]]:
    for template in manifests.templates():
        for artifact in listing(mapping(template.body.get("outputs")).get("artifacts")):
            yield template, f"{template.path}.outputs.artifacts[{artifact.get('name')}]", artifact


def artifact_key(manifests: Manifests) -> Iterator[Place]:
    for template, path, artifact in _artifacts(manifests):
        key = str(mapping(artifact.get("s3")).get("key") or "")
        if not key:
            problem = "no key of its own: the default is made of the workflow's and the pod's name"
            yield Place(manifest=template.manifest, path=path, problem=problem)
        elif re.search(r"\{\{(pod\.name|workflow\.(name|uid)|retries)\}\}", key):
            problem = f"the key {key!r} is another one after a retry or a new submission"
            yield Place(manifest=template.manifest, path=path, problem=problem)


def page_artifact(manifests: Manifests) -> Iterator[Place]:
    for template, path, artifact in _artifacts(manifests):
        key = str(mapping(artifact.get("s3")).get("key") or artifact.get("path") or "")
        archive = mapping(artifact.get("archive"))
        if key.endswith((".html", ".svg", ".png", ".json")) and "none" not in archive:
            problem = "it is archived as tar, so the UI's viewer does not show it"
            yield Place(manifest=template.manifest, path=path, problem=problem)


def required_artifact(manifests: Manifests) -> Iterator[Place]:
    for template, path, artifact in _artifacts(manifests):
        if artifact.get("optional") is not True:
            problem = "a container that is stopped before it wrote the file ends as Error"
            yield Place(manifest=template.manifest, path=path, problem=problem)


def _crons(manifests: Manifests) -> Iterator[tuple[Manifest, Body]]:
    return ((manifest, mapping(manifest.body.get("spec"))) for manifest in manifests.of_kind("CronWorkflow"))


def cron_overlap(manifests: Manifests) -> Iterator[Place]:
    for manifest, spec in _crons(manifests):
        policy = spec.get("concurrencyPolicy") or "Allow"
        if policy != "Forbid":
            problem = f"{policy}: " + (
                "two run at once" if policy == "Allow" else "the old one is ended without its onExit"
            )
            yield Place(manifest=manifest, path="spec.concurrencyPolicy", problem=problem)


def cron_deadline(manifests: Manifests) -> Iterator[Place]:
    for manifest, spec in _crons(manifests):
        if not spec.get("startingDeadlineSeconds"):
            problem = "a start that the controller missed is lost"
            yield Place(manifest=manifest, path="spec.startingDeadlineSeconds", problem=problem)


def cron_stop(manifests: Manifests) -> Iterator[Place]:
    for manifest, spec in _crons(manifests):
        if not mapping(spec.get("stopStrategy")).get("expression"):
            problem = "a schedule that fails goes on night after night"
            yield Place(manifest=manifest, path="spec.stopStrategy", problem=problem)


def cron_schedule(manifests: Manifests) -> Iterator[Place]:
    for manifest, spec in _crons(manifests):
        if not spec.get("timezone"):
            problem = "the hours are those of the controller's machine"
            yield Place(manifest=manifest, path="spec.timezone", problem=problem)
        schedules = strings(spec.get("schedules"))
        if not schedules:
            yield Place(manifest=manifest, path="spec.schedules", problem="there is no schedule")
        for schedule in schedules:
            fields = schedule.split()
            named = len(fields) == 1 and fields[0].startswith("@") or fields[:1] == ["@every"]
            if not named and (len(fields) != 5 or not all(_CRON_FIELD.fullmatch(field) for field in fields)):
                yield Place(manifest=manifest, path="spec.schedules", problem=f"{schedule!r} is no schedule")


def disruption_of_nodes(manifests: Manifests) -> Iterator[Place]:
    """A NodePool that ends its nodes sooner than a pod's grace deletes the pod when the drain begins."""
    longest = _longest_grace_s(manifests)
    for pool in manifests.of_kind("NodePool"):
        spec = mapping(mapping(pool.spec.get("template")).get("spec"))
        given = str(spec.get("terminationGracePeriod") or "")
        seconds = _seconds(given)
        if given and seconds is not None and seconds < longest:
            path = "spec.template.spec.terminationGracePeriod"
            problem = f"{given}, while a pod may take {longest} s: it is deleted when the drain begins"
            yield Place(manifest=pool, path=path, problem=problem)


def moving_nodes(manifests: Manifests) -> Iterator[Place]:
    for pool in manifests.of_kind("NodePool"):
        disruption = mapping(pool.spec.get("disruption"))
        if disruption.get("consolidationPolicy", "WhenEmptyOrUnderutilized") != "WhenEmpty":
            problem = "Karpenter moves pods to emptier nodes, and each move costs an attempt"
            yield Place(manifest=pool, path="spec.disruption.consolidationPolicy", problem=problem)


def open_accelerators(manifests: Manifests) -> Iterator[Place]:
    """A pool of accelerated nodes that bears no taint takes any pod."""
    for pool in manifests.of_kind("NodePool"):
        spec = mapping(mapping(pool.spec.get("template")).get("spec"))
        wanted = " ".join(value for item in listing(spec.get("requirements")) for value in strings(item.get("values")))
        if re.search(r"\b(p[4-9][a-z0-9-]*|g[5-9][a-z0-9]*)\.", wanted) and not spec.get("taints"):
            problem = "its nodes have accelerators and no taint, so any pod may take one"
            yield Place(manifest=pool, path="spec.template.spec.taints", problem=problem)


def _longest_grace_s(manifests: Manifests) -> int:
    patches = [str(template.body.get("podSpecPatch") or "") for template in manifests.templates()]
    texts = patches + [
        str(mapping(template.body.get("resource")).get("manifest")) for template in manifests.templates()
    ]
    found = [int(grace) for text in texts for grace in re.findall(r"terminationGracePeriodSeconds: (\d+)", text)]
    return max(found, default=0)


def _seconds(duration: str) -> int | None:
    parts = re.findall(r"(\d+)([hms])", duration)
    if "".join(number + unit for number, unit in parts) != duration:
        return None
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)


RULES = (
    Rule(
        name="clean-up",
        severity="error",
        advice="set podGC.strategy OnPodSuccess, and secondsAfterSuccess and secondsAfterFailure of ttlStrategy",
        check=clean_up,
    ),
    Rule(
        name="artifact-gc",
        severity="error",
        advice="leave artifactGC out: what the store holds outlives workflows",
        check=artifact_collection,
    ),
    Rule(name="artifact-key", severity="error", advice="key it by run and iteration", check=artifact_key),
    Rule(name="artifact-archived", severity="error", advice="set archive: {none: {}}", check=page_artifact),
    Rule(name="artifact-required", severity="error", advice="set optional: true", check=required_artifact),
    Rule(name="cron-overlap", severity="error", advice="set concurrencyPolicy Forbid", check=cron_overlap),
    Rule(name="cron-deadline", severity="error", advice="set startingDeadlineSeconds", check=cron_deadline),
    Rule(name="cron-stop", severity="error", advice="set stopStrategy.expression", check=cron_stop),
    Rule(
        name="cron-schedule",
        severity="error",
        advice="set timezone, and five fields each in schedules, e.g. 0 2 * * *",
        check=cron_schedule,
    ),
    Rule(
        name="nodepool-grace",
        severity="error",
        advice="raise it above the longest terminationGracePeriodSeconds",
        check=disruption_of_nodes,
    ),
    Rule(
        name="nodepool-consolidation",
        severity="error",
        advice="set consolidationPolicy: WhenEmpty",
        check=moving_nodes,
    ),
    Rule(
        name="nodepool-taint",
        severity="error",
        advice="taint them nvidia.com/gpu: NoSchedule",
        check=open_accelerators,
    ),
)
