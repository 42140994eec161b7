"""The report's sections on experts across ranks: load of each layer, cost of the exchanges, and their transport."""

from collections.abc import Mapping, Sequence
from typing import Any

from steps.report_charts import Point, Series, legend, line_chart
from steps.report_parts import number_text, pairs_table, section, table

LAYER_COLUMNS = (
    "layer", "max violation", "dead experts", "entropy", "rank imbalance", "node imbalance", "dropped routes",
    "MB sent", "MB off the node", "exchange s", "share of the step",
)  # fmt: skip
TRANSPORT_ROWS = {
    "requested": "requested",
    "observed": "observed",
    "status": "verdict",
    "reason": "because",
    "network": "network setting",
    "ranks": "ranks",
    "nodes": "nodes",
    "sent_bytes": "bytes sent to other ranks",
    "predicted_off_node_bytes": "bytes that had to leave a node",
    "counted_rdma_bytes": "bytes that RDMA devices sent meanwhile",
    "counted_ethernet_bytes": "bytes that Ethernet interfaces sent meanwhile",
    "gin_type": "GPU-initiated networking",
}
"""Keys of `moe.transport.report.collect` and what they are called here."""


def layer_section(layers: Sequence[Mapping[str, float]]) -> str:
    """A table with a row for each Mixture-of-Experts layer; nothing before the first update."""
    if not layers:
        return ""
    rows = [
        [
            str(number),
            number_text(layer["max_violation"], 2),
            number_text(layer["dead_experts"], 1),
            number_text(layer["entropy"], 3),
            number_text(layer["rank_imbalance"], 2),
            number_text(layer["node_imbalance"], 2),
            number_text(layer["dropped_routes"], 1),
            number_text(layer["sent_bytes"] / 1e6, 3),
            number_text(layer["sent_off_node_bytes"] / 1e6, 3),
            number_text(layer.get("exchange_s"), 3),
            f"{layer['exchange_share']:.1%}" if "exchange_share" in layer else "–",
        ]
        for number, layer in enumerate(layers)
    ]
    hint = "Means over the optimizer steps. Entropy in nats; imbalance is max/mean; bytes are those of one rank."
    return section("Expert layers", hint, table(LAYER_COLUMNS, rows))


def transport_sections(row: Mapping[str, Any]) -> str:
    """What was asked for, what was observed, and the evidence: of an iteration's update, and of its rollout engine.

    Nothing of an update before the first one, nor of an engine whose experts are in one process.
    """
    update = _transport_section("Transport", "How the tokens reached their experts in this update.", row["transport"])
    rollout = row.get("rollout_transport")
    hint = "How the tokens reached their experts in the rollout engine, by its own report."
    return update + _transport_section("Transport of rollouts", hint, rollout)


def _transport_section(title: str, hint: str, transport: Mapping[str, Any] | None) -> str:
    if not transport:
        return ""
    values = {title: transport[key] for key, title in TRANSPORT_ROWS.items() if transport.get(key) is not None}
    values |= {f"backend: {key}": value for key, value in transport["details"].items()}
    values |= {f"version: {key}": value for key, value in transport["versions"].items()}
    return section(title, hint, pairs_table(values, ("fact", "value")))


def exchange_section(iterations: Sequence[Mapping[str, Any]]) -> str:
    """Balance between ranks and the exchanges' share of a step, by iteration; nothing for a run of one rank."""
    several = [row for row in iterations if (row["transport"] or {}).get("ranks", 1) > 1]
    measured = [row for row in several if row["router_layers"]]
    if not measured:
        return ""
    worst = {"rank imbalance": "rank_imbalance", "node imbalance": "node_imbalance"}
    colours = {"rank imbalance": "--violet", "node imbalance": "--blue"}
    lines = [
        Series(name=name, colour=colours[name], points=[_worst(row, key) for row in measured])
        for name, key in worst.items()
    ]
    share = Series(name="share of the step", colour="--orange", points=_shares(measured))
    left = section(
        "Balance between ranks",
        "max/mean of the routes to a rank, and to a node; worst layer; 1 is even.",
        legend(colours) + line_chart(lines, x_label="iteration"),
    )
    right = section(
        "Exchanges", "Their share of an optimizer step, waiting included.", line_chart([share], x_label="iteration")
    )
    return f'<div class="grid2">{left}{right}</div>'


def _worst(row: Mapping[str, Any], key: str) -> Point:
    return Point(x=row["iteration"], y=max(layer[key] for layer in row["router_layers"]))


def _shares(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Of the iterations whose last attempt measured any."""
    timed = [row for row in rows if all("exchange_share" in layer for layer in row["router_layers"])]
    return [
        Point(x=row["iteration"], y=sum(layer["exchange_share"] for layer in row["router_layers"])) for row in timed
    ]
