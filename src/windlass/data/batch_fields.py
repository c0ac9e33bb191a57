"""What a batch holds, and the label of a target that no loss counts. The data makes batches; model and objectives read them."""

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:  # a recipe is checked without torch
    import torch

Batch: TypeAlias = "dict[str, torch.Tensor]"
"""`input_ids` and `targets`, [micro_batch, T] int64; with isolated documents `documents`, [micro_batch, M] int64; with dropout
`keys`, [micro_batch] int64; of a mixture of S sources `sources`, [micro_batch, S] bool; where answers have weights `percent`,
[micro_batch, T] int64, of each target."""
NOT_COUNTED: Final = -100
"""torch's and Hugging Face's label of a target that is not counted."""
