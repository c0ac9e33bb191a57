"""The scripts of benchmarks/gpu are modules beside each other, as they are when one of them is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
