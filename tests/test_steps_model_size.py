"""`python -m steps.model_size`, as `moerl plan` calls it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from steps.config_loader import config_json, load_config

REPOSITORY = Path(__file__).parents[1]


def measured(config: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    text = config_json(load_config(str(REPOSITORY / "configs" / f"{config}.toml"), overrides))
    command = [sys.executable, "-m", "steps.model_size"]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=REPOSITORY)


def test_the_checkpoints_own_configuration_is_preferred(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-30B-A3B"
    folder.mkdir()
    kept = json.loads((REPOSITORY / "configs" / "models" / "qwen3-30b-a3b.json").read_text())
    (folder / "config.json").write_text(json.dumps(kept | {"num_hidden_layers": 2}))
    answer = json.loads(measured("qwen3-30b-a3b-p5en", f"warmup.start={folder}").stdout)
    assert answer["size"]["num_layers"] == 2
    assert answer["source"] == str(folder / "config.json")
    assert answer["exchange_problems"] == []


@pytest.mark.parametrize("text", ["", "{}x", '{"nonsense": 1}'])
def test_a_configuration_that_is_none_is_one_line(text: str) -> None:
    command = [sys.executable, "-m", "steps.model_size"]
    result = subprocess.run(command, input=text, capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 78
    assert result.stderr.startswith("model_size: ") and "Traceback" not in result.stderr
