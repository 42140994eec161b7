"""Which library is `deep_ep`, and what is said when it is none."""

import subprocess
import sys
from types import ModuleType

import pytest

from moe.config import MoeConfig
from moe.dispatch import deepep
from moe.dispatch.base import ExpertGroup
from moe.dispatch.buffer_limits import DEEPEP_LEGACY, DEEPEP_V1
from moe.dispatch.deepep import build_deepep, has_efa, import_deep_ep
from moe.dispatch.deepep_elastic import DeepEpElasticDispatcher
from moe.dispatch.deepep_low_latency import DeepEpLowLatencyDispatcher
from moe.dispatch.deepep_v1 import DeepEpV1Dispatcher
from moe.dispatch.monitor import ExchangeMonitor


def group() -> ExpertGroup:
    return ExpertGroup(process_group=object(), size=2, ranks_per_node=2, monitor=ExchangeMonitor())


def moe(**changes) -> MoeConfig:
    return MoeConfig(dispatcher="deepep", **changes)


@pytest.fixture
def install(monkeypatch):
    def put(*names: str, config_module: str = "deep_ep_cpp") -> None:
        library = ModuleType("deep_ep")
        library.__file__ = "/somewhere/deep_ep/__init__.py"
        library.Config = type("Config", (), {"__module__": config_module})
        for name in names:
            buffer = type(name, (), {"__init__": lambda self, group, explicitly_destroy=False: None})
            setattr(library, name, buffer)
        monkeypatch.setitem(sys.modules, "deep_ep", library)

    monkeypatch.setattr(deepep, "has_efa", lambda: False)
    return put


@pytest.mark.parametrize(
    "names, low_latency, kind",
    [
        (("Buffer",), False, DeepEpV1Dispatcher),
        (("Buffer",), True, DeepEpLowLatencyDispatcher),
        (("ElasticBuffer", "Buffer"), False, DeepEpElasticDispatcher),
        (("ElasticBuffer", "Buffer"), True, DeepEpLowLatencyDispatcher),
        (("EPBuffer",), False, DeepEpElasticDispatcher),
    ],
)
def test_each_library_gets_its_dispatcher(install, names, low_latency, kind):
    install(*names)
    assert type(build_deepep(moe(low_latency=low_latency), group())) is kind


def test_the_legacy_buffer_of_deepep_2_has_its_own_limits(install):
    install("Buffer")
    flavour = build_deepep(moe(low_latency=True), group()).transport_report().details["flavour"]
    assert str(flavour).startswith(DEEPEP_V1.library)
    install("ElasticBuffer", "Buffer")
    flavour = build_deepep(moe(low_latency=True), group()).transport_report().details["flavour"]
    assert str(flavour).startswith(DEEPEP_LEGACY.library)


def test_uccl_under_the_name_of_deepep_is_observed_as_uccl(install, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    install("Buffer", config_module="uccl.ep")
    report = build_deepep(moe(), group()).transport_report()
    assert (report.requested, report.observed) == ("deepep", "uccl_ep")


def test_low_latency_without_its_kernels_is_refused(install):
    install("EPBuffer")
    with pytest.raises(ValueError, match="moe.low_latency = true: .* has no Buffer with low-latency kernels"):
        build_deepep(moe(low_latency=True), group())


def test_a_library_that_is_no_deepep_is_refused(install):
    install()
    with pytest.raises(ValueError, match="/somewhere/deep_ep/__init__.py has no EPBuffer, ElasticBuffer or Buffer"):
        build_deepep(moe(), group())


def test_epbuffer_on_efa_is_refused_unless_kept_to_nvlink(install, monkeypatch):
    install("EPBuffer")
    monkeypatch.setattr(deepep, "has_efa", lambda: True)
    with pytest.raises(ValueError, match="needs NCCL GDAKI, which EFA lacks"):
        build_deepep(moe(), group())
    monkeypatch.setenv("EP_DISABLE_GIN", "1")
    assert isinstance(build_deepep(moe(), group()), DeepEpElasticDispatcher)
    monkeypatch.delenv("EP_DISABLE_GIN")
    install("ElasticBuffer", "Buffer")
    assert isinstance(build_deepep(moe(), group()), DeepEpElasticDispatcher)


@pytest.mark.parametrize("driver, expected", [("efa", True), ("mlx5_core", False)])
def test_efa_is_known_by_its_driver(tmp_path, driver, expected):
    (tmp_path / "drivers" / driver).mkdir(parents=True)
    device = tmp_path / "sys/class/infiniband/rdmap0s31/device"
    device.mkdir(parents=True)
    (device / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert has_efa(tmp_path) is expected


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    message = r"moe.dispatcher uccl_ep needs the module deep_ep: pip install 'argo-moe-rl\[uccl\]'"
    with pytest.raises(ValueError, match=message):
        import_deep_ep("uccl_ep", "uccl")


@pytest.mark.parametrize(
    "body, reason",
    [
        ("assert None is not None", "AssertionError: no reason given"),
        (
            "assert False, 'Duplicate NCCL runtime found: a and b\\nmore'",
            "AssertionError: Duplicate NCCL runtime found",
        ),
        ("import deep_ep._C", "ModuleNotFoundError: No module named 'deep_ep._C'"),
        ("import filecmp; filecmp.cmp(None, 'x')", "TypeError: "),
        ("raise RuntimeError('cudaErrorNoDevice')", "RuntimeError: cudaErrorNoDevice"),
        ("open('/nowhere/libnccl.so')", "FileNotFoundError: "),
    ],
)
def test_an_import_that_fails_is_one_line_of_explanation(monkeypatch, tmp_path, body, reason):
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as caught:
        build_deepep(moe(), group())
    message = str(caught.value)
    assert message.startswith(f"moe.dispatcher deepep: importing deep_ep failed ({reason}")
    assert "\n" not in message and "nvcc" in message


def test_no_library_of_gpu_exchanges_is_imported_before_it_is_asked_for():
    program = (
        "import sys, moe.dispatch.deepep, moe.dispatch.nccl_ep, moe.dispatch.catalog;"
        "sys.exit(any(name in sys.modules for name in ('deep_ep', 'nccl', 'uccl')))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
