"""One bad thing that was found."""

from typing import NamedTuple


class Diagnosis(NamedTuple):
    """`name`: stable, for scripts. `found`, `rule`, `fix`: what is there, what it breaks, what to do."""

    name: str
    found: str
    rule: str
    fix: str

    def text(self) -> str:
        """The lines that are printed: the name with what was found, the rule, the fix."""
        return f"{self.name}: {self.found}\n  rule: {self.rule}\n  fix:  {self.fix}"
