"""One bad thing that was found."""

from typing import NamedTuple


class Diagnosis(NamedTuple):
    """`name`: stable, for scripts. `found`, `rule`, `fix`: what is there, what it breaks, what to do."""

    name: str
    found: str
    rule: str
    fix: str

    def text(self) -> str:
        """As an error of windlass looks, under its name."""
        return f"{self.name}: {self.found}\n  rule: {self.rule}\n  fix:  {self.fix}"
