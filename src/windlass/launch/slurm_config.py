"""The recipe's `launch.slurm:` block: the jobs of a site, and what a batch script could not hold."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from pydantic import Field, field_validator

from windlass.errors import UserError
from windlass.settings import BrokenRule, Settings

TIME: Final = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
OF_THE_SCRIPT: Final = (
    *("nodes", "ntasks", "ntasks-per-node", "signal", "requeue", "no-requeue"),
    *("output", "error", "open-mode", "array", "dependency"),
)
"""Options that the script sets itself, or could not work with."""


def seconds(time: str) -> int:
    """SLURM's M, M:S, H:M:S, D-H, D-H:M and D-H:M:S, in seconds."""
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours = 0 if len(parts) < 3 and not days else parts.pop(0)
    minutes, rest_s, *_ = [*parts, 0, 0]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest_s


class SlurmConfig(Settings):
    partition: str | None = None
    """Partition of the jobs. Default: the site's. Options of `windlass launch slurm` replace this key and the three below."""

    account: str | None = None
    """Account that the jobs are charged to."""

    qos: str | None = None
    """Quality of service of the jobs."""

    time: str | None = None
    """Time limit of a segment, as sbatch takes it, in quotes: "4:00:00", "1-12". Default: the partition's."""

    grace_s: int = Field(default=300, ge=1, le=65535)
    """Seconds before the time limit at which the ranks are asked to stop and save. SLURM asks up to 60 seconds earlier."""

    cpus_per_task: int | None = Field(default=None, ge=1)
    """Cores of each rank, which is bound to them. Default: the site's, often one."""

    python: str | None = None
    """The interpreter of the ranks. Default: the one that submits; in a container, python3."""

    container: str = ""
    """Words to put before the command of each rank: `apptainer exec --nv /images/train.sif`. Empty: no container."""

    setup: list[str] = []
    """Shell lines to run before the ranks start, on the job's first node: `module load cuda/13`."""

    environment: dict[str, str | int] = {}
    """Variables of the ranks, such as NCCL's, without ${NAME}. Put secrets into the shell that submits: jobs inherit them."""

    options: list[str] = []
    """Further options of every job, one per entry: `--exclusive`."""

    prepare_options: list[str] = []
    """Further options of the jobs that prepare the data; they replace those in `options`: `--partition=cpu`."""

    prepare_parts: int | None = Field(default=None, ge=2, le=10_000)
    """Array tasks that prepare the data in parallel, between a job that makes the tokenizer and a job that joins the parts.
    Default: one job prepares all."""

    @field_validator("time", mode="before")
    @classmethod
    def _quoted(cls, time: Any) -> Any:
        if time is not None and not (isinstance(time, str) and TIME.fullmatch(time)):
            raise BrokenRule(
                {"time": time},
                "this is not a time limit in quotes, and YAML reads 1:00:00 as 3600",
                'write time: "1:00:00" in a recipe, and \'.time="1:00:00"\' on a command line',
            )
        return time

    def rules(self) -> Sequence[Iterator[UserError]]:
        return self._grace(), self._lines(), self._options(), self._variables()

    def _grace(self) -> Iterator[UserError]:
        if self.time is not None and seconds(self.time) <= self.grace_s:
            yield UserError(
                f"launch.slurm.time={self.time} with launch.slurm.grace_s={self.grace_s}",
                f"the ranks are asked to save {self.grace_s} s before the time limit, which is {seconds(self.time)} s",
                "give a longer time, or a shorter grace_s that a checkpoint still fits into",
            )

    def _lines(self) -> Iterator[UserError]:
        site = (self.partition, self.account, self.qos, self.python)
        for line in (*filter(None, site), self.container, *self.setup, *self.options, *self.prepare_options):
            if not line.isprintable():
                yield UserError(
                    f"launch.slurm: {line!r}",
                    "every text there is one line of a script, without control characters",
                    "make it several entries of the list, or one line",
                )

    def _options(self) -> Iterator[UserError]:
        for option in (*self.options, *self.prepare_options):
            name = option.removeprefix("--").split("=")[0].split(" ")[0]
            if not re.match(r"--[a-z]", option):
                yield UserError(
                    f"launch.slurm: `{option}` among the options of sbatch",
                    "an option there is a long one: --name, or --name=value",
                    "see man sbatch for its long name",
                )
            elif name in OF_THE_SCRIPT:
                key = "options" if option in self.options else "prepare_options"
                yield UserError(
                    f"launch.slurm.{key}: `{option}`",
                    f"the script sets --{name} itself, or could not work with it",
                    "remove it; windlass launch slurm --help has what can be chosen, docs/howto/slurm.md why",
                )

    def _variables(self) -> Iterator[UserError]:
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                yield UserError(
                    f"launch.slurm.environment: `{name}`",
                    "a variable's name is letters, digits and underscores",
                    "correct the name",
                )
