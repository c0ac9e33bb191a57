"""Bytes that one rank's device holds at the peak of a step, counted from shapes alone. No torch.

Between two steps, from the first update on, per parameter of this rank (n of them, w bytes as stored, c as computed):

    weights      w n
    copies       c n beside masters (16 bits on one rank, or with zero 0; precision/masters.py): what products read. Of weights
                 that are cast ahead to fp8 (precision/fp8_weights.py) 1 byte, beside shards too
    gradients    w n, or in precision.gradients
    states       AdamW 2 s n, and 4 bytes of a counter per tensor; Muon s n for the matrices of blocks
    gathered     what FSDP2 gathers of the model's N parameters: zero 1 and 2 all, c N; zero 3 the ends and `gathered_units` of
                 blocks. And whole gradients: zero 1 of all, zero 2 of the largest unit, zero 3 of a unit of blocks and an end;
                 zero 0 of all, where they are sent in another dtype than they are kept in. Of weights that
                 are cast ahead to fp8 1 byte where c is 2

zero 1 to 3 cut dim 0 of each tensor over F = shard x context ranks: rank 0 has ceil(rows / F) of them, the most.

Through a micro-batch each block keeps for its backward, in elements per token (h hidden, q and k channels of query and key
heads, f of the MLP):

    none         4h + 2q + 2k + 4f    stream, norm, q, k, v, attention's output, stream, norm; gate, its activation, up, product
    selective    3h + 2q + 2k + 2f    input and the outputs of products
    full         h                    input

A compiled block keeps 3f of the 4f, and 2h of the 3h (counted: Inductor's partitioner, Llama); of a sparse one the MLP is not
compiled. A token that goes to K experts has K rows of h in and out (selective: out). RMSNorm is one kernel on a GPU; a CPU
computes it in pieces and keeps one more element, in fp32 too where it computes in 16 bits. The backward of one block adds its own
gradients, and what it recomputed. The head keeps a gradient per hidden state and one of its weight; one chunk of logits exists at
a time. The peak is that + what all blocks keep + the larger of head and one block.

tests/plan/test_memory.py reads weights, copies, gradients and states off real tensors: equal to the byte. What blocks keep is
compared there with parallel/activations.py, which runs a block on fake tensors: within 1 %, 15 % where layers have a sliding
window on a CPU. Neither counts what a library
allocates for itself (NCCL, cuBLAS), nor holes of the allocator.
Source: Korthikanti et al., arXiv 2205.05198, for transformers in general; the elements are counted from model/transformer.py.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from windlass.model.architecture import Architecture
from windlass.model.chunks import USUAL, head_tokens
from windlass.model.lora.adapter import CODES, SCALES, Adapter, adapted_shapes, frozen_base
from windlass.parallel.config import MeshLayout, ParallelConfig
from windlass.precision.config import PrecisionConfig

SIZES: Final[Mapping[str, int]] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
COUNTER: Final = 4  # bytes of AdamW's step, one per tensor
STATISTIC: Final = 4  # bytes of a row's norm or of a query's softmax, in fp32


def gathered_units(prefetch: int) -> int:
    """Units of blocks whose gathered parameters exist at once under ZeRO-3, in forward, which has the most: the one that
    computes, the message that it was copied out of, and those under way (parallel/fsdp.py)."""
    return 2 + prefetch


@dataclass(frozen=True)
class LastingBytes:
    """Bytes between two steps; `gathered` during one."""

    weights: int
    copies: int
    gradients: int
    states: int
    gathered: int

    @property
    def total(self) -> int:
        return self.weights + self.copies + self.gradients + self.states + self.gathered


@dataclass(frozen=True)
class StepBytes:
    """Bytes at the peak of one micro-batch: what all blocks keep, and beside it the larger of the head and of one block's
    backward."""

    blocks: int
    head: int
    backward: int

    @property
    def total(self) -> int:
        return self.blocks + max(self.head, self.backward)


@dataclass(frozen=True)
class RankMemory:
    """Counts the bytes of the rank that has the most. `is_counted` says for which layouts."""

    architecture: Architecture
    parallel: ParallelConfig
    precision: PrecisionConfig
    layout: MeshLayout
    optimizer: str = "adamw"
    frozen: Collection[str] = ()
    adapter: Adapter | None = None
    is_compiled: bool = False
    """Blocks and loss."""
    on_gpu: bool = True

    @property
    def is_counted(self) -> bool:
        """Whether this file knows the layout, and what is trained in it."""
        layout = self.layout
        is_plain = max(layout.pp, layout.tp, layout.context, layout.expert) == 1
        return is_plain and not self.parallel.offload and self.parallel.activation_gib is None

    @property
    def has_masters(self) -> bool:
        """What precision/masters.has_masters says of this layout, without torch."""
        is_wide = self.precision.stored == "fp32" and self._computed == 2
        ranks = self.layout.replicate * self.layout.shard * self.layout.context
        return is_wide and (ranks == 1 or self.parallel.zero_stage == 0)

    @property
    def _computed(self) -> int:
        return SIZES[self.precision.computed]

    @property
    def _kept_gradient(self) -> int:
        return SIZES[self.precision.added if self.has_masters else self.precision.stored]

    def lasting_bytes(self) -> LastingBytes:
        """What parameters cost."""
        stored, computed = SIZES[self.precision.stored], self._computed
        base = frozen_base(self.architecture, self.adapter)
        still = {*self.frozen, *base}
        weights = copies = gradients = states = whole = 0
        shapes = adapted_shapes(self.architecture, self.adapter, padded=True)
        in_fp8 = set(self.precision.cast_ahead(shapes, self.layout.shard, self.parallel.offload))
        for name, shape in shapes.items():
            elements, size = self._local(shape), stored
            if name in base:
                size = 1 if name.endswith(f".{CODES}") else 2 if name.endswith(f".{SCALES}") else computed
            weights += elements * size
            if self.has_masters and size == stored and name not in base:
                copies += elements * computed * (name not in in_fp8)
            copies += elements * (name in in_fp8)
            whole += math.prod(shape) * min(size, computed)
            if name not in still:
                gradients += elements * self._kept_gradient
                states += self._states(name, shape, elements)
        eight = sum(math.prod(shapes[name]) for name in in_fp8)
        return LastingBytes(weights, copies, gradients, states, self._gathered(whole, gradients, eight))

    def _states(self, name: str, shape: tuple[int, ...], elements: int) -> int:
        kept = SIZES[self.precision.kept]
        if self.optimizer == "muon" and ".layers." in name and len(shape) == 2:
            return elements * kept
        return 2 * elements * kept + COUNTER

    def _local(self, shape: tuple[int, ...]) -> int:
        """Elements of this rank's part."""
        if self.parallel.zero_stage == 0 or not shape:
            return math.prod(shape)
        ranks = self.layout.shard * self.layout.context
        if len(shape) == 3 and any(size % ranks == 0 for size in shape):  # experts: parallel/expert.cut_dim
            return math.prod(shape) // ranks
        return -(-shape[0] // ranks) * math.prod(shape[1:])

    def _gathered(self, whole: int, gradients: int, eight: int) -> int:
        """During a step. `whole`: bytes of the model as it computes; `gradients`: of this rank's part; 0: none; `eight`: weights
        that are gathered in fp8."""
        ranks = self.layout.shard * self.layout.context
        if ranks == 1 and self.layout.replicate == 1:
            return 0
        if self.parallel.zero_stage == 0:
            kept, sent = self._kept_gradient, SIZES[self.precision.reduced]
            return gradients // kept * sent if sent != kept else 0
        share = self.parallel.blocks_per_unit / self.architecture.num_layers
        rows, hidden = self.architecture.padded_vocab_size, self.architecture.hidden_size
        edge = rows * hidden * self._computed  # embedding, or head
        edges = edge * (2 - self.architecture.tied)
        blocks = whole - edges
        reduced = SIZES[self.precision.reduced] / self._computed * min(1, gradients)
        if self.parallel.zero_stage == 3:
            sent = (blocks - eight) * gathered_units(self.parallel.prefetch)
            units = int(min(1.0, share) * (sent + blocks * reduced))
            return units + int(edges + edge * reduced)
        unit = max(blocks * share, edge)
        return whole - eight + int((whole if self.parallel.zero_stage == 1 else unit) * reduced)

    def step_bytes(self, micro_batch: int, length: int, recompute: str) -> StepBytes:
        """What a micro-batch of [micro_batch, length] tokens costs."""
        tokens, hidden = micro_batch * length, self.architecture.hidden_size
        kept = sum(self.block_bytes(recompute, index) for index in range(self.architecture.num_layers))
        again = 0 if recompute == "none" else self.block_bytes("none", 0)
        own = (3 * self._inner(0) + 2 * hidden) * self._computed
        edges = 3 * hidden * self._computed  # final norm, its input, and the hidden states' gradient
        return StepBytes(tokens * (kept + edges), self._head(tokens), tokens * (again + own))

    def block_bytes(self, recompute: str, index: int) -> int:
        """Bytes per token that block `index` keeps."""
        arch, size = self.architecture, self._computed
        query, key, inner = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, self._inner(index)
        hidden, products, is_sparse = arch.hidden_size, 1 + arch.gated_mlp, index in arch.sparse_layers
        if recompute == "full":
            return hidden * size
        routed = arch.experts_per_token * hidden * is_sparse
        attention = 2 * query + 2 * key
        softmax = arch.num_heads * STATISTIC
        piece = 0 if arch.layer_norm or self.on_gpu else size + 4 * (size == 2)
        if recompute == "selective":
            kept = (2 * hidden + attention + products * inner) * size + softmax
            # the stream between a sparse layer's halves; what the last product of a dense one makes
            return kept + (hidden + routed if is_sparse else hidden * (not self.is_compiled)) * size
        heads = (query + key) * arch.qk_norm
        heads_normed = 1 if arch.qk_norm_whole else (arch.num_heads + arch.num_kv_heads)
        stream = 3 if arch.parallel_block else 4
        norms = (1 if arch.parallel_block else 2) * arch.norm_inputs + 2 * arch.norm_outputs
        elementwise = 2 * products - (self.is_compiled and arch.gated_mlp and not is_sparse)
        elements = stream * hidden + attention + heads + 2 * hidden * arch.norm_outputs + elementwise * inner
        statistics = (norms * (1 + arch.layer_norm) + heads_normed * arch.qk_norm) * STATISTIC
        return (elements + 2 * routed) * size + (norms * hidden + heads) * piece + softmax + statistics

    def _inner(self, index: int) -> int:
        """Channels of the MLP that a token passes; of a mixture's experts those that it is sent to."""
        arch = self.architecture
        is_sparse = index in arch.sparse_layers
        return arch.experts_per_token * arch.expert_size if is_sparse else arch.intermediate_size

    def _head(self, tokens: int) -> int:
        """The gradient of the head's weight, in fp32 where it is added up, and one chunk of logits."""
        rows, hidden, size = self.architecture.padded_vocab_size, self.architecture.hidden_size, self._computed
        wide = max(4, size)
        chunk = head_tokens(USUAL.head_logits, rows)
        per_logit = wide + (size if size < wide else 0)
        if self.is_compiled:
            chunk = min(head_tokens(USUAL.compiled_head_logits_gpu, rows), USUAL.compiled_head_tokens)
            per_logit = size
        summed = size if tokens <= chunk else wide
        return min(tokens, chunk) * rows * per_logit + rows * hidden * (summed + size)
