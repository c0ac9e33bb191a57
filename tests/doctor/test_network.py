"""How a host reaches the others of a run."""

import errno
import socket

import pytest

from windlass.doctor.network import (
    Interface,
    Meeting,
    check_host_name,
    check_infiniband,
    check_interfaces,
    check_meeting,
    connect_to_endpoint,
    interfaces,
)

LO = Interface("lo", True, 65_536, ("127.0.0.1",))
DOCKER = Interface("docker0", True, 1500, ("172.17.0.1",))
BRIDGE = Interface("br-4f", True, 1500, ("172.18.0.1",))
ETH = Interface("eth0", True, 9000, ("10.0.0.5",))
DOWN = Interface("ib0", False, 2044, ("10.1.0.5",))


def names(found):
    return [one.name for one in found]


def test_a_listening_endpoint_is_met_through_its_interface_and_one_that_refuses_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        met = connect_to_endpoint("127.0.0.1", port, interfaces())
        assert met.via == "lo" and met.error is None and met.segment
        assert list(check_meeting("here", met, interfaces())) == []
    refused = connect_to_endpoint("127.0.0.1", port, interfaces())
    assert isinstance(refused.error, ConnectionRefusedError) and refused.via == "lo"
    assert list(check_meeting("here", refused, interfaces())) == []


def test_a_name_that_nobody_knows_and_a_firewall_are_findings():
    unknown = connect_to_endpoint("no-such-host.invalid", 80, [])
    silent = Meeting("eth0", TimeoutError(errno.ETIMEDOUT, "timed out"))
    for met in (unknown, silent):
        (found,) = check_meeting("node0:29400", met, [ETH])
        assert found.name == "endpoint-unreachable" and found.found.startswith("node0:29400: ")


@pytest.mark.parametrize(("segment", "found"), [(8948, []), (8960, []), (1448, ["mtu-differs"])])
def test_packets_smaller_than_this_hosts_are_a_finding(segment, found):
    seen = list(check_meeting("node0:29400", Meeting("eth0", None, segment), [ETH]))
    assert names(seen) == found and all(
        "hold 9000 bytes, and those to node0:29400 about 1500" in one.found for one in seen
    )


@pytest.mark.parametrize(
    ("environ", "here", "via", "found", "said"),
    [
        ({}, [LO, DOCKER, ETH], "eth0", [], ""),
        ({}, [LO, DOCKER], "docker0", [], ""),
        ({}, [LO, ETH, DOWN._replace(is_up=True)], "ib0", [], ""),
        (
            {},
            [LO, BRIDGE, ETH],
            "eth0",
            ["interface-wrong"],
            "NCCL takes br-4f, and the other hosts are reached through eth0",
        ),
        ({"NCCL_SOCKET_IFNAME": "eth"}, [LO, BRIDGE, ETH], "eth0", [], ""),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, [LO, ETH], "eth0", ["interface-absent"], "this host has lo, eth0"),
        ({"NCCL_SOCKET_IFNAME": "^br,docker,lo"}, [LO, BRIDGE, ETH], "eth0", [], ""),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, [LO, ETH, DOWN], "eth0", ["interface-absent"], "NCCL_SOCKET_IFNAME=ib0"),
        ({"GLOO_SOCKET_IFNAME": "en0"}, [LO, ETH], "eth0", ["interface-absent"], "GLOO_SOCKET_IFNAME=en0"),
        ({"NCCL_SOCKET_IFNAME": "br"}, [LO, BRIDGE, ETH], "eth0", ["interface-wrong"], "NCCL takes br-4f"),
        ({}, [LO, BRIDGE, ETH], None, [], ""),
        ({}, [LO, ETH], "lo", [], ""),  # the endpoint is this host, by a name of its own
    ],
)
def test_the_interface_that_nccl_takes_leads_to_the_other_hosts(environ, here, via, found, said):
    seen = list(check_interfaces(environ, Meeting(via), here))
    assert names(seen) == found and all(said in one.found for one in seen)


@pytest.mark.parametrize(
    ("addresses", "found"),
    [
        (["127.0.1.1"], ["name-is-loopback"]),
        (["127.0.0.1", "::1"], ["name-is-loopback"]),
        (["::1", "10.0.0.5"], []),
        ([], ["name-unknown"]),
    ],
)
def test_a_hosts_own_name_is_an_address_that_others_reach(addresses, found):
    assert names(check_host_name("node0", addresses)) == found


def port(root, device, state):
    (folder := root / f"sys/class/infiniband/{device}/ports/1").mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")


def test_infiniband(tmp_path):
    assert names(check_infiniband(tmp_path, True)) == []
    port(tmp_path, "mlx5_0", "4: ACTIVE")
    assert names(check_infiniband(tmp_path, False)) == []
    assert names(check_infiniband(tmp_path, True)) == ["no-gpudirect"]
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06\n"
    )
    assert names(check_infiniband(tmp_path, True)) == []
    port(tmp_path, "mlx5_1", "1: DOWN")
    (found,) = check_infiniband(tmp_path, True)
    assert found.name == "infiniband-down"
    assert found.found == "mlx5_1 port 1 (1: DOWN); 1 of 2 ports are active"
    (tmp_path / "proc/driver/nvidia/version").unlink()
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert names(check_infiniband(tmp_path, True)) == ["infiniband-down"]
