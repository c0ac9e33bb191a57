"""Flyte's Elastic: ranks under torchelastic in a pod, or in several. A failure that no retry fixes is not retried.

Flyte's own task raises RuntimeError for whatever a rank failed with, which Flyte retries. A rank of ours exits with a code of
windlass.errors, and the code decides. Source: flyteplugins-pytorch 2.12, whose `TorchFunctionTask.execute` this extends.
"""

from dataclasses import dataclass
from typing import Any

from flyte.errors import NonRecoverableError
from flyte.extend import TaskPluginRegistry
from flyte.io import Dir
from flyteplugins.pytorch import Elastic
from flyteplugins.pytorch.task import TorchFunctionTask
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from windlass.errors import FINAL


@dataclass
class ElasticRanks(Elastic):
    """Flyte's `Elastic` for tasks that call `windlass.flyte.tasks.train`. Local execution is one process, without ranks."""

    monitor_interval: float = 0.1
    """Seconds between two looks of the agent at its ranks. Flyte looks for pods that hang every 10 s, by whether all ranks have
    ended and nobody has looked at them yet, and ends such a pod: with its own 3 s it took healthy ends for that (seen)."""


@dataclass(kw_only=True)
class ElasticRanksTask(TorchFunctionTask):
    """Runs a task whose environment has `ElasticRanks`."""

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NonRecoverableError where a rank exited with a code of FINAL, RuntimeError after any other failure."""
        start = kwargs.get("start_from")
        if isinstance(start, Dir) and "://" in start.path:  # once per pod, not once per rank
            # Flyte gives a file:// URL back as it is
            kwargs["start_from"] = Dir(path=str(await start.download()).removeprefix("file://"))
        try:
            return await super().execute(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__cause__, ChildFailedError) and (message := user_mistake(error.__cause__)) is not None:
                raise NonRecoverableError(message) from error
            raise


def user_mistake(failed: ChildFailedError) -> str | None:
    """What the user has to fix, where a rank exited for that; else None."""
    for rank, failure in sorted(failed.failures.items()):
        if failure.exitcode in FINAL:
            return f"rank {rank} exited with {failure.exitcode}: {failure.message}"
    return None


TaskPluginRegistry.register(config_type=ElasticRanks, plugin=ElasticRanksTask)  # by the type, as every plugin of Flyte
