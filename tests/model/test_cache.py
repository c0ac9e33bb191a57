"""The KV cache: the same logits in pieces, and refusals with their numbers."""

import pytest
import torch

from tests.model.tiny import FAMILIES, batch, hf_model, our_model
from windlass.errors import UserError
from windlass.model.cache import KVCache


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_filled_in_pieces_gives_the_same_logits(family):
    decoder = our_model(hf_model(family, True, torch.float64))
    ids = batch(decoder.arch.vocab_size, 2, 16)[0]
    with torch.no_grad():
        cache = KVCache(decoder.arch, 2, 16, dtype=torch.float64)
        pieces = [decoder(piece, cache=cache) for piece in ids.split([5, 1, 7, 3], dim=1)]
        assert cache.length == 16
        assert (torch.cat(pieces, 1) - decoder(ids)).abs().max() <= 1e-12


def test_a_cache_is_refused_where_gradients_are_recorded():
    decoder = our_model(hf_model("llama", True))
    cache = KVCache(decoder.arch, 2, 9, dtype=torch.float32)
    with pytest.raises(UserError, match="KV cache in a forward that records gradients"):
        decoder(batch(211, 2, 9)[0], cache=cache)


def test_a_full_cache_is_named_with_its_numbers():
    decoder = our_model(hf_model("llama", True))
    cache = KVCache(decoder.arch, 2, 9, dtype=torch.float32)
    with torch.no_grad():
        decoder(batch(211, 2, 7)[0], cache=cache)
        with pytest.raises(UserError, match=r"7 positions in the KV cache and 3 new ones\n.*made for 9"):
            decoder(batch(211, 2, 3)[0], cache=cache)


def test_a_part_of_the_model_keeps_its_own_layers_only():
    arch = our_model(hf_model("llama", True)).arch
    cache = KVCache(arch, 2, 9, dtype=torch.float32, layers=range(1, 3))
    keys_BGSK, _ = cache["2"].append(torch.ones(2, 2, 4, 8), torch.ones(2, 2, 4, 8), 0)
    assert keys_BGSK.shape == (2, 2, 4, 8)
    with pytest.raises(KeyError):
        cache["0"]
