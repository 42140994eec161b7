"""`moerl lint`: manifests against the published schemas, the traps of Argo and the platform's profile."""

import json
from pathlib import Path
from typing import Annotated

import typer

from steps.errors import DataError
from workflows.shared_options import Json, examples

lint_app = typer.Typer()

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[FILE...]", help="Manifests, or folders of them; default: what this version renders."),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile", metavar="NAME", help="Platform that they are for (cpu, p5en, ...); without files, default cpu."
    ),
]
Schemas = Annotated[
    Path | None,
    typer.Option("--schemas", metavar="DIR", help="Folder of Argo's JSON schema and JobSet's CRD; or $MOERL_SCHEMAS."),
]
Iterations = Annotated[int, typer.Option("--iterations", min=1, help="Of a campaign, for the budget.")]
Workers = Annotated[int, typer.Option("--workers", min=1, help="That sample, and that score, for the budget.")]
Attempts = Annotated[int, typer.Option("--attempts", min=1, help="Of every pod, for the budget.")]
ListRules = Annotated[bool, typer.Option("--rules", help="List the rules and what each advises; check nothing.")]


@lint_app.command(
    epilog=examples("moerl lint", "moerl lint templates/", "moerl lint --profile p5en", "moerl lint --rules")
)
def lint(
    files: Files = None,
    profile: Profile = None,
    schemas: Schemas = None,
    iterations: Iterations = 300,
    workers: Workers = 64,
    attempts: Attempts = 2,
    as_json: Json = False,
    list_rules: ListRules = False,
) -> None:
    """Check manifests: schemas with unknown fields refused, traps, platform, and sizes against Argo's limits."""
    from workflows import catalog
    from workflows.lint import linter
    from workflows.lint.budget import Budget, table
    from workflows.lint.loading import read_files
    from workflows.lint.schemas import find_schemas
    from workflows.platform import load_profile

    if list_rules:
        _print_rules(as_json)
        return
    platform = load_profile(profile or "cpu") if profile or not files else None
    texts = read_files(files) if files else catalog.render_all(load_profile(profile or "cpu"))
    known = find_schemas(schemas)
    budget = Budget(iterations=iterations, workers=workers, attempts=attempts)
    manifests = linter.read(texts, platform)
    result = linter.lint(manifests, known, budget)
    findings, found, errors = result.findings, result.sizes, result.errors
    if as_json:
        shown = {
            "findings": [linter.as_json(finding) for finding in findings],
            "budget": [size.to_json() for size in found],
            "schemas": known.note,
            "profile": platform.name if platform else None,
            "manifests": len(manifests.documents),
        }
        typer.echo(json.dumps(shown, indent=2))
    else:
        for finding in findings:
            typer.echo(str(finding))
        for line in table(found, budget) if found else ():
            typer.echo(line)
        typer.echo(f"schemas: {known.note}")
        typer.echo(
            f"{len(manifests.documents)} manifests, {len(linter.RULES)} rules, profile "
            f"{platform.name if platform else 'none (its rules were left out: give --profile)'}: "
            f"{len(errors)} errors, {len(findings) - len(errors)} warnings"
        )
    if errors:
        names = ", ".join(sorted({finding.rule for finding in errors}))
        raise DataError(f"{len(errors)} errors in the manifests: {names}")


def _print_rules(as_json: bool) -> None:
    from workflows.lint.linter import RULES, rules_table

    if as_json:
        rows = [{"name": rule.name, "severity": rule.severity, "advice": rule.advice} for rule in RULES]
        typer.echo(json.dumps(rows, indent=2))
        return
    for line in rules_table():
        typer.echo(line)
