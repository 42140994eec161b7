"""The probe as a command: its options, its table, its exit codes, and real ranks."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import moe.transport.probe
from moe.config import MoeConfig
from steps.errors import ConfigError, DataError, StepError, UsageError
from steps.transport_probe import build_parser, main, outcome, probe_shape, read_moe, table

SMALL = ("--tokens", "40", "--hidden", "16", "--top-k", "2", "--experts", "12", "--repeats", "1")


def probe(*arguments: str) -> int:
    """The exit code, in ranks forked from here."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def a_report(**transport: Any) -> dict[str, Any]:
    entry = {"error": 1e-13, "tolerance": 1e-12}
    phase = {"seconds": 0.002, "fastest_s": 0.001, "slowest_s": 0.003, "sent_bytes": 4e6, "gb_per_s": 2.0}
    verdict = {"status": "ok", "reason": "no token left its node", "observed": "deepep", "nodes": 2}
    facts = {"details": {"flavour": "EPBuffer"}, "versions": {"torch": "2.13.0"}, "environment": {"FI_PROVIDER": "efa"}}
    return {
        "dispatcher": "deepep",
        "shape": {"tokens": 512, "hidden": 256, "top_k": 8, "experts": 64, "dtype": "bfloat16"},
        "ranks": 16,
        "matches": True,
        "exact": {"output": dict(entry), "gradient of weights": dict(entry)},
        "phases": {"dispatch": phase},
        "one_token_s": 0.0005,
        "transport": verdict | facts | transport,
    }


def test_without_options_all_to_all_is_probed() -> None:
    arguments = build_parser().parse_args([])
    moe = read_moe(arguments)
    assert (moe.dispatcher, moe.exchange_timeout_s) == ("all_to_all", 60.0)
    shape = {"tokens": 512, "hidden": 256, "top_k": 8, "experts": 64, "dtype": "float32", "skew": 0.0}
    assert probe_shape(arguments, moe) == shape


def test_a_backend_of_bfloat16_is_probed_in_bfloat16() -> None:
    arguments = build_parser().parse_args(["--dispatcher", "deepep"])
    assert probe_shape(arguments, read_moe(arguments))["dtype"] == "bfloat16"


def test_buffers_are_for_the_tokens_that_are_sent(tmp_path: Path) -> None:
    few = ["--dispatcher", "deepep", "--low-latency", "--tokens", "128"]
    assert read_moe(build_parser().parse_args(few)).max_tokens_per_rank == 128
    assert read_moe(build_parser().parse_args([*few, "--max-tokens-per-rank", "256"])).max_tokens_per_rank == 256
    config = tmp_path / "campaign.toml"
    config.write_text("[moe]\nmax_tokens_per_rank = 300\n")
    assert read_moe(build_parser().parse_args([*few, "--config", str(config)])).max_tokens_per_rank == 300


def test_options_come_on_top_of_a_campaigns_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "probe"\n[moe]\nnum_sms = 24\nnetwork = "any"\nbias_update_rate = 0.0\n')
    arguments = build_parser().parse_args(["--config", str(file), "--dispatcher", "uccl_ep", "--network", "rdma"])
    moe = read_moe(arguments)
    assert (moe.dispatcher, moe.num_sms, moe.network, moe.expert_parallel_size) == ("uccl_ep", 24, "rdma", 0)


def test_a_campaign_without_an_exchange_needs_a_dispatcher_to_probe(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "probe"\n')
    with pytest.raises(UsageError, match="moe.dispatcher = local exchanges nothing"):
        read_moe(build_parser().parse_args(["--config", str(file)]))


def test_a_missing_campaign_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="nowhere.toml"):
        read_moe(build_parser().parse_args(["--config", str(tmp_path / "nowhere.toml")]))


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--num-sms", "3"], "moe.num_sms = 3"), (["--timeout", "0"], "moe.exchange_timeout_s = 0")],
)
def test_an_option_out_of_range_is_named(options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_moe(build_parser().parse_args(options))


def test_more_experts_a_token_than_there_are_is_a_wrong_call() -> None:
    arguments = build_parser().parse_args(["--top-k", "8", "--experts", "4"])
    with pytest.raises(UsageError, match="--top-k 8 exceeds --experts 4"):
        probe_shape(arguments, MoeConfig())


@pytest.mark.parametrize("options", [["--dispatcher", "mpi"], ["--tokens", "0"], ["--nothing"], ["--skew", "x"]])
def test_a_wrong_call_is_one_line_and_exits_with_64(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert probe(*options) == 64
    assert capsys.readouterr().err.count("\n") == 1


def test_ranks_are_not_forked_by_a_rank_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert probe("--ranks", "2") == 64
    assert "torchrun" in capsys.readouterr().err


def test_the_outcome_is_that_of_the_results_first() -> None:
    report = a_report(status="downgrade", reason="node 1 was to send 3 MB")
    assert isinstance(outcome(report, "fail"), ConfigError)
    assert outcome(report, "warn") is None
    assert outcome(a_report(status="unverifiable"), "fail") is None
    report["matches"] = False
    report["exact"]["output"]["error"] = 0.5
    failure = outcome(report, "fail")
    assert isinstance(failure, DataError)
    assert str(failure).startswith("output differ")


def test_the_table_shows_errors_phases_verdict_and_versions() -> None:
    report = a_report()
    report["exact"]["output"]["error"] = 0.5
    lines = table(report).splitlines()
    assert lines[0].startswith("deepep: 16 ranks on 2 node(s); 512 tokens a rank, hidden 256, top-8 of 64 experts, bf")
    assert [line.split()[-1] for line in lines if line.startswith(("output", "gradient"))] == ["DIFFERS", "ok"]
    assert "dispatch                      2.00      1.00      3.00      4.00    2.00" in lines
    assert "transport  ok: no token left its node" in lines
    assert "observed   deepep flavour EPBuffer" in lines
    assert "versions   torch 2.13.0" in lines
    assert "variables  FI_PROVIDER efa" in lines


def test_two_ranks_exchange_exactly(capfd: pytest.CaptureFixture[str]) -> None:
    assert probe("--ranks", "2", "--json", "--dtype", "float64", *SMALL) == 0
    printed = capfd.readouterr()
    report = json.loads(printed.out)
    assert report["matches"]
    assert (report["ranks"], report["transport"]["observed"]) == (2, "all_to_all")
    assert printed.err == ""


def test_results_that_differ_exit_with_65(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(moe.transport.probe.TOLERANCES, "float32", 0.0)
    assert probe("--ranks", "2", *SMALL) == 65
    printed = capfd.readouterr()
    assert "DIFFERS" in printed.out
    assert printed.err.count("\n") == 1
    assert "don't train" in printed.err


def test_a_limit_is_told_once_and_exits_with_78(capfd: pytest.CaptureFixture[str]) -> None:
    assert probe("--ranks", "3", *SMALL[:-4], "--experts", "8") == 78
    stderr = capfd.readouterr().err
    assert stderr.count("\n") == 1
    assert stderr.startswith("moerl transport probe: 8 experts")


def test_a_missing_library_names_the_extra(capfd: pytest.CaptureFixture[str]) -> None:
    assert probe("--ranks", "2", "--dispatcher", "deepep", *SMALL) == 78
    assert "argo-moe-rl[deepep]" in capfd.readouterr().err


def test_a_rank_that_is_killed_is_named_by_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    exchange = moe.transport.probe.run_forward

    def die(*arguments: Any) -> Any:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*arguments)

    monkeypatch.setattr(moe.transport.probe, "run_forward", die)
    assert probe("--ranks", "2", "--timeout", "20", *SMALL) == 128 + signal.SIGKILL
    stderr = capfd.readouterr().err
    assert stderr.startswith("moerl transport probe: rank 0: ")
    assert "rank 1" in stderr.removeprefix("moerl transport probe: rank 0: ")
    assert "Traceback" not in stderr
