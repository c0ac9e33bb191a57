"""How the next token of a text is chosen, and how many there are. No torch: the command line shows these defaults."""

import math
from dataclasses import dataclass
from typing import Final

from windlass.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen, and how many. Raises UserError for what cannot be."""

    max_tokens: int = 64
    temperature: float = 0.6
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"--max-tokens {self.max_tokens}", "at least one token is generated", "use 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"--temperature {self.temperature}",
                "a temperature is 0 (greedy) or positive",
                "0.6 is a usual value",
            )
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"--top-p {self.top_p}", "top-p is a probability above 0", "use 1 to cut nothing; 0.95 is usual"
            )


USUAL: Final = Sampling()
