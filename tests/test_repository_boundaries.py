"""Who imports whom, and that nothing heavy is loaded by what must be quick."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "mlflow", "sqlalchemy", "boto3")


def loaded_by(module: str) -> set[str]:
    """Top-level names in sys.modules after importing `module` in a fresh interpreter."""
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_rules_hold() -> None:
    lint = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert lint is not None
    command = [lint, "--no-logo", "--no-cache", "--config", ".importlinter"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["workflows.cli", "steps.config", "moe.config"])
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert loaded_by(module).isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "module", ["workflows.catalog", "workflows.run_command", "workflows.run_report", "steps.config_loader"]
)
def test_the_control_side_loads_no_torch(module: str) -> None:
    assert loaded_by(module).isdisjoint({"torch", "transformers", "mlflow"})


@pytest.mark.parametrize("package", ["workflows", "steps", "moe"])
def test_packages_are_those_of_this_repository(package: str) -> None:
    """Packages of the same names exist elsewhere; an installed one must not win."""
    code = f"import {package}; print({package}.__file__)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(REPOSITORY)
