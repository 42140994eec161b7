"""The report page: complete, static, safe, and the charts' arithmetic."""

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps.config import RunConfig
from steps.config_loader import config_json
from steps.report_charts import Bar, Point, Series, compact, heat_map, line_chart, nice_ticks, stacked_bars, timeline
from steps.report_html import _attempt_label, _last_moment, render_iteration_html, render_run_html

PHASES = (("plan", 0.1), ("rollout", 1.9), ("reward", 0.3), ("flush", 0.1), ("train", 1.4), ("publish", 0.2),
          ("evaluate", 0.4), ("report", 0.1))  # fmt: skip


def attempt(step: str, start: float, seconds: float, **changes: Any) -> dict[str, Any]:
    row = {
        "step": step, "worker": None, "attempt": 1, "start_s": start, "end_s": start + seconds, "exit_code": 0,
        "state": "ok", "capacity_type": "local", "node": "laptop", "pod": "p", "detail": "",
    }  # fmt: skip
    return row | changes


def attempts_of_iteration(start: float, interrupted: bool) -> list[dict[str, Any]]:
    rows = []
    for step, seconds in PHASES:
        if step == "rollout" and interrupted:
            lost = {
                "exit_code": 75,
                "state": "interrupted",
                "capacity_type": "spot",
                "detail": "SIGTERM, unit returned",
            }
            rows.append(attempt(step, start, 0.6, worker=1, **lost))
            rows.append(attempt(step, start + 0.9, seconds - 0.9, worker=1, attempt=2))
            rows.append(attempt(step, start, seconds, worker=0))
        elif step == "rollout":
            rows += [attempt(step, start, seconds - 0.1 * worker, worker=worker) for worker in range(2)]
        else:
            rows.append(attempt(step, start, seconds))
        start += seconds + 0.04
    return rows


TRANSPORT = {
    "requested": "all_to_all", "observed": "all_to_all", "status": "ok", "reason": "no token left its node",
    "network": "auto", "ranks": 2, "nodes": 1, "sent_bytes": 123_000, "predicted_off_node_bytes": 0,
    "counted_rdma_bytes": None, "counted_ethernet_bytes": None, "counters": {}, "details": {"backend": "gloo"},
    "versions": {"torch": "2.13.0"}, "environment": {},
}  # fmt: skip


ACCOUNT = {
    "drawn": 64, "sampled": 64, "trained": 64, "dropped": 0, "open": 0, "samples": 1024, "tokens": 7168,
    "scored": 1024, "duplicate_samples": 0, "wasted_tokens": 0, "lost_leases": 0,
}  # fmt: skip


def layer_metrics(layer: int, iteration: int) -> dict[str, float]:
    return {
        "max_violation": 0.4, "dead_experts": 0.0, "entropy": 1.9, "rank_imbalance": 1.1 + 0.1 * layer,
        "node_imbalance": 1.0, "dropped_routes": 0.0, "sent_bytes": 2.5e6, "sent_off_node_bytes": 0.0,
        "exchange_s": 0.01 * iteration, "exchange_share": 0.125,
    }  # fmt: skip


def synthetic_report(iterations: int = 20) -> dict[str, Any]:
    """A plausible run; iteration 7 lost a rollout worker, iteration 11 was rejected."""
    rows = []
    for i in range(1, iterations + 1):
        reward = 1 - 0.7 * 0.82**i
        load = [[100 + 11 * ((e * 5 + i + layer) % 8) - 4 * i * (e == 3) for e in range(8)] for layer in range(2)]
        rows.append(
            {
                "iteration": i,
                "sampled_from": i - 1,
                "policy_version": i,
                "reward_mean": reward - 0.12,
                "reward_eval": reward - (0.2 if i == 11 else 0),
                "validated": i != 11,
                "validation_reason": "fell by 0.21 below version 10" if i == 11 else "",
                "phase_seconds": dict(PHASES),
                "wall_seconds": 4.8,
                "samples": 1024,
                "tokens": 7168,
                "rollout_tokens_per_s": 3900.0 + 40 * (i % 5),
                "train_samples_per_s": 720.0 - 15 * (i % 4),
                "expert_max_violation": 0.42 - 0.01 * i,
                "expert_load": load,
                "router_layers": [layer_metrics(layer, i) for layer in range(2)],
                "transport": TRANSPORT,
                "interruptions": int(i == 7),
                "retries": int(i == 7),
                "dropped": {"no usable reward": 2} if i == 11 else {},
                "accounting": ACCOUNT | ({"trained": 62, "dropped": 2} if i == 11 else {}),
                "weights_sha256": f"{i:064x}",
                "attempts": attempts_of_iteration(1000.0 + 5 * i, i == 7),
            }  # fmt: skip
        )
    empty = dict.fromkeys(
        ("reward_mean", "samples", "tokens", "rollout_tokens_per_s", "train_samples_per_s", "expert_max_violation")
    )
    initial = empty | {
        "iteration": 0, "sampled_from": None, "policy_version": 0, "reward_eval": 0.31, "validated": True,
        "validation_reason": "", "phase_seconds": {"init_run": 6.0}, "wall_seconds": 6.0, "expert_load": None,
        "router_layers": [], "transport": None,
        "interruptions": 0, "retries": 0, "dropped": {}, "weights_sha256": "0" * 64,
        "attempts": [attempt("init_run", 994.0, 6.0)],
    }  # fmt: skip
    return {
        "run_id": "reverse-digits-20260101-101500", "state": "finished", "wall_seconds": 103.0,
        "config_hash": "c0ffee" * 10, "final_weights_sha256": f"{iterations:064x}", "versions": {"torch": "2.13.0"},
        "config": json.loads(config_json(RunConfig())), "initial": initial, "iterations": rows,
    }  # fmt: skip


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]


def test_page_of_a_run_is_static_and_loads_nothing() -> None:
    page = render_run_html(synthetic_report())
    assert not re.search(r"<script|<link|<img|<iframe|\son\w+=|url\(|@import|javascript:", page, flags=re.IGNORECASE)
    assert re.findall(r"https?://[^\"]+", page) == ["http://www.w3.org/2000/svg"] * page.count("<svg")


def test_page_of_a_run_shows_every_iteration_and_the_run() -> None:
    report = synthetic_report()
    page = render_run_html(report)
    assert page.count("<tr>") >= 22
    for text in (
        report["run_id"],
        "0.310 → 0.987",
        "19 of 20",
        "✕ rejected",
        "no usable reward",
        "2.13.0",
        "Bottleneck",
    ):
        assert text in page
    assert 'kind = "reverse_digits"' in page.replace("&quot;", '"')


def test_page_of_a_run_says_what_came_of_every_prompt() -> None:
    page = render_run_html(synthetic_report())
    (total,) = re.findall(r"<tr><td>all</td>(.*?)</tr>", page)
    assert re.findall(r"<td>(.*?)</td>", total) == [
        "1,280", "1,280", "1,278", "2", "0", "20,480", "20,480", "0", "0", "0",
    ]  # fmt: skip


def test_every_chart_is_well_formed_and_named() -> None:
    charts = svgs(render_run_html(synthetic_report())) + svgs(render_iteration_html(synthetic_report(), 7))
    assert len(charts) > 20
    assert all(chart.get("aria-label") for chart in charts)


def test_interrupted_and_failed_attempts_are_marked_and_explained() -> None:
    page = render_iteration_html(synthetic_report(), 7)
    assert 'class="span interrupted"' in page
    assert "SIGTERM, unit returned" in page
    assert "rollout 1, attempt 1" in page
    assert 'class="span interrupted"' not in render_iteration_html(synthetic_report(), 8)


def test_an_iteration_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="iteration 21 is not in the report"):
        render_iteration_html(synthetic_report(), 21)


def test_a_run_that_has_only_begun_still_has_a_page() -> None:
    report = synthetic_report(0)
    report["initial"] |= {"reward_eval": None, "validated": None, "attempts": []}
    page = render_run_html(report | {"final_weights_sha256": None, "versions": {}})
    assert "Nothing recorded yet." in page


def test_names_and_details_from_outside_are_escaped() -> None:
    report = synthetic_report(1)
    report["config"]["description"] = "<script>alert(1)</script>"
    report["iterations"][0]["attempts"][0] |= {"detail": "<b>&", "node": "<i>"}
    pages = render_run_html(report) + render_iteration_html(report, 1)
    assert "<script" not in pages and "<i>" not in pages and "&lt;b&gt;&amp;" in pages


@given(st.floats(min_value=1e-6, max_value=1e12))
def test_ticks_start_at_zero_cover_the_maximum_and_are_few(maximum: float) -> None:
    ticks = nice_ticks(maximum)
    assert ticks[0] == 0
    assert ticks[-1] >= maximum * 0.999999
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(("value", "text"), [(0.2, "0.2"), (950, "950"), (12500, "12.5k"), (3e6, "3M"), (2e9, "2G")])
def test_axis_labels_are_short(value: float, text: str) -> None:
    assert compact(value) == text


def test_a_line_passes_through_its_points() -> None:
    chart = line_chart([Series(name="a", colour="--blue", points=[Point(x=0, y=0.0), Point(x=2, y=1.0)])], x_label="x")
    (points,) = re.findall(r'points="([^"]+)"', chart)
    (x0, y0), (x1, y1) = (map(float, pair.split(",")) for pair in points.split())
    assert x0 < x1 and y0 > y1


def test_stacked_parts_are_as_high_as_their_seconds() -> None:
    chart = stacked_bars([("1", {"a": 1.0, "b": 3.0})], {"a": "--blue", "b": "--aqua"}, x_label="iteration")
    first, second = (float(height) for height in re.findall(r'class="part"[^>]* height="([\d.]+)"', chart))
    assert second == pytest.approx(3 * first, rel=0.02)


def test_a_balanced_expert_is_one_in_the_heat_map() -> None:
    chart = heat_map([[10, 10, 20, 0]])
    assert re.findall(r">([\d.]+)</text><title>", chart) == ["1.00", "1.00", "2.00", "0.00"]


def test_an_attempt_that_was_killed_lasts_until_the_next_one() -> None:
    killed = attempt("rollout", 10.0, 0.0, worker="0", end_s=None, exit_code=None, state="interrupted")
    again = attempt("rollout", 11.5, 1.0, worker="0", attempt=2)
    running = attempt("reward", 12.0, 0.0, worker="0", end_s=None, exit_code=None, state="running")
    attempts = [killed, again, running]
    assert [_last_moment(one, attempts) for one in attempts] == [11.5, 12.5, 12.5]
    assert [_attempt_label(one, 10.0).split(": ")[1] for one in attempts] == [
        "killed from 0.00 s",
        "1.00 s from 1.50 s, exit 0",
        "running from 2.00 s",
    ]


def test_a_timeline_has_one_row_for_each_step_and_worker() -> None:
    bars = [
        Bar(row=row, start_s=start, end_s=start + 1, colour="--blue", state="ok", label=row)
        for row, start in (("rollout 0", 0.0), ("rollout 1", 0.0), ("rollout 1", 2.0))
    ]
    chart = timeline(bars)
    assert chart.count('text-anchor="end">rollout') == 2
    assert chart.count('class="span ok"') == 3
