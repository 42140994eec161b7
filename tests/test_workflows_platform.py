"""Platform profiles: what each file says, and which mistakes are refused by name."""

import pytest

from steps.errors import ConfigError
from workflows.platform import CPU, HUGEPAGE_BYTES, load_profile, parse_profile, profile_names, quantity_bytes

GPU_PROFILES = [name for name in profile_names() if name != "cpu"]
SMALL = """
description = "d"
threads = 1
gpus = 8
efa = 4
node_memory = "64Gi"
node_selector = { "node.kubernetes.io/instance-type" = "x" }

[capacity]
stable = "on-demand"
interruptible = "spot"
training = "reserved"

[resources]
control = { cpu_request = "250m", cpu_limit = "1", memory = "1Gi" }
sampler = { cpu_request = "1", cpu_limit = "2", memory = "2Gi", gpus = 1 }
engine = { cpu_request = "1", cpu_limit = "2", memory = "4Gi" }
engine_client = { cpu_request = "1", cpu_limit = "2", memory = "2Gi" }
solo_trainer = { cpu_request = "1", cpu_limit = "2", memory = "4Gi" }
publisher = { cpu_request = "1", cpu_limit = "2", memory = "4Gi" }
trainer = { cpu_request = "1", cpu_limit = "2", memory = "8Gi", gpus = 8, efa = 4, hugepages = "64Mi", shm = "4Gi" }

[transports.network]
NCCL_SOCKET_IFNAME = "^lo"

[engines.vllm]
NCCL_GIN_TYPE = "2"
"""


def test_there_is_a_profile_for_each_kind_of_node() -> None:
    assert profile_names() == ["cpu", "g6e", "p5", "p5e", "p5en", "p6-b200", "p6-b300"]


@pytest.mark.parametrize(
    ("name", "instance_type", "efa"),
    [
        ("p5", "p5.48xlarge", 32),
        ("p5e", "p5e.48xlarge", 32),
        ("p5en", "p5en.48xlarge", 16),
        ("p6-b200", "p6-b200.48xlarge", 8),
        ("p6-b300", "p6-b300.48xlarge", 16),
        ("g6e", "g6e.48xlarge", 4),
    ],
)
def test_trainer_takes_all_gpus_and_efa_interfaces_of_its_instance_type(
    name: str, instance_type: str, efa: int
) -> None:
    profile = load_profile(name)
    assert profile.node_selector == {"node.kubernetes.io/instance-type": instance_type}
    assert profile.instance_type == instance_type
    trainer = profile.resources["trainer"]
    assert (trainer.gpus, trainer.efa) == (profile.gpus, profile.efa) == (8, efa)
    assert profile.ranks_per_node == 8


@pytest.mark.parametrize("name", GPU_PROFILES)
def test_gpu_profile_has_huge_pages_tolerations_and_an_environment_for_efa(name: str) -> None:
    profile = load_profile(name)
    assert quantity_bytes(profile.resources["trainer"].hugepages) % HUGEPAGE_BYTES == 0
    assert "nvidia.com/gpu" in {toleration.key for toleration in profile.tolerations}
    environment = profile.transport_environment
    assert environment["FI_PROVIDER"] == "efa"
    assert environment["NCCL_SOCKET_IFNAME"].startswith("^")
    assert "pod-id-link0" in environment["NCCL_SOCKET_IFNAME"]
    assert "RDMAV_FORK_SAFE" not in environment
    assert list(environment) == sorted(environment)


def test_reserved_nodes_are_tolerated_where_the_trainer_wants_them() -> None:
    for name in GPU_PROFILES:
        profile = load_profile(name)
        tolerates = "capacity-reservation" in {toleration.key for toleration in profile.tolerations}
        assert tolerates == (profile.capacity["training"] == "reserved")


def test_cpu_profile_asks_for_nothing_that_a_laptop_lacks() -> None:
    assert CPU.gpus == CPU.efa == CPU.ranks_per_node == 0
    assert not CPU.node_selector and not CPU.tolerations and not CPU.transport_environment
    for size in CPU.resources.values():
        assert (size.gpus, size.efa, size.hugepages, size.shm) == (0, 0, "", "")


@pytest.mark.parametrize("name", profile_names())
def test_only_rollout_and_reward_may_run_on_spot(name: str) -> None:
    capacity = load_profile(name).capacity
    assert {domain for domain, kind in capacity.items() if kind == "spot"} == {"interruptible"}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('hugepages = "64Mi"', 'hugepages = "5120"', "'5120' is no amount of memory"),
        ('hugepages = "64Mi"', 'hugepages = "3Mi"', "no multiple of a huge page"),
        ('hugepages = "64Mi", ', "", "resources.trainer.hugepages is missing"),
        ('shm = "4Gi"', 'shm = "8Gi"', "resources.trainer.shm = 8Gi: must be less than its memory, 8Gi"),
        ('memory = "8Gi"', 'memory = "64Gi"', "resources.trainer.memory = 64Gi: a node has 64Gi"),
        ('memory = "8Gi"', 'memory = "8G"', "'8G' is no amount of memory"),
        ("gpus = 8, efa", "gpus = 9, efa", "resources.trainer.gpus is more than a node's 8"),
        ("efa = 4, huge", "efa = 5, huge", "resources.trainer.efa is more than a node's 4"),
        ("threads = 1", "threads = 0", "threads: "),
        ("threads = 1", "threads = 1\nthreds = 1", "threds: "),
        ('cpu_request = "250m"', 'cpu_request = "0.25"', "resources.control.cpu_request: "),
        ("gpus = 1 }", "gpu = 1 }", "resources.sampler.gpu: "),
        ("[engines.vllm]", '[engines.sglang]\nNCCL_GIN_TYPE = "5"\n[engines.vllm]', "engines.sglang sets '5'"),
        ("[engines.vllm]", "[engines.torch]", "engines.torch"),
        ('training = "reserved"', "", "training is missing"),
        ('interruptible = "spot"', 'interruptible = "cheap"', "capacity.interruptible: "),
        ('node_selector = { "node.kubernetes.io/instance-type" = "x" }', "", "node_selector is missing"),
        (
            "[transports.network]",
            '[transports.x]\nNCCL_SOCKET_IFNAME = "eth0"\n[transports.network]',
            "transports.x sets",
        ),
        ("[capacity]", "[capacity", "not TOML"),
    ],
)
def test_mistakes_are_refused_in_one_line_that_names_the_field(before: str, after: str, message: str) -> None:
    assert SMALL.count(before) == 1
    with pytest.raises(ConfigError) as error:
        parse_profile("mine", SMALL.replace(before, after))
    assert str(error.value).startswith("platform profile mine: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_profile_without_the_mistakes_is_accepted() -> None:
    assert parse_profile("mine", SMALL).resources["trainer"].shm == "4Gi"


def test_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no platform profile 'p7': use one of cpu, g6e, p5"):
        load_profile("p7")


@pytest.mark.parametrize(("text", "size"), [("1Ki", 1024), ("5120Mi", 5120 << 20), ("2Ti", 2 << 40)])
def test_quantities_are_in_binary_units(text: str, size: int) -> None:
    assert quantity_bytes(text) == size


@pytest.mark.parametrize("text", ["", "5120", "0Mi", "1.5Gi", "1GB", "Gi"])
def test_other_quantities_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no amount of memory"):
        quantity_bytes(text)
