"""What the decoder needs to know about a model, in neutral names, and the shapes that follow from it. No torch.

One frozen record serves every family; the families' own field names are in families/.
Parameters carry one canonical naming, Llama's on Hugging Face, for every family
(`model.layers.3.self_attn.q_proj.weight`); a plain MLP has up_proj and down_proj.

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
    layer_norm: bool = False  # LayerNorm with bias, else RMSNorm
    gated_mlp: bool = True  # down(act(gate(x)) * up(x)), else down(act(up(x)))
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    resid_dropout: float = 0.0
    embd_dropout: float = 0.0
    attn_dropout: float = 0.0
    rope_scaling: RopeScaling | None = None
    unrotated_layers: tuple[int, ...] = ()  # layers whose queries and keys carry no positions (NoPE)
    window: int | None = None  # keys that a query sees, itself included, in `window_layers`
    window_layers: tuple[int, ...] = ()
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
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model: {self.num_heads} attention heads and {self.num_kv_heads} key/value heads",
                "each key/value head serves the same number of attention heads",
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
        if self.family == "gpt2":
            fields = {
                "resid_pdrop": self.resid_dropout,
                "embd_pdrop": self.embd_dropout,
                "attn_pdrop": self.attn_dropout,
            }
        else:
            fields = {"attention_dropout": self.attn_dropout}
        return {name: probability for name, probability in fields.items() if probability}


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
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (arch.head_dim,)
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
    shapes.update(_norm("input_layernorm", hidden, arch))
    shapes.update(_norm("post_attention_layernorm", hidden, arch))
    return shapes


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


def _norm(name: str, size: int, arch: Architecture) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), **({f"{name}.bias": (size,)} if arch.layer_norm else {})}
