"""What the decoder needs to know about a model, in neutral names, and the shapes that follow from it. No torch.

One frozen record serves every family; the families' own field names are in families/.
Parameters carry one canonical naming, Llama's on Hugging Face, for every family
(`model.layers.3.self_attn.q_proj.weight`); a plain MLP has up_proj and down_proj. Norms of what attention and MLP add are
called as in glm4, post_self_attn_layernorm and post_mlp_layernorm; families' own names are in names.py.

The vocabulary is padded to a multiple of 128 in memory, the same in every layout, so that tensor cores see aligned rows
and checkpoints move between layouts. The extra rows are zero, masked out of the softmax, and never leave the program.
"""

from dataclasses import dataclass
from typing import Final

from windlass.errors import UserError
from windlass.model.families.rope_scaling import RopeScaling

VOCAB_MULTIPLE: Final = (
    128  # 50,257 -> 50,304: 25 % faster on an A100 (A. Karpathy, nanoGPT, 2023-02); Megatron-LM's default too
)
LARGEST: Final = 1 << 24
"""The largest dimension of a matrix: two of them, and 8 bytes of each product, are still counted in 64 bits."""
DROPOUT_NAMES: Final = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "phi3": ("resid_pdrop", "", "attention_dropout"),
    "starcoder2": ("residual_dropout", "embedding_dropout", "attention_dropout"),
}
"""Hugging Face's fields for the dropout of residuals, embedding and attention; other families have the last alone."""


@dataclass(frozen=True)
class Architecture:
    """All that changes the maths, plus what config.json must keep. Sizes are counts, dropouts are probabilities."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    activation: str
    norm_eps: float
    initializer_range: float
    tied: bool
    rope_theta: float | None  # None: learned positions, added to the embedding
    layer_norm: bool = False  # LayerNorm, else RMSNorm
    norm_bias: bool = True  # of LayerNorm
    norm_adds_one: bool = False  # RMSNorm multiplies by 1 + its weight
    norm_inputs: bool = True  # attention and MLP read the normed stream
    norm_outputs: bool = False  # what attention and MLP add to the stream is normed
    parallel_block: bool = False  # attention and MLP side by side, on one norm
    gated_mlp: bool = True  # down(act(gate(x)) * up(x)), else down(act(up(x)))
    qk_norm: bool = False  # queries and keys are normed, head by head
    qk_norm_whole: bool = False  # or over the channels of all heads
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    resid_dropout: float = 0.0
    embd_dropout: float = 0.0
    attn_dropout: float = 0.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None  # first channels of a head that are rotated; None: all
    rope_interleaved: bool = False  # channels 2i and 2i + 1 turn together, else i and i + K/2
    window_rope: tuple[float, RopeScaling | None] | None = None  # base and scaling in `window_layers`, where others
    unrotated_layers: tuple[int, ...] = ()  # layers whose queries and keys carry no positions (NoPE)
    window: int | None = None  # keys that a query sees, itself included, in `window_layers`
    window_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0  # what a token's embedding is multiplied by
    residual_scale: float = 1.0  # and what attention and MLP add to the stream
    score_scale: float | None = None  # and attention's scores; None: 1/sqrt(head_dim)
    score_cap: float | None = None  # scores s become cap tanh(s/cap)
    logit_scale: float = 1.0
    logit_cap: float | None = None
    num_experts: int = 0  # of each sparse layer; 0: every MLP is one
    experts_per_token: int = 0
    expert_size: int = 0  # channels inside an expert
    normed_weights: bool = False  # the probabilities of a token's experts are divided by their sum
    router_loss: bool = False  # the routers' load-balancing loss is trained on, times the next
    router_loss_scale: float = 0.0
    dense_layers: tuple[int, ...] = ()  # beside experts: layers with one MLP
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model: {self.num_heads} attention heads and {self.num_kv_heads} key/value heads",
                "each key/value head serves the same number of attention heads; a number that is not given is the family's own",
                f"set num_key_value_heads to one of {divisors(self.num_heads)}",
            )
        if self.experts_per_token > self.num_experts:
            raise UserError(
                f"model: num_experts_per_tok {self.experts_per_token} and num_experts {self.num_experts}",
                "a token goes to different experts",
                f"set num_experts_per_tok to {self.num_experts} or less",
            )
        if self.pad_row is not None and not 0 <= self.pad_row < self.vocab_size:
            raise UserError(
                f"model: pad_token_id {self.pad_row} and vocab_size {self.vocab_size}",
                "the padding token is a row of the embedding, and transformers gives that row no gradient",
                "set model.pad_token_id to a row of its own, or to null",
            )
        if self.rope_theta is not None and self.head_dim % 2:
            raise UserError(
                f"model: head_dim is {self.head_dim}",
                "rotary positions turn pairs of channels, so head_dim is even",
                f"set head_dim to {self.head_dim - 1 or 2} or {self.head_dim + 1}",
            )

        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise UserError(
                f"model: head_dim is {self.head_dim}, of which partial_rotary_factor rotates {self.rotary_dim} channels",
                "rotary positions turn pairs of channels",
                "set partial_rotary_factor so that it leaves an even number of channels, and at least 2",
            )

    def _check_sizes(self) -> None:
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads x head_dim": self.num_heads * self.head_dim,
            "num_experts": self.num_experts,
            "moe_intermediate_size": self.expert_size,
        }
        if too_large := [f"{name} {size:,}" for name, size in sizes.items() if size > LARGEST]:
            raise UserError(
                f"model: {', '.join(too_large)}",
                f"no dimension of a matrix is over {LARGEST:,}: products of two are counted in 64 bits",
                "see whether a number has digits too many",
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of embedding and head in memory."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers whose MLP is a mixture of experts."""
        return tuple(i for i in range(self.num_layers) if self.num_experts and i not in self.dense_layers)

    @property
    def pad_row(self) -> int | None:
        """The token whose embedding gets no gradient where it is looked up, as in transformers (its `padding_idx`)."""
        return None if self.family == "gpt2" else self.pad_token_id

    @property
    def dropout(self) -> dict[str, float]:
        """Hugging Face field -> probability, of those that are not zero."""
        names = DROPOUT_NAMES.get(self.family, ("", "", "attention_dropout"))
        fields = zip(names, (self.resid_dropout, self.embd_dropout, self.attn_dropout), strict=True)
        return {name: probability for name, probability in fields if probability}


def divisors(count: int) -> list[int]:
    """All divisors, rising: the choices an error message offers."""
    return [d for d in range(1, count + 1) if count % d == 0]


def describe_dropout(arch: Architecture) -> str:
    """A sentence on what training drops, at which cost (measured in attention/unfused.py), and how to turn attention's dropout
    off; empty where nothing is dropped."""
    if not arch.dropout:
        return ""
    fields = ", ".join(f"{name} {probability:g}" for name, probability in arch.dropout.items())
    if not arch.attn_dropout:
        return f"{fields} (the same in every layout)"
    (field,) = [name for name in arch.dropout if name in ("attn_pdrop", "attention_dropout")]
    return (
        f"{fields} (the same in every layout); attention runs unfused for it, in about 3 times the fused kernel's time and "
        f"0.2 GiB more (measured on CPU): model.{field}=0.0 turns that off"
    )


def parameter_shapes(arch: Architecture, *, padded: bool = False) -> dict[str, tuple[int, ...]]:
    """Canonical name -> logical shape of every parameter, in the model's order; a tied head has no entry.

    `padded`: rows of embedding and head as in memory; else the model's own vocabulary, as it is counted and exported.
    """
    rows, hidden = arch.padded_vocab_size if padded else arch.vocab_size, arch.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, hidden)}
    if arch.rope_theta is None:
        shapes["model.embed_positions.weight"] = (arch.max_positions, hidden)
    dense, sparse, sparse_layers = _block_shapes(arch, False), _block_shapes(arch, True), set(arch.sparse_layers)
    for layer in range(arch.num_layers):
        block = sparse if layer in sparse_layers else dense
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in block.items()})
    shapes.update(_norm("model.norm", hidden, arch))
    if not arch.tied:
        shapes["lm_head.weight"] = (rows, hidden)
    return shapes


def _block_shapes(arch: Architecture, is_sparse: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner = arch.hidden_size, arch.intermediate_size
    q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        shapes.update(_linear(f"self_attn.{name}", size, hidden, arch.qkv_bias))
    shapes.update(_linear("self_attn.o_proj", hidden, q_size, arch.out_bias))
    if arch.qk_norm:
        shapes["self_attn.q_norm.weight"] = (q_size if arch.qk_norm_whole else arch.head_dim,)
        shapes["self_attn.k_norm.weight"] = (kv_size if arch.qk_norm_whole else arch.head_dim,)
    if is_sparse:
        experts, size = arch.num_experts, arch.expert_size
        shapes["mlp.gate.weight"] = (experts, hidden)
        shapes["mlp.experts.gate_proj.weight"] = shapes["mlp.experts.up_proj.weight"] = (experts, size, hidden)
        shapes["mlp.experts.down_proj.weight"] = (experts, hidden, size)
    else:
        if arch.gated_mlp:
            shapes.update(_linear("mlp.gate_proj", inner, hidden, arch.mlp_bias))
        shapes.update(_linear("mlp.up_proj", inner, hidden, arch.mlp_bias))
        shapes.update(_linear("mlp.down_proj", hidden, inner, arch.mlp_bias))
    for name in _block_norms(arch):
        shapes.update(_norm(name, hidden, arch))
    return shapes


def _block_norms(arch: Architecture) -> list[str]:
    """The norms of a block, named by the position of each and never by what else a family's files call so."""
    before = ["input_layernorm", *([] if arch.parallel_block else ["post_attention_layernorm"])]
    after = ["post_self_attn_layernorm", "post_mlp_layernorm"]
    return [*(before if arch.norm_inputs else []), *(after if arch.norm_outputs else [])]


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


def _norm(name: str, size: int, arch: Architecture) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), **({f"{name}.bias": (size,)} if arch.layer_norm and arch.norm_bias else {})}
