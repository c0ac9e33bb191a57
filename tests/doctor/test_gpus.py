"""What is bad about GPUs. No GPU is here: NVML's own library is asked, with planted answers in place of the driver's."""

from types import SimpleNamespace

import pynvml
import pytest

from windlass.doctor.gpus import Driver, Gpu, check_gpus, check_log, check_torch, read_gpus
from windlass.supervise.gpu_health import GpuHealth
from windlass.supervise.kernel_log import DriverFault

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", (9, 0), links=(True,) * 18, lanes=(16, 16), health=GpuHealth(0, (False, False)))


def nvml(**answers):
    """The library, where the functions in `answers` give these values (or what they return for a GPU), and none other answers."""
    silent = {name: refuse for name in vars(pynvml) if name.startswith("nvmlDeviceGet")}
    assert answers.keys() <= vars(pynvml).keys()
    given = {name: value if callable(value) else lambda *_, value=value: value for name, value in answers.items()}
    return SimpleNamespace(**{**vars(pynvml), **silent, **given})


def refuse(*_):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def one_host(**answers):
    return nvml(
        nvmlInit=None,
        nvmlShutdown=None,
        nvmlSystemGetDriverVersion="580.65.06",
        nvmlSystemGetCudaDriverVersion_v2=13_000,
        nvmlDeviceGetCount=1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=H100.name,
        nvmlDeviceGetCudaComputeCapability=(9, 0),
        **answers,
    )


def test_a_gpu_that_answers_little_is_read_and_nothing_is_bad_about_it():
    driver, gpus = read_gpus(one_host())
    assert driver == Driver("580.65.06", (13, 0)) and gpus == [Gpu(0, H100.name, (9, 0))]
    assert list(check_gpus(gpus)) == []


def test_all_that_nvml_says_is_read():
    reasons = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown

    def errors(_gpu, kind, counter):
        return {(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC): 3}.get((kind, counter), 99)

    def state(_gpu, link):
        return {0: 1, 1: 0}[link] if link < 2 else refuse()

    answers = {
        "nvmlDeviceGetCurrPcieLinkWidth": 8,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetRemappedRows": (1, 2, 1, 0),
        "nvmlDeviceGetNvLinkState": state,
        "nvmlDeviceGetCurrentClocksEventReasons": reasons,
        "nvmlDeviceGetMigMode": [pynvml.NVML_DEVICE_MIG_ENABLE, 0],
        "nvmlDeviceGetTotalEccErrors": errors,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=77)],
    }
    found = read_gpus(one_host(**answers))[1][0]
    assert found == Gpu(
        0, H100.name, (9, 0), True, (True, False), (8, 16), GpuHealth(3, (True, False), ("too hot (hardware)",)), (77,)
    )


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"is_divided": True}, "gpu-divided", "divided by MIG"),
        ({"name": "NVIDIA GeForce RTX 4090 Laptop GPU"}, "laptop-gpu", "RTX 4090 Laptop GPU"),
        ({"name": "NVIDIA H900"}, "gpu-unknown", "NVIDIA H900, which is not in windlass's table"),
        ({"name": "Tesla T4", "capability": (7, 5)}, "no-bf16", "compute capability 7.5"),
        (
            {"links": (True,) * 17 + (False,)},
            "nvlink-down",
            "17 NVLinks are active, 18 on another GPU of this host (down: 17)",
        ),
        ({"links": ()}, "nvlink-down", "0 NVLinks are active, 18 on another"),
        ({"lanes": (4, 16)}, "pcie-narrow", "4 lanes of 16"),
        ({"health": GpuHealth(2)}, "gpu-memory", "2 memory errors since boot"),
        ({"health": GpuHealth(rows=(True, False))}, "gpu-memory", "waits to be replaced"),
        ({"health": GpuHealth(rows=(False, True))}, "gpu-memory", "replacing a row of memory failed"),
        ({"health": GpuHealth(slowed=("power brake",))}, "gpu-slowed", "power brake"),
        ({"pids": (4_194_305, 4_194_306)}, "gpu-in-use", "process 4194305, 4194306 computes on it"),
    ],
)
def test_each_bad_thing_has_a_finding_of_its_own(changes, name, said):
    bad = Gpu(**{**vars(H100), "index": 1, **changes})
    (found,) = check_gpus([H100, bad])
    assert found.name == name and said in found.found and "GPU 1" in found.found and found.rule and found.fix


def test_a_t4_is_advised_fp16_and_an_older_card_fp32():
    advice = {(7, 5): "auto or fp16", (6, 1): "auto or fp32"}
    for capability, text in advice.items():
        assert text in list(check_gpus([Gpu(0, "Tesla T4", capability)]))[-1].fix


@pytest.mark.parametrize(
    ("has_device", "cuda", "torch_cuda", "name"),
    [
        (False, None, None, None),  # a laptop
        (True, (13, 0), None, "torch-without-cuda"),
        (True, (12, 8), "13.0", "driver-too-old"),
        (True, (13, 0), "13.2", None),  # a driver runs all programs of its major version
        (True, (13, 0), "12.8", None),
        (True, None, "13.0", None),  # another check says that it is silent
    ],
)
def test_the_driver_runs_what_torch_was_built_for(has_device, cuda, torch_cuda, name):
    driver = cuda and Driver("580.65.06", cuda)
    assert [found.name for found in check_torch(has_device, driver, torch_cuda)] == [name] * (name is not None)


def test_the_log_names_the_machines_faults_once_and_no_programs():
    lost, page = DriverFault(5.0, "Xid", "0000:03:00", 79, ""), DriverFault(6.0, "Xid", "0000:03:00", 31, "")
    switch = DriverFault(7.0, "SXid", "0000:c1:00.0", 24007, "Fatal, Link 46")
    mended = DriverFault(7.0, "SXid", "0000:04:00.0", 22013, "Non-fatal, Link 44 Minion Link DLREQ interrupt")
    found = [one.found for one in check_log([lost, page, switch, mended, lost._replace(at_s=9.0)])]
    assert found == [
        "Xid 79 at 0000:03:00 (the GPU is gone from the PCIe bus), 2 times since boot",
        "SXid 24007 at 0000:c1:00.0 (Fatal, Link 46), 1 time since boot",
    ]
