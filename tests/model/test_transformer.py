"""The decoder against transformers, and what it must refuse."""

import pytest
import torch

from tests.model.tiny import CASES, FAMILIES, SCALINGS, batch, hf_model, our_model, unpadded
from tests.model.whole.parity import check_parity, summed_loss, without_detours_through_fp32
from windlass.errors import UserError
from windlass.model.architecture import parameter_shapes
from windlass.model.cache import KVCache
from windlass.model.init import initialise
from windlass.model.transformer import Decoder

VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 14, "rope_theta": 77.0}),
    ("llama", {"num_key_value_heads": 6, "hidden_act": "gelu"}),
    ("qwen2", {"head_dim": 14, "num_key_value_heads": 2}),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 17, "head_dim": 14}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True, "head_dim": 14, "no_rope_layers": [0, 1, 1, 0]}),
    ("smollm3", {"no_rope_layer_interval": 1}),
    ("gpt2", {"activation_function": "relu", "n_inner": None}),
    ("gpt2", {"activation_function": "gelu", "layer_norm_epsilon": 1e-3}),
    ("gpt2", {"activation_function": "silu"}),
    ("gpt2", {"activation_function": "gelu_pytorch_tanh"}),
]
WINDOW = {"use_sliding_window": True}
WINDOWED = [
    ("mistral", {"sliding_window": 2}),
    ("mistral", {"sliding_window": 16}),
    ("qwen2", {**WINDOW, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen2", {**WINDOW, "sliding_window": 5, "max_window_layers": -1}),
    ("qwen3", {**WINDOW, "sliding_window": 9, "layer_types": ["sliding_attention"] * 3}),
    ("smollm3", {**WINDOW, "sliding_window": 4}),
]


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_logits_and_gradients_equal_transformers(family, tied):
    check_parity(hf_model(family, tied))


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_variants_equal_transformers(family, changes):
    check_parity(hf_model(family, False, **changes))


@pytest.mark.parametrize(("family", "changes"), WINDOWED)
def test_sliding_windows_equal_transformers(family, changes):
    check_parity(hf_model(family, False, **changes))
    model = hf_model(family, True, torch.float64, **changes)
    with without_detours_through_fp32(model):
        decoder = check_parity(model, 1e-12, 1e-12)
    assert decoder.arch.window == changes["sliding_window"] and decoder.arch.window_layers


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_scaled_ropes_equal_transformers(family, scaling):
    model = hf_model(family, False, rope_parameters={**SCALINGS[scaling], "rope_theta": 500.0})
    decoder = check_parity(model)
    assert decoder.arch.rope_scaling is not None and decoder.arch.rope_theta == 500.0


def test_fp64_equals_transformers_to_fp64_where_transformers_stays_in_fp64():
    check_parity(hf_model("gpt2", True, torch.float64), 1e-12, 1e-12)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_fp64_equals_transformers_without_its_detours(family):
    model = hf_model(family, True, torch.float64)
    with without_detours_through_fp32(model):
        check_parity(model, 1e-12, 1e-12)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_ropes_are_exact_in_fp64(scaling):
    parameters = {**SCALINGS[scaling], "rope_theta": 500.0}
    model = hf_model("qwen3", True, torch.float64, rope_parameters=parameters)
    with without_detours_through_fp32(model):
        check_parity(model, 1e-12, 1e-12)


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_loss_of_the_head_equals_dense_cross_entropy(family, tied):
    """The head's chunks against one dense softmax over the true vocabulary, in fp64: value and every gradient."""
    decoder = our_model(hf_model(family, tied, torch.float64))
    ids, targets = batch(decoder.arch.vocab_size)
    dense = summed_loss(decoder(ids), targets)
    (dense / 29).backward()
    expected = {name: parameter.grad.clone() for name, parameter in decoder.named_parameters()}
    decoder.zero_grad()
    decoder.lm_head.chunk_tokens = 7  # 51 tokens: an uneven last chunk
    loss = decoder(ids, targets)
    assert loss.shape == () and loss.dtype == torch.float64
    assert abs(loss - dense) <= 1e-12 * dense
    (loss / 29).backward()
    for name, parameter in decoder.named_parameters():
        assert (parameter.grad - expected[name]).abs().max() <= 1e-13, name
        assert parameter.grad[len(unpadded(name, parameter, decoder.arch)) :].count_nonzero() == 0, name


GREEDY = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"rope_parameters": {**SCALINGS["llama3"], "rope_theta": 500.0}}),
    ("qwen2", {"rope_parameters": {**SCALINGS["yarn"], "rope_theta": 500.0}, **WINDOW, "sliding_window": 5}),
    ("smollm3", {**WINDOW, "sliding_window": 4}),
]


@pytest.mark.parametrize(("family", "changes"), GREEDY)
def test_greedy_text_equals_transformers_with_and_without_a_cache(family, changes):
    model = hf_model(family, False, **changes)
    decoder = our_model(model)
    prompt = batch(decoder.arch.vocab_size, 2, 9)[0]
    new = 20
    with torch.no_grad():
        mask = torch.ones_like(prompt)  # or generate would hide the padding token in the prompt
        theirs = model.generate(prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        plain = prompt
        for _ in range(new):
            logits = decoder(plain)[:, -1]
            logits[:, model.config.eos_token_id] = -torch.inf  # as min_new_tokens does
            plain = torch.cat((plain, logits.argmax(-1, keepdim=True)), 1)
        cache = KVCache(decoder.arch, 2, prompt.shape[1] + new, dtype=torch.float32)
        cached, fresh = prompt, prompt
        for _ in range(new):
            logits = decoder(fresh, cache=cache)[:, -1]
            logits[:, model.config.eos_token_id] = -torch.inf
            fresh = logits.argmax(-1, keepdim=True)
            cached = torch.cat((cached, fresh), 1)
    assert torch.equal(plain, theirs)
    assert torch.equal(cached, theirs)


def test_more_tokens_than_learned_positions_are_refused_with_the_numbers():
    decoder = our_model(hf_model("gpt2", True))
    with pytest.raises(UserError, match=r"sequence of 41 tokens\n.*40 learned positions"):
        decoder(batch(211, 1, 41)[0])


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_parts_joined_equal_the_whole(family, tied):
    whole = our_model(hf_model(family, tied))
    ids, targets = batch(whole.arch.vocab_size)
    parts = [
        Decoder(whole.arch, range(1), first=True, last=False),
        Decoder(whole.arch, range(1, 1), first=False, last=False),
        Decoder(whole.arch, range(1, 3), first=False, last=True),
    ]
    state = whole.state_dict()
    names = set()
    for part in parts:
        part.load_state_dict({name: state[name] for name in part.state_dict()})
        names |= set(part.state_dict())
    assert names == set(state)
    assert [len(part.blocks) for part in parts] == [1, 0, 2]
    hidden = parts[1](parts[0](ids))
    assert torch.equal(parts[2](hidden, targets), whole(ids, targets))


def test_an_untied_copy_after_to_empty_is_noticed():
    with torch.device("meta"):
        decoder = Decoder(our_model(hf_model("llama", True)).arch)
    decoder.to_empty(device="cpu")
    initialise(decoder.named_parameters(), decoder.arch, 1)
    with pytest.raises(AssertionError, match="tie"):
        decoder(batch(211)[0])
    decoder.tie()
    assert len(list(decoder.named_parameters())) == len(parameter_shapes(decoder.arch))
    decoder(batch(211)[0])


def test_no_generator_is_touched_by_a_step():
    decoder = our_model(hf_model("gpt2", True, resid_pdrop=0.1, attn_pdrop=0.1)).train()
    before = torch.get_rng_state()
    decoder(*batch(211), keys=torch.arange(3)).backward()
    assert torch.equal(before, torch.get_rng_state())
