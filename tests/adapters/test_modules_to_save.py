"""What PEFT keeps whole beside factors: each reads the other's files, and what one of the two cannot hold is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import cases
from tests.adapters.test_peft_format import EXACT, ours, theirs
from windlass.adapters.config import AdapterConfig
from windlass.adapters.peft_config import completed
from windlass.adapters.peft_format import check_files, load_adapter, save_adapter
from windlass.errors import UserError
from windlass.model.lora.adapter import adapter_of, is_factor
from windlass.proof.reference import compute_in_float64

peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that PEFT still uses of transformers


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bases")
    return {family: cases.write_model(directory / family, family, True) for family in ("qwen3", "gpt2")}


WHOLE = {
    "untied": ("qwen3", False, ["q_proj"], ["embed_tokens", "lm_head", "model.norm"], {}),
    "tied": ("qwen3", True, ["q_proj"], ["embed_tokens"], {"ensure_weight_tying": True}),
    "gpt2": ("gpt2", True, ["c_proj"], ["ln_f", "ln_1", "c_attn", "c_fc"], {}),
}


def peft_with_modules_to_save(directory, case):
    """-> base, PEFT's model whose trained parameters are drawn; its files are in directory / "adapter"."""
    from transformers import AutoModelForCausalLM

    family, tied, targets, modules, more = WHOLE[case]
    base = cases.write_model(directory / "base", family, tied)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    compute_in_float64(plain)
    given = dict(r=5, lora_alpha=9, target_modules=targets, modules_to_save=modules, fan_in_fan_out=family == "gpt2")
    other = peft.get_peft_model(plain, peft.LoraConfig(**given, **more)).eval()
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    other.save_pretrained(directory / "adapter")
    return base, other


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, of ties
@pytest.mark.parametrize("case", WHOLE)
def test_modules_that_peft_saves_are_read_and_written_again(tmp_path, case):
    base, other = peft_with_modules_to_save(tmp_path, case)
    config = completed(AdapterConfig(kind="lora", **{"from": str(tmp_path / "adapter")}))
    assert config.also_train == [f"*{module}.*" for module in other.peft_config["default"].modules_to_save]
    settings = {name: getattr(config, name) for name in ("rank", "alpha", "targets", "also_train")}
    _, architecture, adapter, model = ours(base, **settings)
    check_files(tmp_path / "adapter", architecture, adapter)
    load_adapter(tmp_path / "adapter", architecture, dict(model.named_parameters()))
    ids = torch.arange(12).view(2, 6)
    expected = other.double()(input_ids=ids).logits
    assert (expected - model(ids)).abs().max() <= EXACT
    trained = {n: p for n, p in model.named_parameters() if is_factor(n) or n in adapter.also_trained}
    save_adapter(tmp_path / "again", config, architecture, adapter, trained, str(base))
    check_files(tmp_path / "again", architecture, adapter)
    assert (theirs(base, tmp_path / "again").eval()(input_ids=ids).logits - expected).abs().max() <= EXACT


def test_the_shortest_names_that_mean_these_modules(bases, tmp_path):
    for also_train, expected in (
        (["*norm*"], ["input_layernorm", "k_norm", "norm", "post_attention_layernorm", "q_norm"]),
        (["model.norm.weight"], ["model.norm"]),  # others end with norm
        (["*.1.*layernorm*"], ["model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm"]),
        (["lm_head.weight"], ["embed_tokens", "lm_head"]),
    ):
        config, architecture, adapter, model = ours(bases["qwen3"], also_train=also_train)
        trained = {n: p for n, p in model.named_parameters() if is_factor(n) or n in adapter.also_trained}
        save_adapter(tmp_path, config, architecture, adapter, trained, "base")
        given = json.loads((tmp_path / "adapter_config.json").read_text())
        assert given["modules_to_save"] == expected
        assert given["ensure_weight_tying"] == ("lm_head" in expected)
        read = completed(AdapterConfig(kind="lora", **{"from": str(tmp_path)}))
        assert adapter_of(read, architecture).also_trained == adapter.also_trained


def test_what_peft_cannot_hold_is_merged(bases, tmp_path):
    config, architecture, adapter, model = ours(bases["gpt2"], also_train=["*q_proj*"], targets=["c_fc"])
    trained = {n: p for n, p in model.named_parameters() if is_factor(n) or n in adapter.also_trained}
    with pytest.raises(UserError, match=r"a part of transformer\.h\.0\.attn\.c_attn\.weight"):
        save_adapter(tmp_path, config, architecture, adapter, trained, "base")


@pytest.mark.parametrize("change", ["apart", "missing", "shape", "left over"])
def test_modules_to_save_that_do_not_fit(bases, tmp_path, change):
    config, architecture, adapter, model = ours(bases["qwen3"], also_train=["*embed_tokens*"])
    trained = {n: p for n, p in model.named_parameters() if is_factor(n) or n in adapter.also_trained}
    save_adapter(tmp_path, config, architecture, adapter, trained, "base")
    file, name = tmp_path / "adapter_model.safetensors", "base_model.model.model.embed_tokens.weight"
    held = load_file(file)
    if change == "apart":
        held["base_model.model.lm_head.weight"] = held[name] + 1
    elif change == "missing":
        del held[name]
    elif change == "shape":
        held[name] = held[name][1:].clone()
    else:
        held["base_model.model.model.norm.weight"] = torch.ones(40)
    save_file(held, file)
    words = {
        "apart": "are one tensor in this model, and two in the files",
        "missing": "has no model.embed_tokens.weight",
    }
    words |= {"shape": "is (156, 40) there and (157, 40)", "left over": "norm.weight, which this recipe does not train"}
    with pytest.raises(UserError) as caught:
        check_files(tmp_path, architecture, adapter)
    assert words[change] in str(caught.value)
