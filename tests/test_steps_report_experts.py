"""What a report says about experts across ranks, and what of it the tracking server is told."""

import json
from typing import Any

import pytest

from steps.adapters.spool import Artifact, Metric, Tags
from steps.config import ServerConfig
from steps.engine_transport import exchange_report
from steps.report_engine import MISMATCH_ROWS, engine_section
from steps.report_experts import exchange_section, layer_section, transport_sections
from steps.report_notes import run_notes
from steps.reporting import mean_layers
from steps.tracking_events import iteration_events

TRANSPORT: dict[str, Any] = {
    "requested": "deepep", "observed": "deepep", "status": "ok", "reason": "node 0 was to send 5.0 MB",
    "network": "auto", "ranks": 16, "nodes": 2, "sent_bytes": 9_000_000, "predicted_off_node_bytes": 5_000_000,
    "counted_rdma_bytes": 5_100_000, "counted_ethernet_bytes": None, "counters": {},
    "details": {"library": "DeepEP 2.1"}, "versions": {"efa": "2.13.1", "nccl": "2.28.9"}, "environment": {},
}  # fmt: skip
LAYER = {
    "max_violation": 0.5, "dead_experts": 1.0, "entropy": 2.0, "rank_imbalance": 1.25, "node_imbalance": 1.125,
    "dropped_routes": 3.0, "sent_bytes": 4.5e6, "sent_off_node_bytes": 1.5e6, "exchange_s": 0.25,
    "exchange_share": 0.125,
}  # fmt: skip


def row(**changes: Any) -> dict[str, Any]:
    values = {"iteration": 3, "policy_version": 3, "router_layers": [LAYER, LAYER], "transport": TRANSPORT}
    others = {
        "phase_seconds": {}, "wall_seconds": 1.0, "rollout_tokens_per_s": None, "interruptions": 0, "retries": 0,
        "validated": True, "reward_eval": None, "attempts": [], "dropped": {},
    }  # fmt: skip
    return others | values | changes


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    initial = row(router_layers=[], transport=None)
    return {"iterations": list(rows), "initial": initial, "config": {"moe": {"dispatcher": "deepep"}}}


def test_layers_are_means_over_the_steps() -> None:
    steps = [
        {"step": 1, "layers": [{"entropy": 1.0}, {"entropy": 2.0}]},
        {"step": 2, "layers": [{"entropy": 3.0}, {"entropy": 6.0}]},
    ]
    assert mean_layers(steps) == [{"entropy": 2.0}, {"entropy": 4.0}]
    assert mean_layers([]) == []


def test_times_that_an_interrupted_attempt_took_with_it_are_left_out() -> None:
    steps = [
        {"step": 1, "layers": [{"entropy": 1.0}]},
        {"step": 2, "layers": [{"entropy": 3.0, "exchange_s": 4.0}]},
    ]
    assert mean_layers(steps) == [{"entropy": 2.0, "exchange_s": 4.0}]
    without = {name: value for name, value in LAYER.items() if not name.startswith("exchange_")}
    assert "–" in layer_section([without])
    assert "Nothing recorded" in exchange_section([row(router_layers=[without])])


def test_every_layer_has_a_row_of_its_numbers() -> None:
    page = layer_section([LAYER, LAYER])
    assert page.count("<tr>") == 3
    for text in ("0.50", "1.25", "1.12", "4.500", "1.500", "12.5%"):
        assert text in page, text
    assert layer_section([]) == ""


def test_transport_shows_request_observation_and_evidence() -> None:
    page = transport_sections(row(transport=TRANSPORT | {"reason": "<gone>"}))
    for text in ("deepep", "&lt;gone&gt;", "5100000", "5000000", "backend: library", "version: efa", "2.13.1"):
        assert text in page, text
    assert "Ethernet" not in page, "what was not counted is not shown as a number"
    assert transport_sections(row(transport=None)) == ""


def test_a_rollout_engines_transport_is_shown_noted_and_tagged_as_an_updates_is() -> None:
    rollout = exchange_report(ServerConfig(all2all_backend="deepep_v2"), "allgather_reducescatter", "vllm", "0.32.0")
    told = row(rollout_transport=rollout)
    page = transport_sections(told)
    for text in ("Transport of rollouts", "allgather_reducescatter", "downgrade", "version: vllm"):
        assert text in page, text
    note = "Experts of the rollout engine: exchange deepep_v2 requested, allgather_reducescatter observed (downgrade: "
    assert run_notes(report(told, row(iteration=4)))[1].startswith(note)
    events = iteration_events(told, {}, run_id="r", publication_uri="/p", html="")
    tags = {name: value for event in events if isinstance(event, Tags) for name, value in event.values.items()}
    assert (tags["rollout_transport.status"], tags["transport.status"]) == ("downgrade", "ok")
    assert tags["rollout_transport.version.vllm"] == "0.32.0"
    files = {event.name: event.text for event in events if isinstance(event, Artifact)}
    assert json.loads(files["rollout_transport/iteration-00003.json"]) == rollout


def test_ranks_are_compared_only_where_there_are_several() -> None:
    assert exchange_section([row(transport=TRANSPORT | {"ranks": 1})]) == ""
    assert exchange_section([row(router_layers=[])]) == ""
    page = exchange_section([row(), row(iteration=4)])
    assert "rank imbalance, 4: 1.25" in page
    assert "share of the step, 3: 0.25" in page


@pytest.mark.parametrize("status", ["downgrade", "unverifiable"])
def test_a_doubtful_transport_is_noted_even_when_a_later_one_was_in_order(status: str) -> None:
    doubtful = TRANSPORT | {"status": status, "reason": "node 1 sent nothing"}
    (note, *_) = run_notes(report(row(transport=doubtful), row(iteration=4)))
    assert note == f"Experts: dispatcher deepep requested, deepep observed ({status}: node 1 sent nothing)."


def test_a_run_that_has_not_trained_says_what_it_asked_for() -> None:
    assert run_notes(report())[0] == "Experts: dispatcher deepep requested, not trained yet."


def test_the_tracking_server_gets_the_transport_as_tags_and_file_and_the_layers_as_metrics() -> None:
    events = iteration_events(row(), {"moe/rank_imbalance": 1.25}, run_id="r", publication_uri="/p", html="")
    metrics = {event.key: event.value for event in events if isinstance(event, Metric)}
    assert metrics["moe_layer_01/rank_imbalance"] == 1.25
    assert not [key for key in metrics if any(other.startswith(f"{key}/") for other in metrics)]
    tags = {name: value for event in events if isinstance(event, Tags) for name, value in event.values.items()}
    assert tags["transport.observed"] == "deepep" and tags["transport.status"] == "ok"
    assert tags["transport.version.efa"] == "2.13.1"
    files = {event.name: event.text for event in events if isinstance(event, Artifact)}
    assert json.loads(files["transport/iteration-00003.json"]) == TRANSPORT


def test_the_engine_and_its_worst_mismatch_are_shown() -> None:
    engine = {"engine": "vllm", "engine_version": "0.32.0", "probe_difference": 7.2e-7}
    rows = [
        row(iteration=number, rollout_engine=engine, rollout_mismatch=dict(zip(MISMATCH_ROWS, values, strict=True)))
        for number, values in ((3, (4.3e-6, 1e-13)), (4, (2e-6, 2e-13)))
    ]
    page = engine_section(rows[0])
    for text in ("vllm", "0.32.0", "4.30e-06", "1.00e-13"):
        assert text in page, text
    note = "Rollout engine: vllm 0.32.0; log-probabilities at most 4.3e-06 off the trainer's, k3 KL at most 2.0e-13."
    assert note in run_notes(report(*rows))
    assert engine_section(row()) == ""
