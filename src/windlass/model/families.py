"""Each family's own Hugging Face config fields, typed and with Hugging Face's defaults, and the way to an Architecture
and back.

A field is one of three. *Known*: a typed field of the family's class below. *Harmless*: it changes no number of a
causal language model (INFERENCE, `harmless`). *Fixed*: it would change the maths in a way that is not implemented, so
only the values that leave the maths alone are accepted (`fixed`). Whatever is none of these is refused by name in
config.py: an ignored field is a model that is silently another one. Source: the configuration_*.py of transformers
5.23; a test compares the defaults. No torch.

A new family: a class here, a line in FAMILIES, and what the decoder cannot do yet in transformer.py.
"""

from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from windlass.errors import UserError
from windlass.model.architecture import Architecture, divisors
from windlass.settings import Settings

Activation = Literal["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"]
TokenIds = int | list[int] | None

# Fields of transformers' PreTrainedConfig, of its older versions, and of generation configs inside config.json.
_INFERENCE = """
architectures auto_map model_type dtype torch_dtype transformers_version name_or_path _name_or_path _commit_hash
use_cache return_dict output_hidden_states output_attentions output_scores return_dict_in_generate torchscript
use_bfloat16 tf_legacy_loss attn_implementation _attn_implementation _attn_implementation_autoset
tokenizer_class prefix finetuning_task task_specific_params id2label label2id num_labels problem_type
pretraining_tp chunk_size_feed_forward is_decoder tie_last_hidden_states sep_token_id decoder_start_token_id
forced_bos_token_id forced_eos_token_id max_length min_length max_new_tokens do_sample early_stopping num_beams
num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
INFERENCE: Final = frozenset(_INFERENCE.split())
NEVER: Final[dict[str, tuple[Any, ...]]] = {
    "is_encoder_decoder": (False, None),
    "tie_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "per_layer_config": (None,),
}


class Family(Settings):
    """What every family's config has. `architecture_class`: the name that config.json gives to transformers."""

    architecture_class: ClassVar[str]
    required: ClassVar[tuple[str, ...]]
    aliases: ClassVar[dict[str, str]] = {}  # transformers accepts both names
    harmless: ClassVar[frozenset[str]] = INFERENCE
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = NEVER

    vocab_size: int | None = None
    """Entries of the vocabulary; the tokenizer's size when left out."""
    initializer_range: float = Field(0.02, ge=0.0, le=1.0)
    """Standard deviation of the initial matrices; output projections have it divided by sqrt(2 layers)."""
    bos_token_id: int | None = None
    """Token id, written to the export."""
    eos_token_id: TokenIds = None
    """Token id or ids, written to the export; generation stops there."""
    pad_token_id: int | None = None
    """Token id, written to the export."""

    def to_architecture(self, vocab_size: int) -> Architecture:
        raise NotImplementedError

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        raise NotImplementedError


class LlamaFields(Family):
    """`model_type: llama`: Llama 1 and 2, and what has their shape. Source: arXiv 2302.13971, 2307.09288."""

    family: ClassVar[str] = "llama"
    qk_norm: ClassVar[bool] = False
    architecture_class: ClassVar[str] = "LlamaForCausalLM"
    required: ClassVar[tuple[str, ...]] = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NEVER,
        "rope_scaling": (None, {}),
        "partial_rotary_factor": (None, 1, 1.0),
        "sliding_window": (None,),
    }

    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the MLP."""
    num_hidden_layers: int
    """Number of blocks."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads; as many as query heads when left out."""
    head_dim: int | None = None
    """Channels per head; hidden_size / num_attention_heads when left out."""
    hidden_act: Activation = "silu"
    """Activation of the MLP."""
    max_position_embeddings: int = 2048
    """Longest sequence the model is meant for, in tokens; written to the export."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    rope_theta: float | None = None
    """Base of the rotary frequencies; 10000 when left out."""
    rope_parameters: dict[str, Any] | None = None
    """transformers 5 keeps rope_theta here; only `rope_type: default`."""
    attention_bias: bool = False
    """Biases in the four attention projections."""
    mlp_bias: bool = False
    """Biases in the three MLP projections."""
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Probability; training needs 0."""
    tie_word_embeddings: bool = False
    """Embedding and head are one matrix."""

    def to_architecture(self, vocab_size: int) -> Architecture:
        heads = self.num_attention_heads
        if heads < 1 or (self.hidden_size % heads and (self.head_dim is None or self.family == "llama")):
            raise UserError(
                f"model: hidden_size {self.hidden_size} and {heads} attention heads",
                "the hidden size is a multiple of the number of heads",
                f"set num_attention_heads to one of {divisors(self.hidden_size)}",
            )
        return Architecture(
            family=self.family,
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=heads if self.num_key_value_heads is None else self.num_key_value_heads,
            head_dim=self.head_dim or self.hidden_size // heads,
            max_positions=self.max_position_embeddings,
            activation=self.hidden_act,
            norm_eps=self.rms_norm_eps,
            initializer_range=self.initializer_range,
            tied=self.tie_word_embeddings,
            rope_theta=self._theta(),
            qk_norm=self.qk_norm,
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            attn_dropout=self.attention_dropout,
            **_token_ids(self),
        )

    def _theta(self) -> float:
        """The one base of the frequencies. transformers gives rope_parameters the precedence over rope_theta."""
        given = dict(self.rope_parameters or {})
        theta = given.pop("rope_theta", None) or self.rope_theta or 10000.0
        plain = {"rope_type": ("default", None), "type": ("default", None), "partial_rotary_factor": (None, 1, 1.0)}
        for name, value in given.items():
            if value not in plain.get(name, ()):
                raise UserError(
                    f"model: rope_parameters.{name} is {value!r}",
                    "only unscaled rotary positions are implemented; with others the model would be another one",
                    "take a model without rope scaling, or keep rope_theta alone",
                )
        return float(theta)

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        assert arch.rope_theta is not None and arch.qkv_bias == arch.out_bias
        return {
            **_common(cls.architecture_class, arch),
            "hidden_size": arch.hidden_size,
            "intermediate_size": arch.intermediate_size,
            "num_hidden_layers": arch.num_layers,
            "num_attention_heads": arch.num_heads,
            "num_key_value_heads": arch.num_kv_heads,
            "head_dim": arch.head_dim,
            "hidden_act": arch.activation,
            "max_position_embeddings": arch.max_positions,
            "rms_norm_eps": arch.norm_eps,
            "rope_theta": arch.rope_theta,  # read by transformers 4
            "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},  # read by transformers 5
            "attention_bias": arch.qkv_bias,
            "attention_dropout": arch.attn_dropout,
            "mlp_bias": arch.mlp_bias,
        }


class Qwen3Fields(LlamaFields):
    """`model_type: qwen3`: RMSNorm on each query and key head, head_dim of its own. Source: arXiv 2505.09388."""

    family: ClassVar[str] = "qwen3"
    qk_norm: ClassVar[bool] = True
    architecture_class: ClassVar[str] = "Qwen3ForCausalLM"
    harmless: ClassVar[frozenset[str]] = INFERENCE | {"sliding_window", "max_window_layers"}  # use_sliding_window rules
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NEVER,
        "rope_scaling": (None, {}),
        "partial_rotary_factor": (None, 1, 1.0),
        "use_sliding_window": (False, None),
        "mlp_bias": (False, None),
    }

    num_key_value_heads: int | None = 32
    """Key and value heads; 32 when left out, as many as query heads when null."""
    head_dim: int | None = 128
    """Channels per head; 128 when left out."""
    max_position_embeddings: int = 32768
    """Longest sequence the model is meant for, in tokens; written to the export."""
    layer_types: list[Literal["full_attention"]] | None = None
    """Kind of attention per block; only full attention."""

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        fields = super().from_architecture(arch)
        del fields["mlp_bias"]
        return {**fields, "use_sliding_window": False}


class GPT2Fields(Family):
    """`model_type: gpt2`: learned positions, LayerNorm, biases, plain MLP. Source: Radford et al. 2019."""

    architecture_class: ClassVar[str] = "GPT2LMHeadModel"
    required: ClassVar[tuple[str, ...]] = ("n_embd", "n_layer", "n_head")
    aliases: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    harmless: ClassVar[frozenset[str]] = INFERENCE | {
        "n_ctx",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    }
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NEVER,
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "reorder_and_upcast_attn": (False, None),
    }

    n_embd: int
    """Width of the residual stream."""
    n_layer: int
    """Number of blocks."""
    n_head: int
    """Heads."""
    n_positions: int = 1024
    """Number of learned positions: the longest sequence, in tokens."""
    n_inner: int | None = None
    """Width inside the MLP; 4 n_embd when left out."""
    activation_function: Activation = "gelu_new"
    """Activation of the MLP."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance in LayerNorm."""
    resid_pdrop: float = Field(0.1, ge=0.0, lt=1.0)
    """Dropout probability on each branch's output; training needs 0."""
    embd_pdrop: float = Field(0.1, ge=0.0, lt=1.0)
    """Dropout probability on the embedding; training needs 0."""
    attn_pdrop: float = Field(0.1, ge=0.0, lt=1.0)
    """Dropout probability on attention weights; training needs 0."""
    bos_token_id: int | None = 50256
    """Token id, written to the export."""
    eos_token_id: TokenIds = 50256
    """Token id or ids, written to the export; generation stops there."""
    tie_word_embeddings: bool = True
    """Embedding and head are one matrix."""

    def to_architecture(self, vocab_size: int) -> Architecture:
        if self.n_head < 1 or self.n_embd % self.n_head:
            raise UserError(
                f"model: n_embd {self.n_embd} and n_head {self.n_head}",
                "the hidden size is a multiple of the number of heads",
                f"set n_head to one of {divisors(self.n_embd)}",
            )
        return Architecture(
            family="gpt2",
            vocab_size=vocab_size,
            hidden_size=self.n_embd,
            intermediate_size=4 * self.n_embd if self.n_inner is None else self.n_inner,
            num_layers=self.n_layer,
            num_heads=self.n_head,
            num_kv_heads=self.n_head,
            head_dim=self.n_embd // self.n_head,
            max_positions=self.n_positions,
            activation=self.activation_function,
            norm_eps=self.layer_norm_epsilon,
            initializer_range=self.initializer_range,
            tied=self.tie_word_embeddings,
            rope_theta=None,
            layer_norm=True,
            gated_mlp=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            resid_dropout=self.resid_pdrop,
            embd_dropout=self.embd_pdrop,
            attn_dropout=self.attn_pdrop,
            **_token_ids(self),
        )

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {
            **_common(cls.architecture_class, arch),
            "n_embd": arch.hidden_size,
            "n_layer": arch.num_layers,
            "n_head": arch.num_heads,
            "n_positions": arch.max_positions,
            "n_inner": arch.intermediate_size,
            "activation_function": arch.activation,
            "layer_norm_epsilon": arch.norm_eps,
            "resid_pdrop": arch.resid_dropout,
            "embd_pdrop": arch.embd_dropout,
            "attn_pdrop": arch.attn_dropout,
        }


FAMILIES: Final[dict[str, type[Family]]] = {"qwen3": Qwen3Fields, "llama": LlamaFields, "gpt2": GPT2Fields}


def _token_ids(fields: Family) -> dict[str, Any]:
    eos = fields.eos_token_id
    return {
        "bos_token_id": fields.bos_token_id,
        "eos_token_id": tuple(eos) if isinstance(eos, list) else eos,
        "pad_token_id": fields.pad_token_id,
    }


def _common(architecture_class: str, arch: Architecture) -> dict[str, object]:
    eos = arch.eos_token_id
    return {
        "architectures": [architecture_class],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "initializer_range": arch.initializer_range,
        "tie_word_embeddings": arch.tied,
        "bos_token_id": arch.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": arch.pad_token_id,
    }
