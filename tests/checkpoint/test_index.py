import copy

import pytest

from tests.checkpoint.single import save_steps
from windlass.checkpoint.index import parse_index, read_index
from windlass.checkpoint.manifest import INDEX
from windlass.checkpoint.sealed_json import seal, unseal
from windlass.checkpoint.verify import Checkpoint
from windlass.errors import BadCheckpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    save_steps(run, 100)
    return Checkpoint.open(run / "checkpoints/step-00000100")


def test_the_index_says_where_the_bytes_of_each_tensor_lie(checkpoint):
    tensors = read_index(checkpoint)
    assert {name: (one.dtype, one.shape) for name, one in tensors.items()} == {
        "model.big": ("float32", [1100, 1000]),
        "model.bias": ("bfloat16", [7]),
        "model.empty": ("float32", [0, 3]),
        "optimizer.step": ("float32", []),
        "optimizer.mask": ("bool", [13]),
    }
    spans = sorted((chunk.at, one.num_bytes(chunk)) for one in tensors.values() for chunk in one.chunks)
    end = 64
    for at, length in spans:
        assert at == end
        end += length
    assert end == checkpoint.manifest.files["rank-00000.bin"].size  # the chunks tile the file behind its header


def chunk_of(body, name="model.bias"):
    return body["tensors"][name]["chunks"][0]


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda b: b.update(schema_version=9), "schema_version is 9"),
        (lambda b: b.update(token="0" * 16), "stale: it belongs to the save 0000"),
        (lambda b: b.update(more=1), "more: Extra inputs"),
        (lambda b: b.pop("tensors"), "tensors: Field required"),
        (lambda b: b["tensors"]["model.bias"].update(dtype="object"), "dtype: String should match"),
        (lambda b: b["tensors"]["model.bias"].update(dtype="float32\n"), "dtype: String should match"),
        (lambda b: b["tensors"]["model.bias"].update(dtype="float32"), "shares bytes of"),
        (lambda b: b["tensors"]["model.bias"].update(shape=[-7]), "shape.0: Input should be greater"),
        (lambda b: b["tensors"]["model.bias"].update(shape=[1 << 60]), "shape.0: Input should be less"),
        (lambda b: b["tensors"]["model.bias"].update(shape=[8]), "do not make up its shape"),
        (lambda b: b["tensors"]["model.bias"].update(shape=[7] * 17), "shape: List should have at most 16"),
        (lambda b: b["tensors"]["model.bias"].update(chunks=[]), "do not make up its shape"),
        (lambda b: b["tensors"]["model.bias"]["chunks"].append(dict(chunk_of(b))), "do not make up its shape"),
        (lambda b: chunk_of(b).update(file="../../secret"), "is in the file '../../secret'"),
        (lambda b: chunk_of(b).update(file="/etc/passwd"), "is in the file '/etc/passwd'"),
        (lambda b: chunk_of(b).update(at=-1), "at: Input should be greater"),
        (lambda b: chunk_of(b).update(at=1 << 50), r"ends at byte \d+ of rank-00000.bin"),
        (lambda b: chunk_of(b).update(at=1.5), "at: Input should be a valid integer"),
        (lambda b: chunk_of(b).update(offsets=[1]), "is not in"),
        (lambda b: chunk_of(b).update(offsets=[0, 0]), "is not in"),
    ],
)
def test_a_hostile_index_is_refused_though_its_hash_fits(checkpoint, change, why):
    body = copy.deepcopy(unseal(checkpoint.read(INDEX), INDEX))
    change(body)
    with pytest.raises(BadCheckpoint, match=f"index.json: .*{why}"):
        parse_index(seal(body), checkpoint.manifest)
