"""Byte counters of a node's network devices, read from a made-up /sys."""

from pathlib import Path

import pytest

from moe.transport.counters import Counters, difference, read_counters


def write(root: Path, values: dict[str, object]) -> Path:
    """Files under `root`, by path."""
    for name, value in values.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


def efa(device: str, **counters: object) -> dict[str, object]:
    return {f"sys/class/infiniband/{device}/ports/1/hw_counters/{name}": value for name, value in counters.items()}


def test_counters_of_all_devices_add_up(tmp_path: Path) -> None:
    first = efa("rdmap0s31", rdma_write_bytes=100, rdma_write_recv_bytes=7, tx_bytes=130)
    second = efa("rdmap1s31", rdma_write_bytes=20, rdma_write_recv_bytes=5, tx_bytes=30)
    counters = read_counters(write(tmp_path, first | second))
    assert counters.rdma_devices == 2
    assert counters.rdma == {"rdma_write_bytes": 120, "rdma_write_recv_bytes": 12, "tx_bytes": 160}
    assert counters.rdma_sent_bytes == 160


def test_sent_bytes_are_those_of_writes_sends_and_answered_reads_where_no_total_is_counted(tmp_path: Path) -> None:
    root = write(tmp_path, efa("rdmap0s31", rdma_write_bytes=100, send_bytes=10, rdma_read_resp_bytes=1))
    assert read_counters(root).rdma_sent_bytes == 111


def test_received_bytes_are_not_taken_for_sent_ones(tmp_path: Path) -> None:
    root = write(tmp_path, efa("rdmap0s31", rdma_write_recv_bytes=100))
    assert read_counters(root).rdma_sent_bytes is None


def test_infiniband_counts_words_of_four_bytes(tmp_path: Path) -> None:
    root = write(tmp_path, {"sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": 25})
    assert read_counters(root).rdma_sent_bytes == 100


def test_ethernet_is_counted_without_the_loopback(tmp_path: Path) -> None:
    tx = "sys/class/net/{}/statistics/tx_bytes"
    root = write(tmp_path, {tx.format("lo"): 1000, tx.format("ens5"): 10, tx.format("ens6"): 5})
    assert read_counters(root).ethernet_sent_bytes == 15


@pytest.mark.parametrize("text", ["N/A (no PMA)", ""])
def test_a_counter_without_a_number_is_absent(tmp_path: Path, text: str) -> None:
    root = write(tmp_path, efa("rdmap0s31", rdma_write_bytes=text, tx_bytes=3))
    assert read_counters(root).rdma == {"tx_bytes": 3}


def test_a_machine_without_devices_has_no_counters(tmp_path: Path) -> None:
    assert read_counters(tmp_path) == Counters(rdma_devices=0, rdma={}, ethernet_sent_bytes=None)


def test_a_difference_leaves_out_what_only_one_snapshot_has() -> None:
    before = Counters(rdma_devices=2, rdma={"tx_bytes": 10, "send_bytes": 3}, ethernet_sent_bytes=100)
    after = Counters(rdma_devices=1, rdma={"tx_bytes": 25}, ethernet_sent_bytes=None)
    assert difference(before, after) == Counters(rdma_devices=1, rdma={"tx_bytes": 15}, ethernet_sent_bytes=None)


def test_this_machine_can_be_read() -> None:
    counters = read_counters()
    assert difference(counters, counters).ethernet_sent_bytes in (0, None)
    assert set(difference(counters, counters).rdma.values()) <= {0}
