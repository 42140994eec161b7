"""Expert exchange: dispatch and combine, forward and backward, against the loopback limit of the same run.

    python -m benchmarks.dispatch [--ranks 2] [--backends all_to_all all_to_all:rank] [--tokens 4096] [--skew 0 1] ...
    torchrun --nproc-per-node 8 -m benchmarks.dispatch --backends all_to_all deepep --dtypes bfloat16

Every rank holds TOKENS tokens. A backend is named as in `moe.dispatcher`, with `:rank` or `:node` for
`moe.deduplicate` and `:low_latency` for `moe.low_latency` (forward only). The experts do nothing, so that what is timed
is the exchange: packing and unpacking included, the slowest rank counts.

The limit is a bare `all_to_all_single` with equal splits, of as many bytes as all routes have without deduplication,
timed before each exchange, so that a disturbance of the machine falls on both. Medians over the repeats:
`limit_time_over_time` compares seconds, so it rises when a token crosses only once; `share_of_limit` compares bytes
sent a second, so it does not. Prints JSON.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path


def main() -> None:
    """Run all combinations and print their JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes forked here; not under torchrun")
    parser.add_argument("--ranks-per-node", type=int, help="pretend that only so many ranks share a node")
    parser.add_argument("--backends", nargs="+", default=["all_to_all", "all_to_all:rank"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--top-k", type=int, nargs="+", default=[8])
    parser.add_argument("--skew", type=float, nargs="+", default=[0.0], help="exponents of a Zipf law over the experts")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float64", "float32", "bfloat16"])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7, help="timed exchanges; medians are reported")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    # Large temporaries on huge pages, for the limit and the backends alike; read when torch first allocates.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    load = os.getloadavg()[0]
    sys.exit(start(arguments, load))


def start(arguments: argparse.Namespace, load_average: float) -> int:
    """Be a rank of torchrun's world, or fork the ranks; the exit code."""
    from benchmarks._dispatch_ranks import measure_all
    from steps.gang import joined, member_of_environment, run_local_ranks

    def rank() -> None:
        import torch

        torch.set_num_threads(1)
        member = member_of_environment()
        assert member is not None
        with joined(member, timeout_s=600.0):
            ranks_per_node = arguments.ranks_per_node or member.local_size
            rows = measure_all(arguments, member.rank, ranks_per_node)
        if member.rank == 0:
            print_report(arguments, rows, (member.size, ranks_per_node), load_average)

    if "RANK" not in os.environ:
        return run_local_ranks(arguments.ranks, rank)
    rank()
    return 0


def print_report(
    arguments: argparse.Namespace, rows: list[dict[str, object]], ranks: tuple[int, int], load_average: float
) -> None:
    """`ranks`: of the world, and of a node."""
    import torch

    report = {
        "benchmark": "dispatch",
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "load_average": round(load_average, 1)},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "ranks": ranks[0],
        "ranks_per_node": ranks[1],
        "hidden": arguments.hidden,
        "experts": arguments.experts,
        "repeats": arguments.repeats,
        "results": rows,
    }
    text = json.dumps(report, indent=2)
    print(text, flush=True)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
