"""The message where a device runs out of memory: who holds it, and what each change frees."""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests import tiny
from windlass.config import to_yaml
from windlass.errors import EXIT_USER_ERROR, UserError
from windlass.parallel.activations import Kept
from windlass.parallel.config import ParallelConfig
from windlass.parallel.records import Record
from windlass.status import read_status
from windlass.training.sizing.out_of_memory import DeviceBytes, asked, device_bytes, explained, remedies

MIB = 1 << 20
HELD = DeviceBytes(parameters=100 * MIB, gradients=50 * MIB, states=200 * MIB, peak=1000 * MIB)
KEPT = [Kept(none=40 * MIB, selective=25 * MIB, full=5 * MIB)] * 2


def freed(held=HELD, world=4, micro_batch=8, least=1, can_adapt=False, can_offload=False, **parallel):
    config = ParallelConfig(**parallel)
    given = {"micro_batch": micro_batch, "least": least, "can_adapt": can_adapt, "can_offload": can_offload}
    return remedies(held, config, config.layout(world), KEPT, **given)


def test_holders_are_listed_by_size():
    assert str(HELD) == (
        "activations and buffers 650.0 MiB, optimizer states 200.0 MiB, parameters 100.0 MiB, gradients 50.0 MiB"
    )
    assert DeviceBytes(parameters=9, gradients=0, states=0, peak=5).rest == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "run.micro_batch=4 frees up to 325.0 MiB"),
        ({"micro_batch": 3}, "run.micro_batch=1 frees up to 433.3 MiB"),
        ({"micro_batch": 6, "least": 2}, "run.micro_batch=2 frees up to 433.3 MiB"),
        ({}, "parallel.recompute=full frees about 70.0 MiB"),
        ({"recompute": "selective"}, "parallel.recompute=full frees about 40.0 MiB"),
        ({}, "parallel.shard=8 on twice the ranks frees 175.0 MiB"),
        ({"world": 1}, "parallel.shard=2 on twice the ranks frees 175.0 MiB"),
        ({"world": 1, "zero": 0}, "parallel.shard=2 on two ranks frees 175.0 MiB"),
        ({"replicate": 2, "shard": 2}, "parallel.replicate=1 and parallel.shard=4 frees 175.0 MiB"),
        ({"zero": 0}, "parallel.zero=3 with parallel.shard=4 frees 262.5 MiB"),
        ({"zero": 1}, "parallel.zero=3 with parallel.shard=4 frees 112.5 MiB"),
        ({"zero": 2}, "parallel.zero=3 with parallel.shard=4 frees 75.0 MiB"),
        ({"can_adapt": True}, "adapter.kind=lora frees nearly 250.0 MiB"),
        ({"can_offload": True}, "parallel.offload=true, which is slower, frees 350.0 MiB"),
        ({"held": DeviceBytes(100 * MIB, 0, 0, 200 * MIB, by_nf4=73 * MIB)}, "adapter.base=nf4 frees 73.0 MiB"),
    ],
)
def test_each_change_with_what_it_frees(given, words):
    assert words in freed(**given)


@pytest.mark.parametrize(
    ("given", "absent"),
    [
        ({"micro_batch": 1}, "run.micro_batch"),
        ({"micro_batch": 2, "least": 2}, "run.micro_batch"),
        ({"recompute": "full"}, "parallel.recompute"),
        ({"tp": 2}, "parallel.recompute"),
        ({"recompute": "selective", "activation_gib": 0.5}, "parallel.recompute"),
        ({}, "adapter"),
        ({}, "parallel.offload"),
        ({"can_offload": True, "offload": True}, "parallel.offload"),
        ({"can_offload": True, "zero": 0}, "parallel.offload"),
    ],
)
def test_what_would_free_nothing_is_not_named(given, absent):
    assert not any(absent in change for change in freed(**given))


def test_the_four_that_free_the_most_come_first():
    found = freed(can_adapt=True, can_offload=True)
    assert [line.split("=")[0] for line in found] == [
        "parallel.offload", "run.micro_batch", "adapter.kind", "parallel.shard",
    ]  # fmt: skip


def test_bytes_are_of_the_device_that_is_full():
    weight = torch.nn.Parameter(torch.zeros(8, 64, dtype=torch.bfloat16), requires_grad=False)
    bias = torch.nn.Parameter(torch.zeros(10))
    bias.grad = torch.zeros(10)
    elsewhere = torch.nn.Parameter(torch.zeros(1000, device="meta"))
    head = torch.nn.Parameter(torch.zeros(4, 64), requires_grad=False)
    named = {"model.layers.0.mlp.up_proj.weight": weight, "bias": bias, "elsewhere": elsewhere, "lm_head.weight": head}
    copy = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    records = [Record(name, p, p.shape, copy=copy if p is bias else None) for name, p in named.items()]
    states = [torch.zeros(20), torch.zeros(7, device="meta")]
    held = device_bytes(records, states, 5000.0, torch.device("cpu"), can_quantize=True)
    assert held == DeviceBytes(parameters=1024 + 40 + 20 + 1024, gradients=40, states=80, peak=5000, by_nf4=1024 - 272)
    assert device_bytes(records, states, 5000.0, torch.device("cpu"), can_quantize=False).by_nf4 == 0


# the words of CUDA's allocator, the CPU's, the driver's and cuBLAS's
ERRORS = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), "; 2.50 GiB more were asked for"),
    (
        RuntimeError("[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory: you tried to "
                     "allocate 80000000000 bytes. Error code 12 (Cannot allocate memory)"),
        "; 80000000000 bytes more were asked for",
    ),
    (RuntimeError("CUDA error: out of memory"), ""),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), ""),
    (MemoryError(), ""),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words"), ERRORS)
def test_an_allocators_error_becomes_a_users(error, words):
    with pytest.raises(UserError) as caught, explained(lambda found: UserError(f"full{asked(found)}", "r", "c")):
        raise error
    assert caught.value.given == f"full{words}" and caught.value.__cause__ is error


def test_other_errors_pass_as_they_are():
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as caught, explained(lambda _error: UserError("full", "r", "c")):
        raise error
    assert caught.value is error


LIMITED = """
import resource, sys
import windlass.training.loop  # with torch
from windlass.cli.main import main
mapped = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (int(sys.argv[1]) << 20),) * 2)
sys.argv[1:] = ['train', sys.argv[2]]
main()
"""


def test_a_run_that_runs_out_of_memory_names_who_holds_it_and_what_frees_some(tmp_path):
    sequences = 1 << 16
    config = tiny.recipe(tmp_path, run={"steps": 2, "micro_batch": sequences, "tokens_per_step": 16 * sequences})
    (tmp_path / "recipe.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-c", LIMITED, "800", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == EXIT_USER_ERROR and "Traceback" not in done.stderr, done.stderr
    given, rule, change = done.stderr.strip().splitlines()[-3:]
    found = re.search(
        r"rank 0 ran out of memory on CPU in step ([01]); \d+ bytes more were asked for; of its peak of", given
    )
    assert found, "step 0: in the validation before"
    assert (
        "optimizer states 142.3 KiB, parameters 71.1 KiB" in given
        and "activations and buffers" in given
        and rule.endswith("memory of its device")
    )
    assert "run.micro_batch=32768 frees up to" in change and "parallel.recompute=full frees about" in change
    (incident,) = [line for line in tiny.lines(config.run.directory) if line["kind"] == "incident"]
    assert incident["what"] in given and incident["change"] in change and incident["step"] == int(found[1])
    assert read_status(config.run.directory).exit_code == EXIT_USER_ERROR
