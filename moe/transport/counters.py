"""Bytes that the network devices of this node sent, as the kernel counts them.

The only proof of which network carried an exchange: read before and after, and compare the difference with the bytes
that were to leave the node. A counter that does not exist is absent, never 0.
"""

from dataclasses import dataclass
from pathlib import Path

EFA_COUNTERS = ("rdma_write_bytes", "rdma_read_resp_bytes", "rdma_write_recv_bytes", "send_bytes", "tx_bytes")
"""Of the kernel's EFA driver (drivers/infiniband/hw/efa/efa_verbs.c), under hw_counters of a port."""
INFINIBAND_WORD_BYTES = 4
"""port_xmit_data counts words of four bytes (InfiniBand specification, PortCounters)."""
PAYLOAD_COUNTERS = ("rdma_write_bytes", "rdma_read_resp_bytes", "send_bytes")


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Sums over the devices of this node; as a snapshot since boot, as a difference between two of them."""

    rdma_devices: int
    """Devices under /sys/class/infiniband: EFA, InfiniBand, RoCE."""
    rdma: dict[str, int]
    """Byte counters by name: those of EFA, and `port_xmit_bytes` of InfiniBand and RoCE."""
    ethernet_sent_bytes: int | None
    """All network interfaces but the loopback; None: not readable."""

    @property
    def rdma_sent_bytes(self) -> int | None:
        """What the RDMA devices sent: the largest of the views that the counters give; None: no counter of bytes.

        `tx_bytes` counts everything, and is missing in old drivers; a write, the answer to a read and a send are
        counted on the sender.
        """
        payload = sum(self.rdma.get(name, 0) for name in PAYLOAD_COUNTERS)
        views = [self.rdma[name] for name in ("tx_bytes", "port_xmit_bytes") if name in self.rdma]
        if any(name in self.rdma for name in PAYLOAD_COUNTERS):
            views.append(payload)
        return max(views, default=None)


def read_counters(root: Path = Path("/")) -> Counters:
    """Snapshot of this node; `root` is where its /sys is mounted."""
    devices = _entries(root / "sys/class/infiniband")
    rdma: dict[str, int] = {}
    for device in devices:
        for port in _entries(device / "ports"):
            for name in EFA_COUNTERS:
                _add(rdma, name, _number(port / "hw_counters" / name))
            words = _number(port / "counters/port_xmit_data")
            _add(rdma, "port_xmit_bytes", None if words is None else words * INFINIBAND_WORD_BYTES)
    interfaces = [path for path in _entries(root / "sys/class/net") if path.name != "lo"]
    sent = [_number(path / "statistics/tx_bytes") for path in interfaces]
    known = [number for number in sent if number is not None]
    return Counters(rdma_devices=len(devices), rdma=rdma, ethernet_sent_bytes=sum(known) if known else None)


def difference(before: Counters, after: Counters) -> Counters:
    """What was counted between two snapshots; a counter that only one of them has is left out."""
    rdma = {name: after.rdma[name] - number for name, number in before.rdma.items() if name in after.rdma}
    ethernet = None
    if before.ethernet_sent_bytes is not None and after.ethernet_sent_bytes is not None:
        ethernet = after.ethernet_sent_bytes - before.ethernet_sent_bytes
    return Counters(rdma_devices=after.rdma_devices, rdma=rdma, ethernet_sent_bytes=ethernet)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _number(path: Path) -> int | None:
    """A counter's value; None where the driver has no such counter, or refuses to read it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # InfiniBand files say "N/A (no PMA)" where a counter is not implemented
        return None


def _add(sums: dict[str, int], name: str, number: int | None) -> None:
    if number is not None:
        sums[name] = sums.get(name, 0) + number
