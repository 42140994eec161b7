"""Run the expert exchange on the ranks at hand: is it exact, how fast is it, and which transport carried it?

Ranks are those that torchrun started, or else forked on this machine (--ranks). Each sends made-up tokens through the
dispatcher, forward and backward, and compares the result and all gradients with a dense computation. Run it in a new
image, on the nodes of a campaign, before the campaign.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from moe.config import MoeConfig
from steps.arguments import StepParser, positive_int
from steps.config_loader import load_config
from steps.errors import ConfigError, DataError, StepError, UsageError

PROGRAM = "moerl transport probe"
EPILOG = """\
exit codes:
  0   results match the dense computation, and nothing contradicts the transport that was asked for
  64  wrong options
  65  results differ from the dense computation: don't train here
  75  a rank is gone, or waited too long for the others
  78  a limit of the backend, a missing library, or another transport than the one asked for

examples:
  moerl transport probe --ranks 2
  moerl transport probe --ranks 4 --deduplicate rank --tokens 512 --hidden 256 --json
  torchrun --nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m steps.transport_probe --dispatcher deepep --network rdma --hidden 7168 --experts 256
"""
BFLOAT16_ONLY = ("deepep", "uccl_ep", "nccl_ep")
MOE_OPTIONS = (
    *("dispatcher", "deduplicate", "exchange_dtype", "exchange_timeout_s", "network", "num_sms", "low_latency"),
    "max_tokens_per_rank",
)
LOCAL_RANKS = 2
LOCAL_SIZES = {"tokens": 512, "hidden": 256, "top_k": 8, "experts": 64}
"""Small enough for a laptop's loopback; real sizes are options."""


def build_parser() -> StepParser:
    """Options of the probe; those of `moe.*` are the fields of MoeConfig."""
    hints = get_type_hints(MoeConfig)
    parser = StepParser(
        prog=PROGRAM,
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--ranks", type=positive_int, help="processes to fork on this machine; not under torchrun (default: 2)")
    add("--config", metavar="FILE", help="TOML file of a campaign: start from its [moe] settings")
    exchanging = [name for name in get_args(hints["dispatcher"]) if name != "local"]
    add("--dispatcher", choices=exchanging, help="moe.dispatcher (default: all_to_all)")
    add("--deduplicate", choices=get_args(hints["deduplicate"]), help="moe.deduplicate")
    add("--exchange-dtype", choices=get_args(hints["exchange_dtype"]), help="moe.exchange_dtype")
    add("--network", choices=get_args(hints["network"]), help="moe.network: what must carry bytes between nodes")
    add("--num-sms", type=positive_int, help="moe.num_sms")
    add("--low-latency", action="store_const", const=True, help="moe.low_latency: forward only")
    add("--max-tokens-per-rank", type=positive_int, help="moe.max_tokens_per_rank, for buffers (default: --tokens)")
    add("--timeout", type=float, dest="exchange_timeout_s", metavar="S", help="moe.exchange_timeout_s (default: 60)")
    add("--tokens", type=positive_int, help=f"of each rank (default: {LOCAL_SIZES['tokens']})")
    add("--hidden", type=positive_int, help=f"hidden size (default: {LOCAL_SIZES['hidden']})")
    add("--top-k", type=positive_int, help=f"experts of a token (default: {LOCAL_SIZES['top_k']})")
    add("--experts", type=positive_int, help=f"of all ranks together (default: {LOCAL_SIZES['experts']})")
    add("--dtype", choices=("float64", "float32", "bfloat16"), help="default: bfloat16 where the backend needs it")
    add("--skew", type=float, default=0.0, help="exponent of a Zipf law over the experts (default: 0, uniform)")
    add("--repeats", type=positive_int, default=5, help="timed exchanges; the median is shown (default: 5)")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def read_moe(arguments: argparse.Namespace) -> MoeConfig:
    """The settings of --config, or defaults fit for a probe, under the options that were given.

    Raises ConfigError for a bad file, UsageError for an option out of its range or a dispatcher without an exchange.
    """
    from pydantic import TypeAdapter, ValidationError

    tokens = arguments.tokens or LOCAL_SIZES["tokens"]
    base = MoeConfig(dispatcher="all_to_all", exchange_timeout_s=60.0, max_tokens_per_rank=tokens)
    if arguments.config is not None:
        base = load_config(arguments.config).moe
        if base.dispatcher == "local" and arguments.dispatcher is None:
            raise UsageError(
                f"{arguments.config}: moe.dispatcher = local exchanges nothing: name one with --dispatcher"
            )
    given = {name: getattr(arguments, name) for name in MOE_OPTIONS if getattr(arguments, name) is not None}
    values = {field.name: getattr(base, field.name) for field in fields(base)} | given | {"expert_parallel_size": 0}
    try:
        return TypeAdapter(MoeConfig).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"moe.{first['loc'][0]} = {first['input']!r}: {first['msg']}") from None


def probe_shape(arguments: argparse.Namespace, moe: MoeConfig) -> dict[str, Any]:
    """Arguments of `ProbeShape`. Raises UsageError when a token needs more experts than there are."""
    sizes = {name: getattr(arguments, name) or default for name, default in LOCAL_SIZES.items()}
    if sizes["top_k"] > sizes["experts"]:
        raise UsageError(f"--top-k {sizes['top_k']} exceeds --experts {sizes['experts']}: a token's experts differ")
    dtype = arguments.dtype or ("bfloat16" if moe.dispatcher in BFLOAT16_ONLY else "float32")
    return {**sizes, "dtype": dtype, "skew": arguments.skew}


def outcome(report: Mapping[str, Any], on_downgrade: str) -> StepError | None:
    """What a finished probe ends with: None when the exchange may be trained on."""
    if not report["matches"]:
        wrong = [name for name, entry in report["exact"].items() if entry["error"] > entry["tolerance"]]
        return DataError(f"{', '.join(wrong)} differ from the dense computation: don't train with this transport")
    transport = report["transport"]
    if transport["status"] == "downgrade" and on_downgrade == "fail":
        return ConfigError(f"transport downgraded: {transport['reason']}")
    return None


def table(report: Mapping[str, Any]) -> str:
    """The report for a person."""
    shape, transport = report["shape"], report["transport"]
    lines = [
        f"{report['dispatcher']}: {report['ranks']} ranks on {transport['nodes']} node(s); {shape['tokens']} tokens a "
        f"rank, hidden {shape['hidden']}, top-{shape['top_k']} of {shape['experts']} experts, {shape['dtype']}",
        "",
        f"{'against the dense computation':<32}{'error':>10}{'allowed':>10}",
    ]
    for name, entry in report["exact"].items():
        verdict = "ok" if entry["error"] <= entry["tolerance"] else "DIFFERS"
        lines.append(f"{name:<32}{entry['error']:>10.1e}{entry['tolerance']:>10.0e}  {verdict}")
    lines += ["", f"{'phase':<24}{'median ms':>10}{'fastest':>10}{'slowest':>10}{'sent MB':>10}{'GB/s':>8}"]
    for name, phase in report["phases"].items():
        times = "".join(f"{phase[key] * 1e3:>10.2f}" for key in ("seconds", "fastest_s", "slowest_s"))
        lines.append(f"{name:<24}{times}{phase['sent_bytes'] / 1e6:>10.2f}{phase['gb_per_s']:>8.2f}")
    lines += [
        f"{'one token, both ways':<24}{report['one_token_s'] * 1e3:>10.2f}",
        "",
        f"transport  {transport['status']}: {transport['reason']}",
        f"observed   {transport['observed']} {_pairs(transport['details'])}".rstrip(),
        f"versions   {_pairs(transport['versions'])}",
    ]
    if transport["environment"]:
        lines.append(f"variables  {_pairs(transport['environment'])}")
    return "\n".join(lines)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = build_parser().parse_args(arguments)
    try:
        raise SystemExit(_run(parsed))
    except StepError as error:
        _explain(error)
        raise SystemExit(error.exit_code) from None


def _run(arguments: argparse.Namespace) -> int:
    moe = read_moe(arguments)
    shape = probe_shape(arguments, moe)
    if arguments.ranks is not None and "RANK" in os.environ:
        raise UsageError("--ranks forks ranks on this machine, but RANK says that torchrun did: leave it out")
    from steps.transport_ranks import run_probe_ranks  # loads torch: not needed to refuse a wrong option

    def finish(report: Mapping[str, Any], prints: bool) -> int:
        failure = outcome(report, moe.on_downgrade)
        if prints:
            print(json.dumps(report, indent=2) if arguments.json else table(report), flush=True)
            if failure is not None:
                _explain(failure)
        return 0 if failure is None else failure.exit_code

    return run_probe_ranks(moe, shape, arguments.repeats, arguments.ranks or LOCAL_RANKS, finish, _explain)


def _explain(error: StepError) -> None:
    print(f"{PROGRAM}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
