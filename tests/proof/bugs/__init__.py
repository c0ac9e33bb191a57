"""Every bug that a test plants, as a patch of the source: its origin, and who must see it (bug.py). planting.py plants it."""

from tests.proof.bugs.adapters import ADAPTERS
from tests.proof.bugs.context import CONTEXT_BUGS
from tests.proof.bugs.data_parallel import DATA_PARALLEL
from tests.proof.bugs.experts import EXPERTS, PRECISION
from tests.proof.bugs.mistakes import MISTAKES
from tests.proof.bugs.model_parallel import MODEL_PARALLEL
from tests.proof.bugs.preferences import PREFERENCES

TABLES = (DATA_PARALLEL, MODEL_PARALLEL, CONTEXT_BUGS, EXPERTS, PRECISION, ADAPTERS, PREFERENCES, MISTAKES)
BUGS = {name: bug for table in TABLES for name, bug in table.items()}
