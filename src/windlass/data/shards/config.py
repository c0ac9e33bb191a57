"""What a recipe may say about the local cache of a preparation at a URL. No torch."""

from pydantic import Field, field_validator

from windlass.settings import BrokenRule, Settings


class CacheConfig(Settings):
    """Shards of a preparation at a URL, kept on this host and shared by its ranks and by other jobs."""

    directory: str = Field(min_length=1)
    """Local directory. `prepare` writes the shards beside it before it copies them to the URL: 2 to 6 bytes per token."""
    limit_mib: int = Field(default=10240, ge=1)
    """Largest size of the directory, in MiB: at least one shuffle window and one more shard."""
    deadline_s: float = Field(default=120.0, ge=1.0, le=86400.0)
    """Longest wait for one file of the store, in seconds, all attempts together. After that the run ends with an error."""

    @field_validator("directory")
    @classmethod
    def _local(cls, directory: str) -> str:
        if "://" in directory:
            rule = "shards are cached in a local directory, and this is a URL"
            raise BrokenRule({"directory": directory}, rule, "give a local directory as .directory")
        return directory
