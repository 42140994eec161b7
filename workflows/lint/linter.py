"""All rules, and one call that applies them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain

from workflows.lint import (
    loop_rules,
    name_rules,
    object_rules,
    pod_rules,
    profile_rules,
    reference_rules,
    retry_rules,
    schemas,
    security_rules,
    workflow_rules,
)
from workflows.lint.budget import Budget, WorkflowSize, over_budget, sizes
from workflows.lint.loading import parse
from workflows.lint.model import Finding, Manifests, Place, Rule
from workflows.lint.schemas import Schemas
from workflows.platform import PlatformProfile


def _without_schema(manifests: Manifests) -> Iterator[Place]:
    """The first manifest of each kind that nothing here describes."""
    kinds: set[str] = set()
    for manifest in manifests.documents:
        if not schemas.is_known(manifest) and manifest.kind not in kinds:
            kinds.add(manifest.kind)
            yield Place(manifest=manifest, path="", problem=f"no schema or model of {manifest.kind} is at hand")


SCHEMA = Rule(
    name="schema",
    severity="error",
    advice="correct it: the API server or the controller refuses or drops it",
    check=lambda manifests: iter(()),
)
"""Applied with the schemas at hand, not with the set alone."""
NO_SCHEMA = Rule(
    name="no-schema",
    severity="warning",
    advice="check it with `kubectl apply --dry-run=server` where its CRD is installed",
    check=_without_schema,
)
BUDGET = Rule(
    name="over-budget",
    severity="error",
    advice="fewer iterations or workers, or nodeStatusOffLoad in the controller's persistence",
    check=lambda manifests: iter(()),
)
"""Applied with the numbers of iterations and workers that were asked for."""
RULES: tuple[Rule, ...] = (
    SCHEMA,
    NO_SCHEMA,
    *workflow_rules.RULES,
    *reference_rules.RULES,
    *name_rules.RULES,
    *loop_rules.RULES,
    *retry_rules.RULES,
    *object_rules.RULES,
    *pod_rules.RULES,
    *security_rules.RULES,
    *profile_rules.RULES,
    BUDGET,
)


def read(texts: Mapping[str, str], profile: PlatformProfile | None = None) -> Manifests:
    """The manifests in these texts by file name; DataError for text that is none."""
    return Manifests(documents=tuple(parse(texts)), profile=profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Findings by file and place, and how large the Workflows become."""

    findings: list[Finding]
    sizes: list[WorkflowSize]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]


def lint(manifests: Manifests, known: Schemas, budget: Budget) -> Result:
    """Apply every rule; the same manifest with other sample values does not say the same thing twice."""
    checked = chain.from_iterable(schemas.check(manifest, known) for manifest in manifests.documents)
    found = [_finding(SCHEMA, place) for place in checked]
    for rule in RULES:
        found += [_finding(rule, place) for place in rule.check(manifests)]
    reckoned = sizes(manifests, budget)
    found += [_finding(BUDGET, place) for place in over_budget(manifests, reckoned, budget)]
    order = {rule.name: index for index, rule in enumerate(RULES)}
    unique = {(item.rule, item.source, item.manifest, item.path, item.problem): item for item in found}
    ordered = sorted(unique.values(), key=lambda item: (item.source, item.severity, order[item.rule], item.path))
    return Result(findings=ordered, sizes=reckoned)


def _finding(rule: Rule, place: Place) -> Finding:
    manifest = place.manifest
    return Finding(
        rule=rule.name,
        severity=rule.severity,
        source=manifest.source,
        manifest=f"{manifest.kind} {manifest.name}" if manifest.holder is None else manifest.kind,
        path=place.path,
        problem=place.problem,
        advice=rule.advice,
    )


def rules_table() -> list[str]:
    """The rules as a Markdown table, as docs/lint.md has it."""
    rows = [f"| `{rule.name}` | {rule.severity} | {rule.advice.replace('|', chr(92) + '|')} |" for rule in RULES]
    return ["| rule | severity | what to do |", "|---|---|---|", *rows]


def as_json(finding: Finding) -> dict[str, str]:
    return asdict(finding)
