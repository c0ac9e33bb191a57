"""The techniques in their one order: a compiled block changes nothing, names stay, no rank builds what it does not keep."""

import pytest

from tests.parallel.tiny import MODEL, assert_equal, gradients, make_program
from windlass.errors import UserError
from windlass.parallel import build as building
from windlass.parallel.build import check_compiler
from windlass.parallel.config import ParallelConfig


def compiled_gradients(recompute):
    return gradients(2, 3, 1, 2, "fp32", compile=True, recompute=recompute)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_give_the_same_gradients_and_names(ranks, recompute):
    plain = ranks.run(2, gradients, 2, 3, 1, 2, "fp32")[0]
    compiled = ranks.run(2, compiled_gradients, recompute, timeout_s=300)[0]
    assert_equal(plain, compiled, 2e-5)


def names_and_bytes(world, zero, replicate, shard, tied):
    """Names, logical shapes, and the bytes of the parameters that this rank holds."""
    program = make_program(world, zero, replicate, shard, model={**MODEL, "tie_word_embeddings": tied})
    records = program.records()
    local = [getattr(record.tensor, "_local_tensor", record.tensor) for record in records]
    return [(record.name, tuple(record.logical_shape)) for record in records], sum(t.numel() for t in local)


@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_one_process_and_shards_a_share(ranks, tied):
    (names, whole) = ranks.run(1, names_and_bytes, 1, 3, 1, 1, tied)[0]
    assert ("lm_head.weight" in dict(names)) == (not tied)
    assert dict(names)["model.embed_tokens.weight"] == (256, 24), "padded to a multiple of 128"
    for layout in ((2, 0, 2, 1), (2, 3, 1, 2), (4, 3, 2, 2)):
        results = ranks.run(layout[0], names_and_bytes, *layout, tied)
        assert all(result[0] == names for result in results)
        share = sum(result[1] for result in results) / layout[0]
        assert share == whole / layout[3], "every replica holds the model once"


def test_compile_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"apt install g\+\+"):
        check_compiler(ParallelConfig(compile=True), "cpu")
    check_compiler(ParallelConfig(compile=True), "cuda")
    check_compiler(ParallelConfig(), "cpu")
