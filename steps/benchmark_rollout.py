"""Sample the same prompts under two dispatchers: which is faster, and do they draw the same tokens?

The policy and the prompts are those of a run. The ranks are torchrun's, or else forked on this machine (--ranks); each
samples its own prompts, all in lock step, since every layer's exchange takes all of them: stop tokens are drawn like
any other, so that every response has `rollout.sampling.max_new_tokens` tokens. The two dispatchers take turns.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from moe.config import MoeConfig
from steps.arguments import positive_int, step_parser
from steps.environment import StepEnvironment, read_environment
from steps.errors import StepError, UsageError

STEP = "benchmark_rollout"
LOCAL_RANKS = 2


def build_parser() -> argparse.ArgumentParser:
    parser = step_parser(STEP, __doc__, iteration=False)
    choices = get_args(get_type_hints(MoeConfig)["dispatcher"])
    for option, default in (("--first", "local"), ("--second", "all_to_all")):
        parser.add_argument(option, choices=choices, default=default, help=f"a dispatcher (default: {default})")
    parser.add_argument("--ranks", type=positive_int, help=f"to fork here; not under torchrun (default: {LOCAL_RANKS})")
    parser.add_argument("--prompts", type=positive_int, default=16, help="of each rank (default: 16)")
    parser.add_argument("--repeats", type=positive_int, default=3, help="timed turns of each (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def summarise(turns: Sequence[Mapping[str, Any]], dispatchers: Sequence[str], ranks: int) -> dict[str, Any]:
    """The comparison from every rank's turns.

    Each turn: `dispatcher`, `seconds` (of the slowest rank), `tokens` (of all ranks), `responses` (token ids of all
    ranks, in order). Speeds are medians over a dispatcher's turns; tokens are compared on their first ones.
    """
    speeds: dict[str, float] = {}
    first: dict[str, Sequence[Sequence[int]]] = {}
    for name in dispatchers:
        own = [turn for turn in turns if turn["dispatcher"] == name]
        speeds[name] = statistics.median(turn["tokens"] / turn["seconds"] for turn in own)
        first[name] = own[0]["responses"]
    left, right = (first[name] for name in dispatchers)
    pairs = [pair for one, other in zip(left, right, strict=True) for pair in zip(one, other, strict=True)]
    return {
        "ranks": ranks,
        "responses": len(left),
        "tokens_per_s": speeds,
        "ratio": speeds[dispatchers[1]] / speeds[dispatchers[0]],
        "equal_tokens": sum(one == other for one, other in pairs) / len(pairs),
        "equal_responses": sum(list(one) == list(other) for one, other in zip(left, right, strict=True)) / len(left),
    }


def table(report: Mapping[str, Any]) -> str:
    """The report for a person."""
    lines = [f"{report['ranks']} ranks, {report['responses']} responses", f"{'dispatcher':<16}{'tokens/s':>12}"]
    lines += [f"{name:<16}{speed:>12,.0f}" for name, speed in report["tokens_per_s"].items()]
    return "\n".join([*lines, one_line(report)])


def one_line(report: Mapping[str, Any]) -> str:
    first, second = report["tokens_per_s"]
    equal = f"{report['equal_responses']:.1%} of responses and {report['equal_tokens']:.1%} of tokens are equal"
    return f"{second} samples {report['ratio']:.2f} times as fast as {first}; {equal}"


def write_outputs(environment: StepEnvironment, report: Mapping[str, Any]) -> None:
    """What Argo shows of the step."""
    folder = environment.outputs_dir
    folder.mkdir(parents=True, exist_ok=True)
    values = {"summary": one_line(report), "ratio": f"{report['ratio']:.3f}", "report": json.dumps(report)}
    for name, value in values.items():
        (folder / name).write_text(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = build_parser().parse_args(arguments)
    try:
        raise SystemExit(_run(parsed))
    except StepError as error:
        explain(error)
        raise SystemExit(error.exit_code) from None


def _run(arguments: argparse.Namespace) -> int:
    if arguments.first == arguments.second:
        raise UsageError(f"--first and --second are both {arguments.first}: name two dispatchers")
    if arguments.ranks is not None and "RANK" in os.environ:
        raise UsageError("--ranks forks ranks on this machine, but RANK says that torchrun did: leave it out")
    environment = read_environment()
    from steps.benchmark_ranks import run_ranks  # loads torch: not needed to refuse a wrong option

    dispatchers = (arguments.first, arguments.second)

    def finish(turns: Sequence[Mapping[str, Any]], ranks: int) -> None:
        report = summarise(turns, dispatchers, ranks)
        write_outputs(environment, report)
        print(json.dumps(report, indent=2) if arguments.json else table(report), flush=True)

    return run_ranks(
        environment,
        arguments.run,
        dispatchers,
        prompts=arguments.prompts,
        repeats=arguments.repeats,
        ranks=arguments.ranks or LOCAL_RANKS,
        finish=finish,
        explain=explain,
    )


def explain(error: StepError) -> None:
    print(f"{STEP}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
