"""The extension of vLLM's workers: it reloads, then packs the experts again where that is needed."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steps.adapters.engines.vllm_worker import PublicationWorker


class FakeExperts:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def process_weights_after_loading(self, layer: Any) -> None:
        self.calls.append(f"packed {layer.name}")


class FakeWorker(PublicationWorker):
    """What vLLM mixes the class into."""

    def __init__(self, device: str) -> None:
        self.device = SimpleNamespace(type=device)
        self.calls: list[str] = []

    def reload_weights(self, weights_path: str) -> None:
        self.calls.append(f"reloaded {weights_path}")

    def get_model(self) -> Any:
        kernel = SimpleNamespace(fused_experts=FakeExperts(self.calls))
        experts = SimpleNamespace(name="experts", quant_method=SimpleNamespace(moe_kernel=kernel), w13_weight=object())
        linear = SimpleNamespace(name="linear", quant_method=SimpleNamespace())
        return SimpleNamespace(modules=lambda: [experts, linear, SimpleNamespace(name="norm")])


@pytest.mark.parametrize(
    ("device", "packed", "calls"), [("cpu", 1, ["reloaded /p", "packed experts"]), ("cuda", 0, ["reloaded /p"])]
)
def test_experts_are_packed_after_the_reload_on_cpu_only(device: str, packed: int, calls: list[str]) -> None:
    worker = FakeWorker(device)
    assert worker.reload_publication("/p") == packed
    assert worker.calls == calls


def test_the_module_loads_without_anything_of_this_project() -> None:
    code = "import sys; import steps.adapters.engines.vllm_worker; print([m for m in sys.modules if m[:4] == 'moe.'])"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr
