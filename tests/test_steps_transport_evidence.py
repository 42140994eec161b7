"""What a step does about the transport that it observed."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moe.config import LossConfig, ModelConfig, MoeConfig, OptimizerConfig, SamplingConfig, UpdateConfig
from moe.dispatch.monitor import LayerExchange
from moe.model import build_model
from moe.parallel import ParallelLayout
from moe.update import PolicyTrainer
from steps import transport_evidence
from steps.config import RunConfig
from steps.entrypoint import RankContext, StepContext
from steps.errors import ConfigError
from steps.transport_evidence import TransportEvidence

DOWNGRADED = {"requested": "deepep", "observed": "deepep", "status": "downgrade", "reason": "node 0 sent nothing"}


def context(of: type[Any], on_downgrade: str) -> Any:
    made = object.__new__(of)
    moe = replace(MoeConfig(), dispatcher="deepep", on_downgrade=on_downgrade)
    made.__dict__["config"] = replace(RunConfig(), moe=moe)
    made.transport = {}
    return made


@pytest.fixture
def evidence_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(made: Any, report: dict[str, Any]) -> TransportEvidence:
        monkeypatch.setattr(transport_evidence, "expert_modules", lambda model: [None])
        monkeypatch.setattr(transport_evidence, "get_dispatcher", lambda module: object())
        monkeypatch.setattr(
            transport_evidence, "collect", lambda *args, **kwargs: report | {"bytes": kwargs["sent_bytes"]}
        )
        trainer: Any = SimpleNamespace(model=None, exchanged=LayerExchange(sent_bytes=7, sent_off_node_bytes=3))
        return TransportEvidence(made, trainer, ParallelLayout.single())

    return make


def test_a_downgrade_fails_the_step_and_stays_in_the_ledger(evidence_of: Any) -> None:
    first = context(StepContext, "fail")
    with pytest.raises(ConfigError, match=r'deepep: node 0 sent nothing; .*moe\.on_downgrade = "warn"'):
        evidence_of(first, DOWNGRADED).collect()
    assert first.transport == DOWNGRADED | {"bytes": 7}


def test_the_other_ranks_end_with_the_same_code_and_no_word(
    evidence_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        evidence_of(context(RankContext, "fail"), DOWNGRADED).collect()
    assert ended.value.code == ConfigError.exit_code
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("status", "on_downgrade"), [("downgrade", "warn"), ("unverifiable", "fail"), ("ok", "fail")])
def test_anything_else_is_kept_and_goes_on(evidence_of: Any, status: str, on_downgrade: str) -> None:
    first = context(StepContext, on_downgrade)
    evidence = evidence_of(first, DOWNGRADED | {"status": status})
    assert evidence.report is None
    assert evidence.collect()["status"] == status
    assert first.transport == evidence.report


def test_a_report_of_one_process_is_json_and_in_order() -> None:
    shape = ModelConfig(hidden_size=8, num_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=2)
    trainer = PolicyTrainer(
        build_model(shape, vocab_size=16, seed=0),
        loss=LossConfig(), optimizer=OptimizerConfig(), update=UpdateConfig(), moe=MoeConfig(),
        sampling=SamplingConfig(),
    )  # fmt: skip
    made = object.__new__(StepContext)
    made.__dict__["config"] = RunConfig()
    report = TransportEvidence(made, trainer, ParallelLayout.single()).collect()
    assert (report["requested"], report["observed"], report["status"]) == ("local", "local", "ok")
    assert json.loads(json.dumps(report)) == report == made.transport
