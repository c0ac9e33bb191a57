"""Device names as torch reports them, their peaks, and that nothing unknown gets a default."""

import os
import platform
import re

import pytest

from windlass.hardware import DEVICES, cpu_name, find_device, read_load
from windlass.units import GIB


@pytest.mark.parametrize(
    "name, tera, gib",
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 80),
        ("NVIDIA H200", 989.4, 141),
        ("NVIDIA H100 PCIe", 756.5, 80),
        ("NVIDIA H100 NVL", 835.5, 94),
        ("NVIDIA A100-SXM4-80GB", 312, 80),
        ("NVIDIA A100-SXM4-40GB", 312, 40),
        ("NVIDIA A100 80GB PCIe", 312, 80),
        ("NVIDIA A100-PCIE-40GB", 312, 40),
        ("NVIDIA A10G", 70, 24),
        ("NVIDIA A10", 125, 24),
        ("Tesla T4", 65, 16),
        ("NVIDIA L4", 121, 24),
        ("NVIDIA L40", 181.05, 48),
        ("NVIDIA L40S", 362.05, 48),
        ("NVIDIA GeForce RTX 4090", 165.2, 24),
        ("NVIDIA GeForce RTX 3090", 71, 24),
        ("NVIDIA B200", 2250, 180),
        ("NVIDIA GB200", 2500, 186),
        ("NVIDIA GH200 480GB", 989.4, 96),  # its name counts the CPU's memory
        ("NVIDIA GH200 144G HBM3e", 989.4, 144),
        ("NVIDIA H200 NVL", 835.5, 141),
        ("NVIDIA A100-PCIe-40GB", 312, 40),
        ("NVIDIA RTX 6000 Ada Generation", 364.25, 48),
        ("NVIDIA RTX A6000", 154.85, 48),
        ("NVIDIA GeForce RTX 4080", 97.5, 16),
        ("NVIDIA GeForce RTX 5080", 112.6, 16),
        ("NVIDIA GeForce RTX 5090", 209.5, 32),
        ("Tesla V100-SXM2-32GB", 125, 32),
        ("AMD Instinct MI300X", 1307.4, 192),
    ],
)
def test_real_names_find_their_own_device(name, tera, gib):
    device = find_device(name)
    assert device is not None
    assert device.peak_flops == pytest.approx(tera * 1e12) and device.memory_bytes == gib * GIB


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "AMD EPYC 9754",
        "NVIDIA H100",  # which of three?
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh of the card
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA A1000",  # begins as A100 does
        "NVIDIA RTX A1000",
        "NVIDIA L400",
        "NVIDIA A2",
        "NVIDIA A100",  # of which there are four
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA RTX 6000",
        "Quadro RTX 6000",
        "NVIDIA H20",  # no data sheet that is public
        "nvidia h200",
        "NVIDIA RTX 4090 Imitation",
        "xNVIDIA H200",
    ],
)
def test_an_unknown_device_has_no_peak_and_never_a_default(name):
    assert find_device(name) is None


# what the data sheets print in large letters: with structured sparsity, twice what a dense matrix gets
SPARSE_TFLOPS = {
    "NVIDIA H100 80GB HBM3": 1979,
    "NVIDIA H200": 1979,
    "NVIDIA H100 PCIe": 1513,
    "NVIDIA H100 NVL": 1671,
    "NVIDIA A100-SXM4-80GB": 624,
    "NVIDIA A10": 250,
    "NVIDIA L4": 242,
    "NVIDIA L40S": 733,
    "NVIDIA B200": 4500,
    "NVIDIA GeForce RTX 4090": 330.4,
    "NVIDIA RTX A6000": 309.7,
}


@pytest.mark.parametrize("name", SPARSE_TFLOPS)
def test_peaks_are_dense_and_not_the_sparse_headline(name):
    assert find_device(name).peak_flops == pytest.approx(SPARSE_TFLOPS[name] * 1e12 / 2, rel=0.02)


def test_no_name_fits_two_devices():
    for device in DEVICES:
        plain = re.sub(r"\(([^)|]*)(\|[^)]*)?\)\??", r"\1", device.pattern)
        assert [other.name for other in DEVICES if re.fullmatch(other.pattern, plain)] == [device.name], plain


def test_every_device_has_a_source_and_figures_in_their_units():
    for device in DEVICES:
        assert device.source and 1e13 < device.peak_flops < 1e16
        assert device.fp8_flops is None or 1.9 <= device.fp8_flops / device.peak_flops <= 2.1
        assert 1e11 < device.bandwidth < 1e13 and 8 * GIB < device.memory_bytes < 512 * GIB


def test_a_card_without_bf16_says_so():
    assert find_device("Tesla T4").peak_dtype == find_device("Tesla V100-SXM2-16GB").peak_dtype == "fp16"
    assert find_device("NVIDIA H200").peak_dtype == "bf16"


def test_the_load_is_the_last_minutes_and_unknown_where_the_kernel_does_not_say_it(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 1.0, 0.5))
    assert read_load() == 2.5
    monkeypatch.setattr(os, "getloadavg", lambda: os.stat("/no such file"))
    assert read_load() is None


def test_the_processor_has_the_name_that_linux_gives_it_else_its_kind(tmp_path):
    assert cpu_name(tmp_path) == (platform.processor() or platform.machine())
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654: rev 2\nflags\t: fpu\n")
    assert cpu_name(tmp_path) == "AMD EPYC 9654: rev 2"
    of_one = "processor\t: {}\ncpu family\t: 26\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n\n"
    (tmp_path / "proc/cpuinfo").write_text(of_one.format(0, 2) + of_one.format(1, 3))
    assert cpu_name(tmp_path) == "AMD EPYC (family 26, model 2)"
