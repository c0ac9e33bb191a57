"""A source appended to a mixture: the shards of the sources before it stay.

In a mixture every source has shards of its own, one source behind the other, and a share of each is held out by the hash of its
documents. So the shards of the first sources do not depend on those behind them: where all else is as it was, they are linked
into the new preparation, and only what was appended is encoded. The result is the same to the byte as one made anew.
"""

from pathlib import Path
from typing import NamedTuple

from windlass.data.held_out import HeldOutConfig
from windlass.data.prepare.manifest import Prepared, SetInfo, load_prepared
from windlass.data.prepare.plan import PreparePlan
from windlass.data.sources.config import HELD
from windlass.errors import BadShard, UserError


class KeptSources(NamedTuple):
    """The first sources of a mixture, as they were prepared before."""

    num_sources: int
    prepared: Prepared

    def of_set(self, name: str) -> SetInfo | None:
        """What was prepared of them for a set; None where its sources are not stored one by one."""
        info = self.prepared.sets.get(name)
        return info if info is not None and len(info.source_shards) == self.num_sources else None

    def with_bad_rows(self, found: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """`found`, with what was found of the kept sources when they were encoded: a template refuses rows that can be read."""
        names = [f"sources.{number}" for number in range(self.num_sources)]
        kept = {name: self.prepared.bad_rows.get(name, {}) for name in names}
        return {name: counts for name, counts in {**kept, **found, **kept}.items() if counts}


def kept_sources(plan: PreparePlan, directory: Path) -> KeptSources | None:
    """The sources of `plan` that `directory` holds already, if it holds them and no others, in the same order and with the same
    settings, tokenizer and files."""
    config = plan.config
    is_by_document = not isinstance(config.validation, HeldOutConfig)
    if not (config.mixture and is_by_document) or config.deduplicate or config.tokenizer.train is not None:
        return None  # else a document's position depends on all sources
    if config.order.held_out_of is not None:
        return None
    try:
        found = load_prepared(directory)
        if found is None:
            return None
        for count in range(len(config.sources) - 1, 0, -1):
            if _stores_alike(plan, count) and _of_first(plan, count).fingerprint == found.fingerprint:
                kept = KeptSources(count, found)
                if kept.of_set("train") is None or not _adds_up(plan, kept):
                    return None
                for name in filter(kept.of_set, found.sets):
                    found.folder(name).verify()
                return kept
    except (BadShard, UserError, OSError):  # it is damaged: all is made anew
        pass
    return None


def _adds_up(plan: PreparePlan, kept: KeptSources) -> bool:
    """Whether the bytes of the kept tokens are known: those of a tokenizer that rewrites text are counted as they are encoded."""
    infos = [info for name in kept.prepared.sets if (info := kept.of_set(name)) is not None]
    is_masked = any(source.format in HELD for source in plan.config.sources)
    return is_masked or all(info.bytes_add_up for info in infos)


def _stores_alike(plan: PreparePlan, count: int) -> bool:
    """Whether what is appended is stored in the same columns: where a source is of chats, all store where documents end."""
    is_chat = [source.format == "chat" for source in plan.config.sources]
    return any(is_chat) == any(is_chat[:count])


def _of_first(plan: PreparePlan, count: int) -> PreparePlan:
    """The plan with the first `count` sources alone."""
    behind = tuple(f"sources.{number}." for number in range(count, len(plan.config.sources)))
    config = plan.config.changed(sources=plan.config.sources[:count], stages=[])
    files = {name: found for name, found in plan.files.items() if not f"{name}.".startswith(behind)}
    return plan._replace(config=config, files=files)
