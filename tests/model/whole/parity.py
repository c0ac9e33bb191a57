"""The same weights in transformers and in our decoder: logits and gradients side by side.

In fp32 a gradient may be off by 1e-6 of its tensor's largest, or by ROUNDINGS times what transformers' own fp32 gradient is off
from its fp64 one, on the machine that runs the test: with some CPUs' instructions that alone is 1e-6 to 7e-6 in two thirds of
these models, and two computations in fp32 are no nearer to each other than to fp64. The largest quotient seen is 2.6, in 132
models on three instruction sets; a mistake is 1e-4 and more. In fp64 the same models are held to 1e-12. transformers rounds less
in its eager attention than in sdpa, whose kernel ours is: 1.4e-6 and 4.9e-6 of StarCoder 2's third layer, ours 9.4e-6. Where
eager attention is compared, the larger of both counts.
"""

import contextlib
import copy

import torch
from torch.nn import functional

from tests.model.tiny import batch, canonical, our_model, unpadded
from windlass.proof.reference import compute_in_float64

ROUNDINGS = 4.0


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


def check_parity(model, logit_tolerance=1e-5, gradient_tolerance=1e-6, floor=0.0):
    """The decoder, after its logits and every gradient were equal; a gradient is measured by the largest of its tensor,
    or by `floor` where that is smaller: a window of one key leaves query and key without any."""
    decoder = our_model(model)
    ids, targets = batch(decoder.arch.vocab_size)

    def theirs(model):
        return model(input_ids=ids, use_cache=False).logits

    ours, expected = decoder(ids), theirs(model)
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= logit_tolerance
    (summed_loss(ours, targets) / 29).backward()
    check_gradients(decoder, model, lambda model: summed_loss(theirs(model), targets) / 29, gradient_tolerance, floor)
    return decoder


def check_gradients(decoder, model, loss_of, tolerance=1e-6, floor=0.0, kernels=()):
    """Every gradient that backward has left in the decoder, against those of `loss_of(model)`. `kernels`: further ones of
    transformers' attention whose rounding counts."""
    gradients = gradients_of(model, loss_of, decoder.arch)
    largest = {name: max(most, floor) for name, most in tensor_maxima(gradients, decoder.arch.family).items()}
    assert gradients.keys() == dict(decoder.named_parameters()).keys()
    ours = {name: unpadded(name, parameter.grad, decoder.arch) for name, parameter in decoder.named_parameters()}
    off = {name: apart(ours[name], gradients[name], largest[name]) for name in ours}
    wrong = [name for name, worst in off.items() if not worst <= tolerance]
    if wrong and model.dtype == torch.float32:
        exact = exact_gradients(model, loss_of, decoder.arch)
        rounded = [gradients]
        for kernel in kernels:
            model.set_attn_implementation(kernel)
            rounded.append(gradients_of(model, loss_of, decoder.arch))
        roundings = {name: max(apart(one[name], exact[name], largest[name]) for one in rounded) for name in wrong}
        wrong = [name for name in wrong if not off[name] <= ROUNDINGS * roundings[name]]
    assert not wrong, {name: off[name] for name in wrong}


def apart(one, other, scale):
    assert scale > 0
    return ((one - other).abs().max() / scale).item()


def gradients_of(model, loss_of, arch):
    """Of transformers' model, under our names."""
    model.zero_grad()
    loss_of(model).backward()
    return canonical({name: parameter.grad for name, parameter in model.named_parameters()}, arch)


def exact_gradients(model, loss_of, arch):
    """The same in fp64."""
    exact = copy.deepcopy(model).double()
    with without_detours_through_fp32(exact):
        return gradients_of(exact, loss_of, arch)


@contextlib.contextmanager
def without_detours_through_fp32(model):
    """transformers casts to fp32 inside norms, rotary positions, routers and softmaxes; here its own code stays in fp64."""
    compute_in_float64(model)
    yield
    del model.forward
