"""The recipe's `model:` section: what it gives, and what it refuses with which words."""

import json
import subprocess
import sys

import pytest

from windlass.errors import UserError
from windlass.model.config import ModelConfig, architecture_from_hf
from windlass.model.families.family_table import to_hf
from windlass.model.families.presets import PRESETS
from windlass.model.open_config import architecture_of, model_directory

SIZES = {"hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 3, "num_attention_heads": 6}
LLAMA = {"family": "llama", **SIZES}
QWEN3 = {"family": "qwen3", **SIZES, "num_key_value_heads": 2}
GPT2 = {"family": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 6}


def refusal(fields, vocab_size=211):
    with pytest.raises(UserError) as caught:
        architecture_of(ModelConfig(**fields), vocab_size)
    return str(caught.value)


def hf_refusal(family, **changes):
    sizes = {"n_embd": 48, "n_layer": 3, "n_head": 6} if family == "gpt2" else SIZES
    config = {"model_type": family, "vocab_size": 211, "num_key_value_heads": 2, **sizes, **changes}
    if family == "gpt2":
        del config["num_key_value_heads"]
    with pytest.raises(UserError) as caught:
        architecture_from_hf(config)
    return str(caught.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_an_architecture_survives_its_own_config_json(preset):
    arch = ModelConfig(preset=preset).architecture()
    assert architecture_from_hf(json.loads(json.dumps(to_hf(arch)))) == arch


def test_a_list_of_eos_tokens_survives():
    arch = ModelConfig(**LLAMA, eos_token_id=[2, 5]).architecture(211)
    assert arch.eos_token_id == (2, 5)
    assert architecture_from_hf(json.loads(json.dumps(to_hf(arch)))) == arch


def test_recipe_keys_override_the_preset_and_the_directory(tmp_path):
    arch = ModelConfig(preset="qwen3-4b", num_hidden_layers=2, rope_theta="1e5").architecture()
    assert (arch.num_layers, arch.rope_theta, arch.hidden_size) == (2, 1e5, 2560)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(arch)))
    again = architecture_of(ModelConfig(**{"from": str(tmp_path)}, rope_theta=7.0, attention_dropout=0.1))
    assert (again.num_layers, again.rope_theta, again.attn_dropout) == (2, 7.0, 0.1)


def test_the_tokenizers_size_is_the_models_when_the_recipe_gives_none():
    assert ModelConfig(**LLAMA).architecture(211).vocab_size == 211
    assert ModelConfig(**LLAMA, vocab_size=300).architecture(211).vocab_size == 300
    assert ModelConfig(preset="gpt2-124m").architecture(50257).padded_vocab_size == 50304


def test_counts_are_read_in_sizes_too():
    sizes = {**LLAMA, "vocab_size": "32k", "max_position_embeddings": "1.5k"}
    arch = ModelConfig(**sizes).architecture(32_000)
    assert (arch.vocab_size, arch.max_positions) == (32_000, 1500)
    with pytest.raises(UserError, match="vocab_size must be a whole number"):
        ModelConfig(**{**LLAMA, "vocab_size": "1.2345k"}).architecture(32_000)


def test_numbers_may_be_written_as_yaml_leaves_them():
    arch = ModelConfig(**LLAMA, rms_norm_eps="1e-5", initializer_range="2e-2").architecture(211)
    assert (arch.norm_eps, arch.initializer_range) == (1e-5, 0.02)


def test_config_and_help_need_no_torch():
    code = "import sys, windlass.model.config, windlass.model.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "none of preset, from, family"),
        ({"preset": "gpt2-124m", "family": "gpt2"}, "preset: gpt2-124m and family: gpt2"),
        ({"preset": "gpt2-125m"}, "did you mean `gpt2-124m`?"),
        ({"family": "lama", **SIZES}, "did you mean `llama`?"),
        ({"family": "t5", **SIZES}, "the families are qwen3, llama, gpt2, mistral, qwen2, smollm3"),
        ({**LLAMA, "hiden_act": "silu"}, "did you mean `hidden_act`?"),
        ({**LLAMA, "foo": False}, "LlamaForCausalLM has no such field"),
        ({"preset": "gpt2-124m", "n_heads": 3}, "did you mean `n_head`?"),
        ({"preset": "gpt2-124m", "model_type": "llama"}, "the family is that of the preset"),
        ({"family": "llama", "hidden_size": 48}, "without intermediate_size, num_hidden_layers, num_attention_heads"),
        ({"family": "gpt2", "n_embd": 48, "n_layer": 2}, "give model.n_head"),
        ({**LLAMA, "num_attention_heads": 5}, "hidden_size 48 and 5 attention heads"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: 0"),
        ({**LLAMA, "hidden_act": "tanh"}, "hidden_act: 'tanh'"),
        ({**LLAMA, "hidden_size": "wide"}, "hidden_size: 'wide'"),
        ({**LLAMA, "vocab_size": 100}, "vocab_size 100, and a tokenizer with 211 entries"),
        ({**LLAMA, "rope_theta": -1.0}, "rope_theta: -1.0"),
        ({**QWEN3, "layer_types": ["chunked_attention"] * 3}, "layer_types.0: 'chunked_attention'"),
        ({**QWEN3, "mlp_bias": True}, "mlp_bias: true"),
        ({**LLAMA, "sliding_window": 7}, "sliding_window: 7"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    ],
)
def test_a_bad_recipe_is_answered_with(fields, words):
    assert words in refusal(fields)


def test_a_base_keeps_its_rows_behind_the_tokenizer_and_gets_none(tmp_path):
    """As Qwen's, whose unused rows new special tokens may take."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 320, **SIZES}))
    base = {"from": str(tmp_path)}
    assert [architecture_of(ModelConfig(**base), rows).vocab_size for rows in (300, 320)] == [320, 320]
    said = refusal(base, 321)
    assert "vocab_size 320, and a tokenizer with 321 entries" in said
    assert "set model.vocab_size=" in said and "new rows begin as the mean of the others" in said
    assert "change: set model.vocab_size to 321 or more, or take" in refusal({**LLAMA, "vocab_size": 320}, 321)


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"torch_dtype": "float16"}, "torch_dtype: set precision.policy (fp32, bf16, fp16, bf16-pure)"),
        ({"dtype": "bfloat16"}, "dtype: set precision.policy"),
        (
            {"attn_implementation": "flash_attention_2"},
            "attn_implementation: remove it: the attention kernel is chosen",
        ),
        ({"use_cache": True}, "use_cache: remove it: training has no KV cache"),
        ({"temperature": 0.2}, "temperature: remove it: `windlass generate --temperature`"),
        ({"top_p": 0.9}, "top_p: remove it: `windlass generate --top-p`"),
        ({"pretraining_tp": 2}, "pretraining_tp: remove it"),
        ({"use_cache": None}, "use_cache: remove it"),
    ],
)
def test_a_field_without_effect_is_refused_in_a_recipe_and_not_in_a_file(tmp_path, fields, change):
    said = refusal({**LLAMA, **fields})
    assert f"change: {change}" in said and "no effect on training" in said
    config = {"model_type": "llama", "vocab_size": 211, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    assert architecture_of(ModelConfig(**{"from": str(tmp_path)})) == architecture_from_hf(config)
    assert f"change: {change}" in refusal({"from": str(tmp_path), **fields})


def test_several_fields_without_effect_are_answered_at_once():
    said = refusal({"preset": "gpt2-124m", "n_ctx": 64, "use_cache": False, "top_k": 3}, 50257)
    assert "model: n_ctx: 64; model: use_cache: false; model: top_k: 3" in said
    assert "n_ctx: set model.n_positions; use_cache: remove it: " in said and said.endswith("top_k: remove it")


def test_half_a_window_is_refused_in_a_recipe_and_not_in_a_file(tmp_path):
    half = {"use_sliding_window": True, "sliding_window": None}
    assert "give model.sliding_window in tokens, or remove use_sliding_window" in refusal({**QWEN3, **half})
    assert "model: sliding_window: 7 without use_sliding_window" in refusal({**QWEN3, "sliding_window": 7})
    assert ModelConfig(**QWEN3, use_sliding_window=True, max_window_layers=1).architecture(211).window == 4096
    for fields in (half, {"sliding_window": 7}):
        config = {"model_type": "qwen3", "vocab_size": 211, **QWEN3, **fields}
        del config["family"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert architecture_of(ModelConfig(**{"from": str(tmp_path)})).window is None


@pytest.mark.parametrize(
    ("family", "changes", "kind"),
    [
        ("llama", {"rope_theta": "10000"}, "give rope_theta as a number above 0 or null"),
        ("llama", {"rms_norm_eps": "1e-5"}, "give rms_norm_eps as a number from 0"),
        ("llama", {"num_attention_heads": 6.0}, "give num_attention_heads as a whole number from 1"),
        ("llama", {"tie_word_embeddings": "yes"}, "give tie_word_embeddings as true or false"),
        (
            "llama",
            {"eos_token_id": "</s>"},
            "give eos_token_id as a whole number or a list, each a whole number or null",
        ),
        ("mistral", {"num_key_value_heads": None}, "give num_key_value_heads as a whole number from 1"),
        ("gpt2", {"hidden_size": "48"}, "give n_embd as a whole number from 1"),
        ("qwen3", {"layer_types": "full_attention"}, "each one of full_attention, sliding_attention or null"),
        ("qwen3", {"sliding_window": 0}, "give sliding_window as a whole number from 1 or null"),
    ],
)
def test_a_config_json_has_the_types_that_transformers_asks_for(family, changes, kind):
    assert kind in hf_refusal(family, **changes)


def test_no_vocabulary_at_all_is_named():
    assert "no vocab_size and no tokenizer" in refusal(LLAMA, None)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder: true"),
        ("llama", {"model_type": "jetmoe"}, "model.family: jetmoe"),
        ("llama", {"vocab_size": None}, "no vocab_size"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_a_config_json_that_would_be_another_model_is_refused(family, changes, words):
    assert words in hf_refusal(family, **changes)


@pytest.mark.parametrize("kind", ["AutoConfig", "AutoModel", "AutoModelForCausalLM"])
def test_a_model_with_code_of_its_own_is_refused_and_a_tokenizers_code_is_not_the_models(kind):
    words = hf_refusal("llama", auto_map={kind: "modeling_own.Own", "AutoTokenizer": "own.Tokenizer"})
    assert f"auto_map: the model brings code of its own ({kind})" in words and "never run here" in words
    config = {"model_type": "llama", "vocab_size": 211, **SIZES}
    assert architecture_from_hf({**config, "auto_map": {"AutoTokenizer": "own.T"}}) == architecture_from_hf(config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"preset": "gpt2-124m", "revision": "main"}, "model.revision: main with model.from: None"),
        ({"from": "./here", "commit": "0" * 40}, "only a name of the hub (org/name) has revisions"),
        ({"from": "org/name", "commit": "abc"}, "a commit is named by all 40 hexadecimal digits"),
        ({"from": "org/name", "commit": "0" * 40, "revision": "1" * 40}, "remove one of the two"),
    ],
)
def test_a_revision_belongs_to_a_hub_name(fields, words):
    assert words in refusal(fields)


def test_a_pinned_commit_is_read_although_its_branch_has_moved(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    pinned, newer = "1" * 40, "2" * 40
    for commit, layers in ((pinned, 3), (newer, 4)):
        snapshot = tmp_path / "models--org--name" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        config = {"model_type": "llama", "vocab_size": 211, **SIZES, "num_hidden_layers": layers}
        (snapshot / "config.json").write_text(json.dumps(config))
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    for branch in ("main", "v1"):
        (refs / branch).write_text(newer)
    for revision in ({}, {"revision": "v1"}):
        config = ModelConfig(**{"from": "org/name", **revision, "commit": pinned})
        assert model_directory(config).name == pinned and architecture_of(config).num_layers == 3
        assert model_directory(ModelConfig(**{"from": "org/name", **revision})).name == newer


def test_a_config_json_without_its_family_is_named():
    with pytest.raises(UserError, match="no model_type"):
        architecture_from_hf({"vocab_size": 3})


def test_directories_that_are_none_or_damaged_are_named(tmp_path):
    assert "this is neither a directory nor a name of the hub" in refusal({"from": str(tmp_path / "none")})
    (tmp_path / "near").mkdir()
    assert f"did you mean `{tmp_path}/near`? " in refusal({"from": str(tmp_path / "nearr")})
    assert "neither a directory here nor in the cache of the hub" in refusal({"from": "org/never-fetched"})
    assert "has no config.json" in refusal({"from": str(tmp_path)})
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert "config.json is valid JSON" in refusal({"from": str(tmp_path)})
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "config.json is valid JSON" in refusal({"from": str(tmp_path)})
    (tmp_path / "config.json").write_text("[]")
    assert "holds one object" in refusal({"from": str(tmp_path)})


@pytest.mark.parametrize("given", [True, "org/name", None])
def test_code_of_a_model_is_never_run_whatever_is_trusted(given):
    with pytest.raises(UserError, match="code that a model brings is never run"):
        ModelConfig(**{"from": "org/name", "trust_remote_code": given})


def test_wrong_values_are_listed_beside_unknown_fields():
    with pytest.raises(UserError) as caught:
        ModelConfig(**{**LLAMA, "hidden_size": 0, "num_hidden_layers": -3, "nope": 1, "nope2": 2})
    words = str(caught.value)
    assert all(f"model: {name}" in words for name in ("nope", "nope2", "hidden_size", "num_hidden_layers")), words
