"""How this host reaches the others of a run, which meet at one address and port."""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from windlass.doctor.diagnosis import Diagnosis

CONNECT_S: Final = 5.0
HEADERS: Final = {socket.AF_INET: 40, socket.AF_INET6: 60}  # of IP and TCP, without options
TIMESTAMPS: Final = 12  # the TCP option that Linux sends
LARGEST: Final = 32_000  # about half of a window: the kernel agrees on no larger segments
OPTIONS: Final = 40  # the most that further TCP options take
LAST: Final = (
    "docker",
    "lo",
)  # interfaces that NCCL takes when no other is there, in this order: on NCCL_SOCKET_IFNAME


class Interface(NamedTuple):
    """`addresses`: of IPv4 and IPv6. `mtu`: bytes per packet."""

    name: str
    is_up: bool
    mtu: int
    addresses: tuple[str, ...]


class Meeting(NamedTuple):
    """An attempt to reach the endpoint. `via`: the name of the interface of this host that it goes through. `error`: why there
    was no connection. `segment`: bytes of data per packet that both ends agreed on."""

    via: str | None
    error: OSError | None = None
    segment: int | None = None
    family: int = socket.AF_INET


def interfaces() -> list[Interface]:
    """The network interfaces of this host, in the kernel's order."""
    states = psutil.net_if_stats()
    return [
        Interface(
            name,
            states[name].isup,
            states[name].mtu,
            tuple(one.address.partition("%")[0] for one in found if one.family in HEADERS),
        )
        for name, found in psutil.net_if_addrs().items()
        if name in states
    ]


def connect_to_endpoint(host: str, port: int, here: list[Interface]) -> Meeting:
    """Connects to the endpoint, and closes."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return Meeting(None, error)
    own = None
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:  # sends nothing: the kernel chooses the route
            asking.connect(address)
            own = asking.getsockname()[0]
        via = next((one.name for one in here if own in one.addresses), None)
        with socket.socket(family, kind) as met:
            met.settimeout(CONNECT_S)
            met.connect(address)
            segment = met.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            return Meeting(via, None, segment, family)
    except OSError as error:
        return Meeting(next((one.name for one in here if own in one.addresses), None), error, None, family)


def check_meeting(endpoint: str, met: Meeting, here: list[Interface]) -> Iterator[Diagnosis]:
    """Firewalls, and networks whose packets have different sizes. A refusal comes from the endpoint itself, where nothing listens
    while no run waits: it is reached."""
    if isinstance(met.error, ConnectionRefusedError):
        return
    if met.error is not None:
        yield Diagnosis(
            "endpoint-unreachable",
            f"{endpoint}: {met.error}",
            "every host of a run connects to the endpoint, and ranks to each other at ports that the kernel chooses",
            "a name that is unknown: give the address; no answer: a firewall, let the hosts of a run talk at all ports",
        )
        return
    mtu = next((one.mtu for one in here if one.name == met.via), None)
    if mtu is not None and mtu < LARGEST and met.segment is not None:
        expected = mtu - HEADERS.get(socket.AddressFamily(met.family), 40) - TIMESTAMPS
        if met.segment < expected - OPTIONS:
            yield Diagnosis(
                "mtu-differs",
                f"packets of {met.via} hold {mtu} bytes, and those to {endpoint} about {met.segment + mtu - expected}",
                "hosts of one network have the same MTU: larger packets may be dropped without a word",
                "give all hosts the same MTU (ip link set dev ... mtu ...), and the switches between them",
            )


def check_interfaces(environ: Mapping[str, str], met: Meeting, here: list[Interface]) -> Iterator[Diagnosis]:
    """Which interface NCCL and gloo take, and whether it leads to the other hosts. On its own host the endpoint's name may
    lead to `lo`, which leads to none of them."""
    able = [one for one in here if one.is_up and one.addresses]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wish = environ.get(variable)
        if wish and not [one for one in able if _is_meant(one.name, wish)]:
            yield Diagnosis(
                "interface-absent",
                f"{variable}={wish}; this host has {', '.join(one.name for one in able)}",
                "the variable names an interface that is up and has an address",
                f"unset {variable}, or name one of these",
            )
    wish = environ.get("NCCL_SOCKET_IFNAME")
    taken = [one for one in able if _is_meant(one.name, wish)] if wish else _usual(able)[:1]
    if met.via not in (None, "lo") and taken and met.via not in [one.name for one in taken]:
        yield Diagnosis(
            "interface-wrong",
            f"NCCL takes {taken[0].name}, and the other hosts are reached through {met.via}",
            "without NCCL_SOCKET_IFNAME NCCL takes the first interface ib*, else the first that is neither docker* nor lo",
            f"export NCCL_SOCKET_IFNAME={met.via} GLOO_SOCKET_IFNAME={met.via}",
        )


def _usual(able: list[Interface]) -> list[Interface]:
    """The interfaces that NCCL uses where nobody names one: all of the first kind that this host has."""
    kinds = [
        [one for one in able if one.name.startswith("ib")],
        [one for one in able if not one.name.startswith(LAST)],
        *([one for one in able if one.name.startswith(last)] for last in LAST),
    ]
    return next(filter(None, kinds), [])


def _is_meant(name: str, wish: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME means this interface: a list of prefixes; `=` for whole names, `^` for all others."""
    is_not, exact = wish.startswith("^"), wish.lstrip("^").startswith("=")
    listed = wish.lstrip("^=").split(",")
    return is_not != any(name == one if exact else name.startswith(one) for one in listed)


def check_host_name(host_name: str, addresses: list[str]) -> Iterator[Diagnosis]:
    """`addresses`: what this host's own name means here."""
    if addresses and all(address.startswith("127.") or address == "::1" for address in addresses):
        yield Diagnosis(
            "name-is-loopback",
            f"{host_name} is {addresses[0]} on this host",
            "gloo gives other hosts the address that this host's name means: they would connect to themselves",
            "write the host's address beside its name in /etc/hosts; or set GLOO_SOCKET_IFNAME",
        )
    if not addresses:
        yield Diagnosis(
            "name-unknown",
            f"{host_name} has no address on this host",
            "gloo gives other hosts the address that this host's name means",
            "write the host's address beside its name in /etc/hosts; or set GLOO_SOCKET_IFNAME",
        )


def check_infiniband(root: Path, has_gpus: bool) -> Iterator[Diagnosis]:
    """`root`: of the file system. Files: Documentation/ABI/stable/sysfs-class-infiniband of the kernel."""
    ports = sorted(root.glob("sys/class/infiniband/*/ports/*/state"))
    states = {f"{port.parts[-4]} port {port.parts[-2]}": port.read_text().strip() for port in ports}
    down = [f"{name} ({state})" for name, state in states.items() if not state.startswith("4:")]
    if down:
        yield Diagnosis(
            "infiniband-down",
            f"{', '.join(down)}; {len(states) - len(down)} of {len(states)} ports are active",
            "NCCL spreads its messages over all active ports: with fewer, every collective between hosts is slower",
            "look at the cable and the switch (ibstat); a port that is not used on purpose: leave it out by NCCL_IB_HCA",
        )
    version = root / "proc/driver/nvidia/version"
    is_open = version.is_file() and "Open Kernel Module" in version.read_text()  # these hand out memory by dma-buf
    if ports and has_gpus and not is_open and not (root / "sys/module/nvidia_peermem").is_dir():
        yield Diagnosis(
            "no-gpudirect",
            "InfiniBand and GPUs, and the kernel module nvidia_peermem is not loaded",
            "without it messages between hosts pass through host memory",
            "modprobe nvidia_peermem, or NVIDIA's open kernel modules",
        )
