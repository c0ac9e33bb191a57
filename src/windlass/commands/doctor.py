"""`windlass doctor [RECIPE]`: what is wrong with this machine, and with a recipe on it, found without starting a run."""

import importlib.util
import os
import runpy
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from windlass.config import RunConfig, load_recipe
from windlass.data.prepare.prepare import check_data_directory
from windlass.data.tokenize.tokenizer import copy_loaded, open_tokenizer, tokenizer_files, vocab_size_of
from windlass.doctor.diagnosis import Diagnosis
from windlass.doctor.gpus import Driver, Gpu, check_gpus, check_log, check_torch, read_gpus
from windlass.doctor.host import check_environment, check_limits, check_load, read_limits
from windlass.doctor.network import (
    check_host_name,
    check_infiniband,
    check_interfaces,
    check_meeting,
    connect_to_endpoint,
    interfaces,
)
from windlass.doctor.run_storage import check_run_storage, probe
from windlass.errors import SeveralErrors, UserError
from windlass.hardware import read_load
from windlass.model.open_config import architecture_of
from windlass.object_store import Store
from windlass.supervise.kernel_log import read_faults
from windlass.training.start.parameter_rules import count_trained
from windlass.units import counted

BYTES_PER_ELEMENT: Final = 12  # of a checkpoint: an fp32 master and AdamW's two moments
CONTROL: Final = Path("dev/nvidiactl")
STORE_S: Final = 20.0
"""For a store to take a small file."""


def doctor(
    recipe: str | None,
    overrides: Sequence[str] = (),
    endpoint: str | None = None,
    ranks: int | None = None,
    root: Path = Path("/"),
) -> Iterator[Diagnosis]:
    """What is wrong, as it is found. `endpoint`: HOST:PORT where the hosts of a run meet; without it networks are left out.
    `ranks`: of this host; None for one per GPU. `root`: of the file systems of kernel and devices."""
    has_device = (root / CONTROL).exists()
    driver, gpus, silent = _ask_driver() if has_device else (None, [], [])
    yield from silent
    yield from check_torch(has_device, driver, _cuda_of_torch())
    yield from check_gpus(gpus)
    yield from check_log(read_faults() or []) if has_device else ()
    local = ranks or len(gpus) or 1
    has_infiniband = (root / "sys/class/infiniband").is_dir()
    yield from check_limits(read_limits(), local, has_infiniband, hosts=2 if endpoint else 1)
    yield from check_load(read_load(), os.cpu_count() or 1, os.environ)
    yield from check_environment(os.environ, local, len(os.sched_getaffinity(0)))
    yield from check_infiniband(root, bool(gpus))
    if endpoint:
        host, _, port = endpoint.rpartition(":")
        here = interfaces()
        met = connect_to_endpoint(host.strip("[]"), int(port), here)
        yield from check_meeting(endpoint, met, here)
        yield from check_interfaces(os.environ, met, here)
        yield from check_host_name(socket.gethostname(), addresses_of(socket.gethostname()))
    if recipe is not None:
        yield from diagnose_recipe(recipe, overrides, None if endpoint else ranks)


def seen(root: Path = Path("/")) -> str:
    """What this machine has, in a line."""
    gpus = _ask_driver()[1] if (root / CONTROL).exists() else []
    names = ", ".join(f"{number} x {name}" for name, number in Counter(gpu.name for gpu in gpus).items())
    cuda = _cuda_of_torch()
    build = "without CUDA" if cuda is None else f"for CUDA {cuda}"
    return (
        f"seen: {names or 'no NVIDIA GPU'}; torch {version('torch')}, built {build}; "
        f"{counted(len(os.sched_getaffinity(0)), 'core')}"
    )


def _ask_driver() -> tuple[Driver | None, list[Gpu], list[Diagnosis]]:
    """The driver and its GPUs, or why it says nothing of them."""
    import pynvml

    try:
        return *read_gpus(pynvml), []
    except pynvml.NVMLError as error:
        silent = Diagnosis(
            "driver-silent",
            f"this host has an NVIDIA device, and its driver does not answer: {error}",
            "torch reaches a GPU through the driver",
            "a driver that was updated needs a reboot; a container needs the host's (docker run --gpus all)",
        )
        return None, [], [silent]


def _cuda_of_torch() -> str | None:
    """The CUDA that the installed torch was built for, read from its version file: torch itself takes seconds to load."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    cuda: str | None = runpy.run_path(str(Path(found.origin).parent / "version.py"))["cuda"]
    return cuda


def addresses_of(host_name: str) -> list[str]:
    """What this host's name means here; nothing where nobody knows it."""
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host_name, None)))
    except OSError:
        return []


def diagnose_recipe(recipe: str, overrides: Sequence[str], world: int | None) -> Iterator[Diagnosis]:
    """What a run of this recipe would refuse or meet, and its directory. `world`: ranks of the run; None where not known."""
    found: list[RunConfig] = []
    yield from _refusals(lambda: found.append(load_recipe(recipe, *overrides)))
    if not found:
        return
    (config,) = found
    yield from _refusals(lambda: check_recipe_tokenizer(config))
    sizes = [0]
    yield from _refusals(lambda: sizes.append(checkpoint_bytes(config, world)))
    kept = config.checkpoint.keep_last + 1 + config.checkpoint.keep_best + len(config.checkpoint.keep_steps)
    try:
        yield from check_run_storage(probe(config.run.directory), sizes[-1], kept)
    except OSError as error:
        yield Diagnosis(
            "directory-closed",
            f"run.directory={config.run.directory}: {error.strerror}",
            "a run writes its checkpoints there",
            "choose another run.directory, or fix the permissions of this one",
        )
    yield from check_directories(config)


def check_directories(config: RunConfig) -> Iterator[Diagnosis]:
    """Where prepared data and copies of checkpoints go. A store gets a small file, which is removed."""
    remote = config.checkpoint.remote
    checks: dict[str, Callable[[], None]] = {"data.directory": lambda: check_data_directory(config.data, STORE_S)}
    if remote is not None:
        checks["checkpoint.remote"] = lambda: Store(remote, STORE_S, setting=None).check_takes_files()
    for key, check in checks.items():
        try:
            check()
        except UserError as error:
            yield Diagnosis("place-closed", f"{key}: {error.given.removeprefix(f'{key} ')}", error.rule, error.change)


def checkpoint_bytes(config: RunConfig, world: int | None) -> int:
    """Bytes of one checkpoint of this recipe. Raises UserError where `model` names no model, or the model does not fit the
    layout."""
    architecture = architecture_of(config.model, config.data.tokenizer.train or 1)
    config.check_layout(architecture, world)
    return count_trained(config, architecture) * BYTES_PER_ELEMENT


def check_recipe_tokenizer(config: RunConfig) -> None:
    """Raises UserError for a tokenizer that names no end of a text, or has more entries than the model has rows."""
    if config.data.tokenizer.from_ is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        copy_loaded(
            tokenizer_files(config.data.tokenizer), config.data.tokenizer, Path(folder, "copy"), log=lambda _: None
        )
        entries = vocab_size_of(open_tokenizer(Path(folder, "copy"))[0])
    architecture_of(config.model, entries)


def _refusals(check: Callable[[], Any]) -> Iterator[Diagnosis]:
    try:
        check()
    except UserError as error:
        for one in error.errors if isinstance(error, SeveralErrors) else (error,):
            yield Diagnosis("recipe", one.given, one.rule, one.change)
