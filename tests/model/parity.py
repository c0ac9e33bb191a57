"""The same weights in transformers and in our decoder: logits and gradients side by side."""

import contextlib
from unittest import mock

import torch
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.model.tiny import batch, canonical, our_model, unpadded


def summed_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def tensor_maxima(gradients, family):
    """Largest gradient per Hugging Face tensor: GPT-2's query, key and value are one (a key bias has gradient 0)."""
    largest = {}
    names = {name: name.replace("k_proj", "q_proj").replace("v_proj", "q_proj") for name in gradients}
    names = names if family == "gpt2" else {name: name for name in gradients}
    for name, gradient in gradients.items():
        largest[names[name]] = max(largest.get(names[name], 0.0), gradient.abs().max().item())
    return {name: largest[group] for name, group in names.items()}


def check_parity(model, logit_tolerance, gradient_tolerance, floor=0.0):
    """The decoder, after its logits and every gradient were equal; a gradient is measured by the largest of its tensor,
    or by `floor` where that is smaller: a window of one key leaves query and key without any."""
    decoder = our_model(model)
    ids, targets = batch(decoder.arch.vocab_size)
    theirs, ours = model(input_ids=ids, use_cache=False).logits, decoder(ids)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= logit_tolerance
    (summed_loss(ours, targets) / 29).backward()
    (summed_loss(theirs, targets) / 29).backward()
    check_gradients(decoder, model, gradient_tolerance, floor)
    return decoder


def check_gradients(decoder, model, tolerance, floor=0.0):
    """Every gradient that backward has left in both: see check_parity."""
    gradients = canonical({name: parameter.grad for name, parameter in model.named_parameters()}, decoder.arch)
    largest = tensor_maxima(gradients, decoder.arch.family)
    assert gradients.keys() == dict(decoder.named_parameters()).keys()
    for name, parameter in decoder.named_parameters():
        grad = unpadded(name, parameter.grad, decoder.arch)
        scale = max(largest[name], floor)
        assert scale > 0, name
        worst = ((grad - gradients[name]).abs().max() / scale).item()
        assert worst <= tolerance, (name, worst)


@contextlib.contextmanager
def without_detours_through_fp32(model):
    """transformers casts to fp32 inside RMSNorm, rotary positions and routers; here they stay in fp64, by its own formulas."""

    def norm(self, hidden):
        return functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.variance_epsilon)

    def rotary(self, hidden, position_ids):
        with mock.patch.multiple(torch, float=torch.float64, float32=torch.float64):
            kind = self.rope_type
            start = self.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
            frequencies, magnitude = start(self.config)
        assert frequencies.dtype == torch.float64
        angles = position_ids[..., None].double() * frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * magnitude, angles.sin() * magnitude

    def route(self, hidden):
        logits = functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        values, chosen = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, values / values.sum(-1, keepdim=True) if self.norm_topk_prob else values, chosen

    with contextlib.ExitStack() as patches:
        for kind in {type(module) for module in model.modules()}:
            if kind.__name__.endswith("RMSNorm"):
                patches.enter_context(mock.patch.object(kind, "forward", norm))
            elif kind.__name__.endswith("RotaryEmbedding"):
                patches.enter_context(mock.patch.object(kind, "forward", rotary))
            elif kind.__name__.endswith("TopKRouter"):
                patches.enter_context(mock.patch.object(kind, "forward", route))
        yield
