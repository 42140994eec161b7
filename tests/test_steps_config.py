"""The configuration's classes: importable without torch, immutable, valid by default."""

import dataclasses
import subprocess
import sys

import pytest

from steps.config import RunConfig
from steps.config_checks import cross_field_problems


def test_defaults_break_no_rule() -> None:
    assert cross_field_problems(RunConfig()) == []


def test_settings_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1  # type: ignore[misc]


def test_reading_a_configuration_loads_no_torch() -> None:
    code = (
        "import sys, steps.config_loader as loader, steps.tasks.catalog; loader.load_config(''); "
        "heavy = {'torch', 'transformers', 'reasoning_gym', 'math_verify', 'boto3', 'sqlalchemy', 'mlflow', 'hera'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
