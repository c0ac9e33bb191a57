"""PEFT itself: the same loss and gradients, and each reads the other's files."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests import cases
from tests.model.test_dropout import OurMask
from windlass.adapters.config import AdapterConfig
from windlass.adapters.peft_config import completed
from windlass.adapters.peft_format import check_files, load_adapter, save_adapter
from windlass.errors import UserError
from windlass.model.config import ModelConfig
from windlass.model.dropout import layer_keys
from windlass.model.hf import load_weights
from windlass.model.lora.adapter import adapter_of, is_factor
from windlass.model.open_config import architecture_of
from windlass.model.transformer import Decoder
from windlass.proof.reference import compute_in_float64

peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that PEFT still uses of transformers

FAMILIES = ("qwen3", "llama", "gpt2")
EXACT = 1e-12
SETTINGS = {"rank": 3, "alpha": 7.0}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bases")
    return {family: cases.write_model(directory / family, family, True) for family in FAMILIES}


def ours(base, **settings):
    """-> config, architecture, adapter, our decoder with drawn factors, in fp64."""
    config = AdapterConfig(kind="lora", **(SETTINGS | settings))
    architecture = architecture_of(ModelConfig.model_validate({"from": str(base)}))
    adapter = adapter_of(config, architecture)
    model = Decoder(architecture, adapter=adapter).double()
    named = dict(model.named_parameters())
    load_weights(base, architecture, {name: tensor for name, tensor in named.items() if not is_factor(name)})
    with torch.no_grad():
        for name, tensor in named.items():
            if is_factor(name):
                tensor.copy_(cases.factor(name, tuple(tensor.shape)))
    return config, architecture, adapter, model.eval()


def theirs(base, adapter):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    compute_in_float64(plain)
    return peft.PeftModel.from_pretrained(plain, adapter, is_trainable=True, autocast_adapter_dtype=False)


def factors_of(model):
    return {name: tensor for name, tensor in model.named_parameters() if is_factor(name)}


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_of_some_layers_only(bases, tmp_path, family):
    """PEFT adds none to the other layers, which its warning would say; the files say the same of a new run."""
    config, architecture, adapter, model = ours(bases[family], targets=["layers.1.self_attn.v_proj", "down_proj"])
    save_adapter(tmp_path, config, architecture, adapter, factors_of(model), str(bases[family]))
    theirs(bases[family], tmp_path)
    found = AdapterConfig.model_validate({"kind": "lora", "from": str(tmp_path)})
    again = adapter_of(completed(found), architecture)
    assert again is not None
    beside = (
        {f"model.layers.1.self_attn.{name}_proj" for name in "qkv"} if family == "gpt2" else set()
    )  # one file's tensor
    assert again.targets == adapter.targets | beside
    check_files(tmp_path, architecture, again)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{}, {"rank_stabilized": True}], ids=["plain", "rank stabilized"])
def test_peft_reads_ours_and_computes_the_same(bases, tmp_path, family, settings):
    config, architecture, adapter, model = ours(bases[family], **settings)
    save_adapter(tmp_path, config, architecture, adapter, factors_of(model), str(bases[family]))
    other = theirs(bases[family], tmp_path).eval()
    ids = torch.randint(0, cases.VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(2))
    ids_BT, targets_BT = ids[:, :-1], ids[:, 1:]
    assert (other(input_ids=ids_BT).logits - model(ids_BT)).abs().max() <= EXACT
    loss = model(ids_BT, targets_BT)
    logits_NV = other(input_ids=ids_BT).logits.flatten(0, 1)
    expected = functional.cross_entropy(logits_NV, targets_BT.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=EXACT)
    loss.backward()
    expected.backward()
    grads = {name.replace(".default", ""): p.grad for name, p in other.named_parameters() if p.grad is not None}
    found = fused(factors_of(model)) if family == "gpt2" else {n: p.grad for n, p in factors_of(model).items()}
    assert len(found) == len(grads) == (2 * 4 * 3 if family == "gpt2" else 2 * 7 * 3)
    for name, grad in found.items():
        expected = grads[f"base_model.model.{name}"]
        if name.endswith("c_attn.lora_B.weight"):  # PEFT trains what is beside the three blocks too
            expected = torch.block_diag(*(torch.ones(36, 3, dtype=torch.bool),) * 3) * expected
        assert (expected - grad).abs().max() <= EXACT * expected.abs().max(), name


def fused(factors):
    """The gradients of GPT-2's factors by the names of its files, where query, key and value are one matrix with one pair."""
    found = {}
    for layer in range(3):
        ours, theirs_ = f"model.layers.{layer}.", f"transformer.h.{layer}."
        for name, other in (
            ("self_attn.o_proj", "attn.c_proj"),
            ("mlp.up_proj", "mlp.c_fc"),
            ("mlp.down_proj", "mlp.c_proj"),
        ):
            found |= {f"{theirs_}{other}.lora_{x}.weight": factors[f"{ours}{name}.lora_{x}.weight"].grad for x in "AB"}
        a, b = ([factors[f"{ours}self_attn.{one}_proj.lora_{x}.weight"].grad for one in "qkv"] for x in "AB")
        found |= {
            f"{theirs_}attn.c_attn.lora_A.weight": torch.cat(a),
            f"{theirs_}attn.c_attn.lora_B.weight": torch.block_diag(*b),
        }
    return found


SITES = {"q_proj": 3, "k_proj": 4, "v_proj": 5, "o_proj": 6, "gate_proj": 7, "up_proj": 8, "down_proj": 9}
SITES |= {"attn.c_attn": 3, "attn.c_proj": 6, "mlp.c_fc": 8, "mlp.c_proj": 9}


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_peft_drops_what_we_drop(bases, tmp_path, family):
    """With our masks in PEFT's places: one for each of its modules, and so one for GPT-2's query, key and value."""
    config, architecture, adapter, model = ours(bases[family], dropout=0.3)
    save_adapter(tmp_path, config, architecture, adapter, factors_of(model), str(bases[family]))
    assert peft.LoraConfig.from_pretrained(tmp_path).lora_dropout == 0.3
    other, keys_B = theirs(bases[family], tmp_path).train(), torch.tensor([5, -7])
    keys = layer_keys(keys_B, torch.arange(architecture.num_layers))
    places = [(name, module) for name, module in other.named_modules() if hasattr(module, "lora_dropout")]
    assert len(places) == len({name: "" for name in SITES if ("c_" in name) == (family == "gpt2")}) * 3
    for name, module in places:
        (site,) = (site for last, site in SITES.items() if name.endswith(f".{last}"))
        layer = int(next(part for part in name.split(".") if part.isdigit()))
        module.lora_dropout["default"] = OurMask(keys[layer], site, 0.3)
    ids_BT = torch.randint(0, cases.VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(2))
    clean = model(ids_BT)
    found, expected = model.train()(ids_BT, keys=keys_B), other(input_ids=ids_BT).logits
    assert (found - expected).abs().max() <= EXACT and (found - clean).abs().max() >= 1e-2
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    grads = {name.replace(".default", ""): p.grad for name, p in other.named_parameters() if p.grad is not None}
    if family == "qwen3":
        for name, tensor in factors_of(model).items():
            theirs_ = grads[f"base_model.model.{name}"]
            assert (theirs_ - tensor.grad).abs().max() <= EXACT * theirs_.abs().max(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_read_back_to_the_bit(bases, tmp_path, family):
    config, architecture, adapter, model = ours(bases[family])
    save_adapter(tmp_path, config, architecture, adapter, factors_of(model), "base")
    check_files(tmp_path, architecture, adapter)
    held = {name: torch.empty_like(tensor, dtype=torch.float32) for name, tensor in factors_of(model).items()}
    load_adapter(tmp_path, architecture, held)
    for name, tensor in factors_of(model).items():
        assert torch.equal(held[name], tensor.detach().float()), name
    read = completed(AdapterConfig(kind="lora", **{"from": str(tmp_path)}))
    assert (read.rank, read.alpha, read.scale) == (config.rank, config.alpha, config.scale)
    assert adapter_of(read, architecture).targets == adapter.targets


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_writes_and_we_compute_the_same(bases, tmp_path, family):
    from transformers import AutoModelForCausalLM

    targets = ["c_attn", "c_proj", "c_fc"] if family == "gpt2" else ["q_proj", "o_proj", "up_proj"]
    torch.manual_seed(4)
    given = peft.LoraConfig(
        r=5, lora_alpha=9, target_modules=targets, init_lora_weights=False, fan_in_fan_out=family == "gpt2"
    )
    base = AutoModelForCausalLM.from_pretrained(bases[family], dtype=torch.float32)
    compute_in_float64(base)
    other = peft.get_peft_model(base, given).eval()
    other.save_pretrained(tmp_path)
    config = completed(AdapterConfig(kind="lora", **{"from": str(tmp_path)}))
    _, architecture, adapter, model = ours(bases[family], rank=config.rank, alpha=config.alpha, targets=config.targets)
    check_files(tmp_path, architecture, adapter)
    load_adapter(tmp_path, architecture, factors_of(model))
    ids = torch.arange(12).view(2, 6)
    assert (other.double()(input_ids=ids).logits - model(ids)).abs().max() <= EXACT


@pytest.mark.parametrize("change", ["missing", "left over", "shape", "damaged"])
def test_files_that_do_not_fit(bases, tmp_path, change):
    config, architecture, adapter, model = ours(bases["llama"])
    save_adapter(tmp_path, config, architecture, adapter, factors_of(model), "base")
    file = tmp_path / "adapter_model.safetensors"
    held = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    if change == "missing":
        del held[name]
    elif change == "left over":
        held[name.replace(".1.", ".7.")] = held[name].clone()
    elif change == "shape":
        held[name] = held[name][:2].clone()
    save_file(held, file)
    if change == "damaged":
        file.write_bytes(file.read_bytes()[:-5])
    words = {"missing": f"it has no {name}", "left over": "which this recipe does not train"}
    words |= {"shape": "is (2, 36) there and (3, 36)", "damaged": "one safetensors file"}
    with pytest.raises(UserError) as caught:
        check_files(tmp_path, architecture, adapter)
    assert words[change] in str(caught.value)
