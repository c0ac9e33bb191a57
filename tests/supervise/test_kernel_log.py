"""Faults of the NVIDIA driver in the kernel's log. Lines in the form that NVIDIA documents (XID Errors), not recorded ones."""

import os

import pytest

from windlass.supervise.kernel_log import DriverFault, parse, read_faults

LOST = "4,1193,91843308145,-;NVRM: Xid (PCI:0000:03:00): 79, pid=2310, name=python, GPU has fallen off the bus."
SWITCH = "3,77,5000000,-;nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 46 sourceid mismatch"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (LOST, (91843.308145, "Xid", "0000:03:00", 79, "pid=2310, name=python, GPU has fallen off the bus.")),
        (SWITCH, (5.0, "SXid", "0000:c1:00.0", 24007, "Fatal, Link 46 sourceid mismatch")),
        (
            "6,1,2000000,c;NVRM: Xid (0000:03:00): 14, Channel 00000001",
            (2.0, "Xid", "0000:03:00", 14, "Channel 00000001"),
        ),
        ("6,1,2000000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module", None),
        (" SUBSYSTEM=pci", None),
        ("NVRM: Xid (PCI:0000:03:00): 79", None),
        ("6,1,x,-;NVRM: Xid (PCI:0000:03:00): 79", None),
        ("6,1;NVRM: Xid (PCI:0000:03:00): 79", None),
    ],
)
def test_a_record_is_a_fault_or_none(line, fault):
    assert parse(line) == fault


def test_faults_are_read_from_a_time_on(tmp_path):
    (log := tmp_path / "kmsg").write_text(f"{SWITCH}\n6,2,6000000,-;usb 1-1: new device\n{LOST}\n")
    assert [fault.number for fault in read_faults(log=log)] == [24007, 79]
    assert [fault.number for fault in read_faults(5.5, log)] == [79]


def test_a_log_that_may_not_be_read_is_none_and_one_without_faults_is_empty(tmp_path):
    assert read_faults(log=tmp_path / "absent") is None
    (tmp_path / "kmsg").touch()
    assert read_faults(log=tmp_path / "kmsg") == []


def test_a_log_without_an_end_ends_where_it_would_wait(tmp_path):
    os.mkfifo(tmp_path / "kmsg")
    writer = os.open(tmp_path / "kmsg", os.O_RDWR)
    os.write(writer, f"{LOST}\n".encode())
    assert [fault.number for fault in read_faults(log=tmp_path / "kmsg")] == [79]
    os.close(writer)


def test_programs_are_told_from_hardware():
    of_program = [number for number in range(200) if DriverFault(0, "Xid", "", number, "").is_of_program]
    assert of_program == [13, 31, 43, 45] and not DriverFault(0, "SXid", "", 31, "").is_of_program
