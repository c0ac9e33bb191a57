"""Faults of the NVIDIA driver in the kernel's log: in lines that people have recorded, and at the edges of the form."""

import os
import re
from pathlib import Path

import pytest

from windlass.supervise.kernel_log import DriverFault, causes, parse, read_faults

RECORDED = (Path(__file__).parent / "recordings" / "driver_faults.txt").read_text("utf-8").split("# origin: ")[1:]
STAMP = re.compile(r"^(?:.*?kernel: )?(?:\[[^\]]*\] )?")
FOUND = {
    "github.com/huggingface/m4-logs": ["Xid 63 at 0000:10:1c (a row of memory is to be replaced at the next reset)"],
    "github.com/leptonai/gpud pull request 46": [
        "Xid 13 at 0000:cb:00 (an illegal instruction or address in a kernel)",
        "Xid 109 at 0000:cb:00 (the GPU did not switch between programs in time)",
    ],
    "github.com/NVIDIA/open-gpu-kernel-modules issue 1150": [
        f"Xid 45 at 0000:{bus}:00 (work was cancelled after Xid {number})"
        for bus, number in [("dc", 149), ("ed", 145), ("ba", 145), ("97", 145)]
    ],
    "github.com/NVIDIA/open-gpu-kernel-modules issue 1151": [
        "Xid 79 at 0000:06:00 (the GPU is gone from the PCIe bus)"
    ],
    "forums.developer.nvidia.com topic 371272": [
        "Xid 62 at 0000:01:00 (the GPU's power controller halted)",
        "Xid 154 at 0000:01:00 (GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required))",
    ],
    "github.com/autumnai/collenchyma-blas issue 14": [
        "Xid 31 at 0000:01:00 (a kernel touched memory that is not mapped)"
    ],
    "github.com/NVIDIA/nvtrust issue 124": [
        "SXid 22013 at 0000:04:00.0 (Non-fatal, Link 44 Minion Link DLREQ interrupt)"
    ],
}
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


def test_faults_of_nvlink_5_have_words():
    faults = [DriverFault(0.0, "Xid", pci, number, "") for pci, number in (("0018:01:00", 145), ("0019:01:00", 149))]
    assert [fault.sentence for fault in causes(faults)] == [
        "Xid 145 at 0018:01:00 (NVLink error)",
        "Xid 149 at 0019:01:00 (NVLink error)",
    ]


def records(recording):
    """The lines of a recording as /dev/kmsg gives them: without the stamp of dmesg or journalctl, behind a head of its own."""
    lines = [line for line in recording.splitlines()[1:] if line and not line.startswith("#")]
    return "".join(f"4,{number},{number * 1000},-;{STAMP.sub('', line)}\n" for number, line in enumerate(lines))


@pytest.mark.parametrize(
    "recording", RECORDED, ids=[recording.partition(",")[0].partition("\n")[0] for recording in RECORDED]
)
def test_what_was_recorded_is_named(tmp_path, recording):
    (log := tmp_path / "kmsg").write_text(records(recording))
    (found,) = [sentences for origin, sentences in FOUND.items() if recording.startswith(origin)]
    assert [fault.sentence for fault in causes(read_faults(log=log))] == found
    assert len(RECORDED) == len(FOUND)


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


@pytest.mark.parametrize(
    ("numbers", "kept"), [((63, 31), (63, 31)), ((79, 45, 43), (79,)), ((63, 45), (63, 45)), ((45, 31, 45), (45, 31))]
)
def test_only_work_that_a_failure_cancelled_is_left_out(numbers, kept):
    faults = [DriverFault(0.0, "Xid", "0000:03:00", number, "") for number in numbers]
    assert tuple(fault.number for fault in causes(faults)) == kept
    switch = DriverFault(0.0, "SXid", "0000:04:00.0", 12028, "Non-fatal, Link 44 egress")
    assert causes([switch, *faults])[0] == switch and len(causes([switch, *faults])) == len(kept) + 1


def test_faults_of_programs_are_no_faults_of_hardware():
    of_program = [number for number in range(200) if DriverFault(0, "Xid", "", number, "").is_of_program]
    assert of_program == [13, 31, 43, 45, 137] and not DriverFault(0, "SXid", "", 31, "").is_of_program
