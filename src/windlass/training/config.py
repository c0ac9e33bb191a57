"""The recipe's `run` section: how long a run trains, on what global batch, and where it starts. No torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic.fields import FieldInfo

from windlass.errors import UserError, nearest
from windlass.settings import BrokenRule, Count, Settings, Violation

FlashVersion = Literal["auto", 2, 3, 4]


class RunSettings(Settings):
    directory: Path
    """Directory for everything that the run writes. Starting a run on it again resumes the run."""
    steps: Count | None = Field(None, ge=1)
    """Optimizer steps. Give exactly one of steps, tokens, epochs."""
    tokens: Count | None = Field(None, ge=1)
    """Training length in tokens, rounded up to whole steps."""
    epochs: float | None = Field(None, gt=0)
    """Training length in passes over the training set, rounded up to whole steps."""
    tokens_per_step: Count = Field(ge=1, le=10**9)
    """Tokens per optimizer step over all ranks: the global batch. It determines gradient accumulation."""
    micro_batch: Annotated[Count, Field(ge=1)] | Literal["auto"] = "auto"
    """Sequences per rank of the batch axes in one forward. It changes memory and speed, not the result. auto: on a GPU as many
    as are worthwhile and fit, counted and then tried before step 0; on a CPU 1 (a pair, in a preference run). A run that
    resumes on the same layout and devices keeps what it began with."""
    seed: int = Field(0, ge=0)
    """Seed of the initial weights and of the data order."""
    deterministic: bool = False
    """Use deterministic kernels only, so that on a GPU a killed and resumed run matches an uninterrupted one bit for bit. CPU
    runs are always deterministic. The fastest attention kernels on a GPU add in an order that varies: two equal runs agree only
    to rounding (on an H200 in four to five digits of the loss). An operator without a deterministic kernel raises."""
    flash_attention: FlashVersion = "auto"
    """FlashAttention of rows that hold several documents (`data.isolate`, or context ranks that compute slices), on an NVIDIA GPU
    in 16 bits. 2: torch's own. 3, on Hopper, or 4, on Hopper and Blackwell: a package that is installed beside torch. auto: 3
    or 4 if its package is installed and, tried before step 0, it agrees with exact attention in forward and backward; else 2.
    The first lines of a run name the kernel. A run that resumes on the same device keeps what it began with."""
    start_from: str | None = None
    """A run or checkpoint directory whose state a *new* run begins with."""
    start_what: Literal["weights", "all"] = "weights"
    """With start_from. weights: take only the model. all: also take optimizer, step and data position."""
    accept_drift: list[str] = []
    """Settings (`section.key`) that may differ from the checkpoint's on resume; `data` accepts other files behind the same
    recipe. The model's own settings may never differ."""

    @field_validator("directory", mode="before")
    @classmethod
    def _local(cls, directory: object) -> object:
        if "://" in str(directory):  # a Path would make folders of its parts, with what is secret in their names
            change = "give a local directory as .directory; checkpoint.remote takes a URL, for copies of checkpoints"
            given = {"directory": str(directory)}
            raise BrokenRule(given, "a run writes to a local directory, and this is a URL", change)
        return directory

    @property
    def known_steps(self) -> int | None:
        """The length in optimizer steps; None where it is given in epochs of data that is not open yet."""
        return math.ceil(self.tokens / self.tokens_per_step) if self.tokens is not None else self.steps

    def _accepted_errors(self, sections: Mapping[str, FieldInfo]) -> Iterator[UserError]:
        """The fields of `model` are its family's, and not looked at."""
        keys = ["data"]
        for name, section in sections.items():
            inner = section.annotation.model_fields if isinstance(section.annotation, type(Settings)) else {}
            keys += [f"{name}.{field.alias or key}" for key, field in inner.items()]
        for word in self.accept_drift:
            begin = ".".join(word.split(".")[:2])
            if begin not in keys and not begin.startswith("model."):
                yield UserError(
                    f"run.accept_drift=[{word}]",
                    "it names settings that may differ from the checkpoint's, and this is no key of a recipe",
                    f"{nearest(word, keys)}the error of a resume names the keys that differ; `windlass keys` lists all",
                )

    def errors_beside(
        self, sections: Mapping[str, FieldInfo], has_documents: bool, computed: str | None
    ) -> Iterator[UserError]:
        """Violated rules on the keys of a recipe's `sections`, on rows of several documents, and on the dtype of products; None:
        the devices decide it."""
        yield from self._accepted_errors(sections)
        version = self.flash_attention
        if version in ("auto", 2):
            return
        if not has_documents:
            yield UserError(
                f"run.flash_attention={version} with data.isolate=false",
                "the version matters where rows hold several documents that do not see one another; for rows of one torch "
                "chooses the kernel",
                "set data.isolate=true, or remove run.flash_attention",
            )
        if computed not in (None, "bf16", "fp16"):
            yield UserError(
                f"run.flash_attention={version} with products in {computed}",
                "FlashAttention computes in 16 bits",
                "use precision.policy=bf16, or remove run.flash_attention",
            )

    def rules(self) -> Sequence[Iterator[Violation]]:
        return self._length(), self._start()

    def _length(self) -> Iterator[UserError]:
        given = [name for name in ("steps", "tokens", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            yield UserError(
                f"run has {' and '.join(given) if given else 'none of steps, tokens, epochs'}",
                "the length of a run is given exactly once",
                "set one of run.steps, run.tokens, run.epochs",
            )

    def _start(self) -> Iterator[UserError]:
        if self.start_from is None and self.start_what != "weights":
            yield UserError(
                f"run.start_what={self.start_what} without run.start_from",
                "start_what says what is taken from the checkpoint that start_from names",
                "set run.start_from, or remove run.start_what",
            )
