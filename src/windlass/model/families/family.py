"""What every family's config has in common: the fields, and which fields of others are harmless or refused. No torch.

A field is one of three. *Known*: a typed field of the family's class. *Harmless*: it changes no number of a causal
language model (INFERENCE, `harmless`). *Fixed*: it would change the maths in a way that is not implemented, so only the
values that leave the maths alone are accepted (`fixed`). Whatever is none of these is refused by name in config.py: an
ignored field is a model that is silently another one. In a recipe a harmless field is refused too, since it was written
there to have an effect (ANSWERS). Source: the configuration_*.py of transformers 5.23; a test compares the defaults.
"""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from windlass.model.architecture import Architecture
from windlass.settings import Settings

Activation = Literal["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"]
TokenIds = int | list[int] | None
Size = Annotated[int, Field(ge=1)]
Layers = Annotated[
    int, Field(ge=1, le=10_000)
]  # ten times the deepest that is published (arXiv 2203.00555); each is a module

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
exponential_decay_length_penalty suppress_tokens begin_suppress_tokens transformers.js_config cache_implementation
experts_implementation
"""
INFERENCE: Final = frozenset(_INFERENCE.split())
_STORED: Final = "set precision.policy (fp32, bf16, fp16, bf16-pure), which says what stores and what computes"
_KERNEL: Final = "remove it: the attention kernel is chosen by device and model, and printed at the start of a run"
ANSWERS: Final = {
    **dict.fromkeys(("dtype", "torch_dtype", "use_bfloat16"), _STORED),
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), _KERNEL),
    "experts_implementation": "remove it: experts run in one grouped product where their widths allow, else one by one",
    "use_cache": "remove it: training has no KV cache, and `windlass generate` always has one",
    "temperature": "remove it: `windlass generate --temperature`",
    "top_p": "remove it: `windlass generate --top-p`",
    "max_new_tokens": "remove it: `windlass generate --max-tokens`",
    "max_length": "remove it: data.sequence_length is what is trained, `windlass generate --max-tokens` what is written",
    "n_ctx": "set model.n_positions",
}
"""What to do about a harmless field in a recipe, where there is more to say than that it has no effect."""
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
    stored_names: ClassVar[dict[str, str]] = {}
    """Module of a block -> its name in the family's files, where that is another; `*` is the number of an expert."""
    fused: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Module in the family's files -> the modules here that are its rows, one after the other."""

    vocab_size: Size | None = None
    """Entries of the vocabulary; the tokenizer's size when left out."""
    initializer_range: float = Field(0.02, ge=0.0, le=1.0)
    """Standard deviation of the initial matrices; output projections have it divided by sqrt(2 layers)."""
    bos_token_id: int | None = None
    """Token id, written to the export."""
    eos_token_id: TokenIds = None
    """Token id or ids, written to the export; generation stops there."""
    pad_token_id: int | None = None
    """Token id, written to the export. As in transformers, its embedding gets no gradient where it is read (not gpt2)."""

    @abstractmethod
    def to_architecture(self, vocab_size: int) -> Architecture:
        """What the decoder needs to know."""

    @classmethod
    @abstractmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        """config.json's content again."""

    @classmethod
    def check_own(cls, own: dict[str, Any], merged: dict[str, Any]) -> None:
        """Raises UserError for fields of a recipe (`own`) that have no effect beside the others (`merged`)."""

    @classmethod
    def kind_of(cls, field: str) -> str:
        """What a field takes, in words: `a whole number from 1 or null`."""
        return _kind(cls.model_json_schema()["properties"][field])


_KINDS: Final = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "null": "null"}
_BOUNDS: Final = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    if schema["type"] == "array":
        return f"a list, each {_kind(schema['items'])}"
    bounds = [f" {word} {schema[key]:g}" for key, word in _BOUNDS.items() if key in schema]
    return _KINDS.get(schema["type"], "a mapping") + "".join(bounds)


def token_ids_of(fields: Family) -> dict[str, Any]:
    eos = fields.eos_token_id
    return {
        "bos_token_id": fields.bos_token_id,
        "eos_token_id": tuple(eos) if isinstance(eos, list) else eos,
        "pad_token_id": fields.pad_token_id,
    }


def common_fields(architecture_class: str, arch: Architecture) -> dict[str, object]:
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
