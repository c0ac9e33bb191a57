"""`run.flash_attention`: the FlashAttention of rows that hold several documents, chosen and activated before anything is compiled
or tried for its size. All ranks take the same one, the first that is right on every rank (model/attention/flash_versions.py).

It changes speed, and results as much as rounding does. So a run that resumes on the same device keeps its version where that
still runs, and one that moves to another device chooses anew. On a CPU nothing is chosen and nothing activated.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from windlass.config import RunConfig
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.attention.flash_versions import (
    MAJORS,
    VERSIONS,
    cuda_capability,
    flash_kept,
    has_package,
    try_flash_version,
    use_torchs_flash,
    why_no_flash,
    why_not_for,
    why_not_here,
)
from windlass.precision.policy import precision_of
from windlass.runtime import Runtime

INSTALL = {
    3: "build flash_attn_interface in hopper/ of github.com/Dao-AILab/flash-attention",
    4: "pip install flash-attn-4",
}


def check_flash(config: RunConfig, runtime: Runtime) -> None:
    """Raises UserError, on all ranks alike, where a rank's device or packages lack the version that the recipe asks for.
    Collective in runs that ask for one."""
    version = config.run.flash_attention
    if version in VERSIONS:
        own = why_not_here(version, cuda_capability(runtime.device), has_package(version))
        if (why := _first(runtime, own)) is not None:
            raise _refused(version, runtime, why)


def choose_flash(
    config: RunConfig,
    trainer_state: Mapping[str, Any] | None,
    architecture: Architecture,
    runtime: Runtime,
    opened: ExitStack,
) -> tuple[RunConfig, list[str]]:
    """`config` with the version that is active from here on, until `opened` closes, and sentences for the user; as it was where
    nothing is to choose. Collective. Raises UserError, on all ranks alike, where a version that is asked for does not run."""
    asked = config.run.flash_attention
    if asked == "auto" and not _has_choice(config, architecture, runtime):
        return config, []
    opened.enter_context(flash_kept())
    if asked != "auto":
        chosen, reasons = _activate_first_right([asked], config, architecture, runtime)
        if chosen != asked:
            raise _refused(asked, runtime, reasons[asked])
        return config, []
    before = runtime.shared(_version_before(trainer_state, runtime))
    chosen, reasons = _activate_first_right(
        [*([] if before is None else [before]), *VERSIONS], config, architecture, runtime
    )
    found = config.changed(run=config.run.changed(flash_attention=chosen))
    return found, [_sentence(chosen, before, reasons, runtime)]


def _has_choice(config: RunConfig, architecture: Architecture, runtime: Runtime) -> bool:
    """Whether rows hold several documents, the model runs flash, and every rank's device has another version. Collective."""
    capabilities = runtime.gathered(cuda_capability(runtime.device))
    majors = {None if capability is None else capability[0] for capability in capabilities}
    is_flash = why_no_flash(architecture, precision_of(config.precision).compute) is None
    has_documents = config.data.isolate or config.parallel.computes_slices
    return has_documents and is_flash and any(majors <= set(known) for known in MAJORS.values())


def _activate_first_right(
    order: Sequence[int], config: RunConfig, architecture: Architecture, runtime: Runtime
) -> tuple[int, dict[int, str]]:
    """The first version that runs on every rank, active from here on, and why those before it do not. Collective."""
    reasons: dict[int, str] = {}
    for version in dict.fromkeys(order):
        if version == 2:
            break
        why = _why_not(version, config, architecture, runtime)
        if why is None:
            return version, reasons
        reasons[version] = why
    use_torchs_flash()
    return 2, reasons


def _version_before(trainer_state: Mapping[str, Any] | None, runtime: Runtime) -> int | None:
    """The version of the run that goes on, if it ran on the same device: 2, where its checkpoint does not name the key."""
    if trainer_state is None or trainer_state.get("device") != runtime.device_name():
        return None
    version = trainer_state["config"]["run"].get("flash_attention", 2)
    return None if version == "auto" else version


def _why_not(version: int, config: RunConfig, architecture: Architecture, runtime: Runtime) -> str | None:
    """Why a version does not run on every rank; None where it does, and is active on all. Collective."""
    dtype, is_deterministic = precision_of(config.precision).compute, config.run.deterministic
    own = why_not_here(version, cuda_capability(runtime.device), has_package(version))
    own = own or why_not_for(version, architecture, dtype, is_deterministic)
    own = own or try_flash_version(
        version,
        architecture,
        dtype,
        runtime.device,
        slices=config.parallel.computes_slices,
        is_deterministic=is_deterministic,
    )
    return _first(runtime, own)


def _first(runtime: Runtime, own: str | None) -> str | None:
    """The reason of the first rank that has one. Collective."""
    reasons = runtime.gathered(own)
    return next((f"rank {rank}: {why}" if rank else why for rank, why in enumerate(reasons) if why is not None), None)


def _refused(version: int, runtime: Runtime, why: str) -> UserError:
    return UserError(
        f"run.flash_attention={version} on {runtime.device_name()}: {why}",
        "a version that a recipe asks for runs on every rank, and gives what exact attention gives",
        f"set run.flash_attention=auto, which takes what runs, or {INSTALL[version]}, on a device that has it",
    )


def _sentence(chosen: int, before: int | None, reasons: Mapping[int, str], runtime: Runtime) -> str:
    """What was chosen, and why nothing faster."""
    if chosen == before:
        return f"run.flash_attention=auto: {chosen}, as the run began on {runtime.device_name()}"
    how = f", tried on {runtime.device_name()}" if chosen in VERSIONS else ""
    found = f"run.flash_attention=auto: {chosen}{how}" + "".join(f"; {one}: {why}" for one, why in reasons.items())
    if before is None:
        return found
    return f"{found}; the run began with {before}: results differ from here on as rounding does"
