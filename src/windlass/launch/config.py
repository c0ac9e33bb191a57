"""The recipe's `launch:` block: how ranks are started and started again. It never changes what is trained."""

from pydantic import Field

from windlass.settings import Settings


class LaunchConfig(Settings):
    max_restarts: int = Field(default=3, ge=0)
    """How often our launcher starts the ranks again after one died or stalled, from the last commit. A mistake that only the user
    can mend is never tried again, nor a step that has failed three times."""

    stall_s: float = Field(default=180.0, ge=0)
    """A rank that has begun nothing new for this many seconds, and for ten times the longest that its phase has taken, is named
    and stopped with all others. Waiting for data ends by data.timeout_s first. 0: never."""
