"""Faults of NVIDIA's driver in the kernel's log: Xid of a GPU, SXid of an NVSwitch.

The lines and the meaning of their numbers: NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors), "GPU Memory Error
Management", and "NVSwitch Errors" in the Fabric Manager user guide. Numbers that blame the program have a table of their own,
because their fix is another. A switch writes three lines per fault: what it is, then its severity and its registers, which are
left out.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

KMSG: Final = Path("/dev/kmsg")
RECORD_BYTES: Final = 8192  # of one message: Documentation/ABI/testing/dev-kmsg
_FAULT: Final = re.compile(r"(?P<kind>S?Xid) \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\): (?P<number>\d+),? *(?P<text>.*)")
_FURTHER: Final = ("Severity ", "Data {")  # lines of a fault that has begun
_CAUSE: Final = re.compile(r"caused by previous (Xid \d+)")
OF_PROGRAM: Final = {
    13: "an illegal instruction or address in a kernel",
    31: "a kernel touched memory that is not mapped",
    43: "the GPU stopped a program that did something illegal",
    45: "work was cancelled after another error, or because its process was killed",
    137: "an illegal access to another GPU's memory over NVLink",
}
CANCELLED: Final = (43, 45)
NOTICES: Final = (63, 92, 160)
"""The numbers in OF_HARDWARE of faults that do no harm to what runs."""
OF_HARDWARE: Final = {
    46: "the GPU stopped",
    48: "memory error that ECC cannot correct",
    62: "the GPU's power controller halted",
    63: "a row of memory is to be replaced at the next reset",
    64: "a row of memory could not be replaced",
    74: "NVLink error",
    79: "the GPU is gone from the PCIe bus",
    92: "many corrected memory errors",
    94: "memory error that ECC cannot correct, contained to one program",
    95: "memory error that ECC cannot correct, not contained",
    109: "the GPU did not switch between programs in time",
    119: "the GPU's own firmware does not answer",
    120: "the GPU's own firmware failed",
    140: "memory errors that ECC cannot correct",
    143: "the GPU could not be initialised",
    **dict.fromkeys(range(144, 151), "NVLink error"),
    160: "a part of memory is to be repaired at the next reset",
    171: "memory error that ECC cannot correct, in DRAM",
    172: "memory error that ECC cannot correct, in SRAM",
}


class DriverFault(NamedTuple):
    """`at_s`: seconds since boot. `kind`: Xid or SXid."""

    at_s: float
    kind: str
    pci: str
    number: int
    text: str

    @property
    def is_of_program(self) -> bool:
        """Whether a program's mistake explains it, without bad hardware."""
        return self.kind == "Xid" and self.number in OF_PROGRAM

    @property
    def is_notice(self) -> bool:
        """Whether what runs goes on: the driver, or the switch, has fixed it."""
        return self.text.startswith("Non-fatal") if self.kind == "SXid" else self.number in NOTICES

    @property
    def sentence(self) -> str:
        """`Xid 79 at 0000:03:00 (the GPU is gone from the PCIe bus)`."""
        known = (OF_PROGRAM | OF_HARDWARE).get(self.number) if self.kind == "Xid" else None
        if cause := _CAUSE.search(self.text):
            known = f"work was cancelled after {cause[1]}"
        return f"{self.kind} {self.number} at {self.pci} ({known or self.text or 'no text'})"


def causes(faults: Iterable[DriverFault]) -> list[DriverFault]:
    """Each kind, place and number once, in order. Where hardware failed, Xids 43 and 45 are left out: they say that other work
    was cancelled for it."""
    distinct: dict[tuple[str, str, int], DriverFault] = {}
    for fault in faults:
        distinct.setdefault((fault.kind, fault.pci, fault.number), fault)
    failed = any(not fault.is_of_program and not fault.is_notice for fault in distinct.values())
    return [fault for fault in distinct.values() if not (failed and fault.kind == "Xid" and fault.number in CANCELLED)]


def read_faults(since_s: float = 0.0, log: Path = KMSG) -> list[DriverFault] | None:
    """The faults since `since_s` seconds after boot, oldest first; None where this process may not read the kernel's log."""
    try:
        file = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found: list[DriverFault] = []
    with contextlib.closing(os.fdopen(file, "rb", buffering=0)) as records:
        while True:
            try:
                record = records.read(RECORD_BYTES)  # /dev/kmsg gives one record per read, and None at its end
            except BrokenPipeError:  # overwritten before it was read
                continue
            except OSError:
                return None
            if not record:
                return found
            found += [fault for line in record.decode("utf-8", "replace").splitlines() if (fault := parse(line))]
            found = [fault for fault in found if fault.at_s >= since_s]


def parse(line: str) -> DriverFault | None:
    """A record of /dev/kmsg: `priority,sequence,microseconds since boot,flags;text`. None for any that begins no fault."""
    head, semicolon, text = line.partition(";")
    match, fields = _FAULT.search(text), head.split(",")
    if not semicolon or match is None or len(fields) < 3 or not fields[2].isdigit():
        return None
    if match["kind"] == "SXid" and match["text"].startswith(_FURTHER):
        return None
    return DriverFault(int(fields[2]) / 1e6, match["kind"], match["pci"], int(match["number"]), match["text"].strip())
