"""A head that is beside a tied model's embedding: a copy is taken, anything else is refused. (Files: test_hf.)"""

from unittest import mock

import pytest
from safetensors.torch import load_file, save_file

from tests.model.tiny import hf_model, our_model
from windlass.errors import UserError
from windlass.model import weight_files
from windlass.model.config import architecture_from_hf
from windlass.model.hf import check_weights, load_weights


def nudged(embedding):
    head = embedding.clone()
    head[-1, -1] += 1e-6
    return head


HEADS = {
    "a copy": (lambda embedding: embedding.clone(), None),
    "another": (lambda embedding: embedding.roll(1, 0), "differs from the embedding"),
    "one number in a late row": (nudged, "differs from the embedding"),
    "another shape": (
        lambda embedding: embedding[:7, :3].clone(),
        r"has the shape \(7, 3\), the embedding \(211, 48\)",
    ),
}


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("case", HEADS)
def test_a_stored_head_of_a_tied_model_is_a_copy_or_refused(tmp_path, family, case):
    make, said = HEADS[case]
    model = hf_model(family, True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": make(embedding).contiguous()}, file, metadata={"format": "pt"})
    arch = architecture_from_hf(model.config.to_dict())
    decoder = our_model(model)
    with mock.patch.object(weight_files, "ROWS_AT_ONCE", 50):
        for read in (
            lambda: check_weights(tmp_path, arch),
            lambda: load_weights(tmp_path, arch, dict(decoder.named_parameters())),
        ):
            if said is None:
                read()
                continue
            with pytest.raises(UserError, match=said) as caught:
                read()
            assert "model.tie_word_embeddings=false" in caught.value.change
