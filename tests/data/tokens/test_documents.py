"""Files of ids of every kind -> the stream of a preparation: each id once, documents at their borders, rows as stored."""

import numpy as np
import pytest

from tests.data.conftest import small as small  # a fixture
from tests.data.prepare.test_prepare import quietly
from tests.data.tokens import writers
from windlass.data.packing import unpack_samples
from windlass.data.shards.mds import Reader
from windlass.errors import UserError

ROW = 33


def packed(documents, eos):
    """The stream that these documents make, by the definition of packing.concatenate."""
    return [eos, *(id for document in documents for id in (*document, eos))]


def write(kind, place, documents, eos):
    """-> the source of these documents as files of one kind."""
    place.mkdir()
    match kind:
        case "nanoGPT":
            writers.nanogpt(place / "train.bin", documents, eos)
            return {"path": str(place / "train.bin"), "id_type": "uint16"}
        case "nanoGPT, two files of uint32":
            stream = [id for document in documents for id in (*document, eos)]
            for number, part in enumerate((stream[:701], stream[701:])):  # in the middle of a document
                (place / f"{number}.bin").write_bytes(np.array(part, "<u4").tobytes())
            return {"path": str(place), "id_type": "uint32"}
        case "llm.c":
            writers.llm_c(place / "a.bin", documents[:20], eos)
            writers.llm_c(place / "b.bin", documents[20:], eos)
            return {"path": str(place / "*.bin")}
        case "llm.c of Llama 3":
            writers.llm_c(place / "a.bin", documents, eos, 20240801, 7, "I")
            return {"path": str(place)}
        case "Megatron":
            writers.megatron(place / "x.bin", documents)
            return {"path": str(place / "x.bin")}
        case "Megatron with EOD, int32, without the last border":
            writers.megatron(place / "x.bin", [[*document, eos] for document in documents], 4, "i", with_last=False)
            return {"path": str(place)}
        case "LLM Foundry's bytes":
            writers.mds(place / "train", writers.windows(documents, eos, ROW))
            return {"path": str(place / "train")}
        case "MDS of fixed shape":
            rows = writers.windows(documents, eos, ROW)
            writers.mds(place, rows[:-1], f"ndarray:uint16:{ROW}", "<u2", rows_per_shard=4)
            writers.mds(place / "last", rows[-1:], "ndarray:uint16", "<u2")
            return {"path": [str(place), str(place / "last")]}
        case "MDS of documents, zstd, sha1, a column of text":
            writers.mds(place, documents, "ndarray:int32", "<i4", ["sha1"], "zstd", extra=True)
            return {"path": str(place / "index.json"), "stored": "documents"}
        case "MDS of bytes of uint16":
            writers.mds(place, writers.windows(documents, eos, 50), dtype="<u2", extra=True)
            return {"path": str(place), "id_type": "uint16"}
    raise AssertionError(kind)


KINDS = (
    "nanoGPT", "nanoGPT, two files of uint32", "llm.c", "llm.c of Llama 3", "Megatron",
    "Megatron with EOD, int32, without the last border", "LLM Foundry's bytes", "MDS of fixed shape",
    "MDS of documents, zstd, sha1, a column of text", "MDS of bytes of uint16",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_id_of_every_kind_is_a_target_once(tmp_path, small, kind):
    tokenizer, eos = small[1].tokenizer_directory, small[1].eos_id
    documents = writers.some_documents(eos)
    source = write(kind, tmp_path / "files", documents, eos)
    prepared = quietly(writers.tokens_config(tmp_path, tokenizer, source))
    assert unpack_samples(Reader(prepared.shards("train"))).tolist() == packed(documents, eos)
    info = prepared.sets["train"]
    assert (info.documents, info.tokens) == (60, sum(map(len, documents)) + 60) and info.bytes_add_up
    assert info.bytes == int(prepared.token_bytes("train")[[id for one in documents for id in one]].sum())
    lines = []
    quietly(writers.tokens_config(tmp_path, tokenizer, source), lines=lines)
    assert any("unchanged: skipped" in line for line in lines)


def test_whole_documents_are_packed_best_fit(tmp_path, small):
    tokenizer, eos = small[1].tokenizer_directory, small[1].eos_id
    documents = [one[:31] for one in writers.some_documents(eos)]
    writers.megatron(tmp_path / "x.bin", documents)
    config = writers.tokens_config(
        tmp_path, tokenizer, {"path": str(tmp_path / "x.bin")}, packing="best-fit", isolate=True
    )
    found = []
    for ids, labels in Reader(quietly(config).shards("train")):
        assert ids[0] == eos and labels[1:][labels[1:] != -100].tolist() == ids[1:][labels[1:] != -100].tolist()
        counted = labels[1:][labels[1:] != -100]
        found += [part[:-1].tolist() for part in np.split(counted, np.flatnonzero(counted == eos) + 1)[:-1]]
    assert sorted(found) == sorted(documents)


@pytest.mark.parametrize("length", [32, 33, 20])
def test_rows_are_taken_as_they_are(tmp_path, small, length):
    tokenizer, eos = small[1].tokenizer_directory, small[1].eos_id
    rows = writers.windows(writers.some_documents(eos), eos, length)
    rows = rows if len(rows[-1]) > 1 else rows[:-1]
    writers.mds(tmp_path / "mds", rows)
    source = {"path": str(tmp_path / "mds"), "stored": "samples"}
    prepared = quietly(writers.tokens_config(tmp_path, tokenizer, source))
    found = list(Reader(prepared.shards("train")))
    assert [ids[: len(row)].tolist() for (ids, _), row in zip(found, rows, strict=True)] == rows
    for (ids, labels), row in zip(found, rows, strict=True):
        assert (
            labels[: len(row)].tolist() == row and (labels[len(row) :] == -100).all() and (ids[len(row) :] == eos).all()
        )
    info = prepared.sets["train"]
    targets = sum(len(row) - 1 for row in rows)
    assert (info.documents, info.samples, info.tokens) == (len(rows), len(rows), targets)
    assert info.padding == len(rows) * 32 - targets and info.bytes_add_up


@pytest.mark.parametrize("length", [34, 1])
def test_a_row_that_is_no_sample_is_refused_by_name(tmp_path, small, length):
    rows = [list(range(1, 11)), list(range(1, 1 + length))]
    writers.mds(tmp_path / "mds", rows)
    source = {"path": str(tmp_path / "mds"), "stored": "samples"}
    with pytest.raises(UserError) as caught:
        quietly(writers.tokens_config(tmp_path, small[1].tokenizer_directory, source))
    assert caught.value.given.endswith(
        f"shard.00000.mds, row 1, holds {length} ids, and the source has `stored: samples`"
    )


@pytest.mark.parametrize("kind", ["raw", "Megatron", "MDS"])
def test_an_id_beyond_the_vocabulary_is_an_error_that_names_its_place(tmp_path, small, kind):
    tokenizer, eos = small[1].tokenizer_directory, small[1].eos_id
    documents = writers.some_documents(eos)
    documents[9] = [5, 6, small[1].vocab_size, 7]
    at = sum(len(one) + 1 for one in documents[:9]) + 2
    match kind:
        case "raw":
            writers.nanogpt(tmp_path / "x.bin", documents, eos)
            source, place = (
                {"path": str(tmp_path / "x.bin"), "id_type": "uint16"},
                f"x.bin holds the id 300 at position {at}",
            )
        case "Megatron":
            writers.megatron(tmp_path / "x.bin", documents)
            source, place = {"path": str(tmp_path / "x.bin")}, "x.bin, document 9, holds the id 300 at position 2"
        case "MDS":
            writers.mds(tmp_path / "mds", documents, "ndarray:uint16", "<u2")
            source, place = {"path": str(tmp_path / "mds")}, "shard.00001.mds, row 2, holds the id 300 at position 2"
    with pytest.raises(UserError) as caught:
        quietly(writers.tokens_config(tmp_path, tokenizer, source))
    assert caught.value.given.endswith(place) and "below 300" in caught.value.rule
    assert not (tmp_path / "prepared").exists()


def test_wrong_widths_are_seen_by_the_vocabulary(tmp_path, small):
    writers.nanogpt(tmp_path / "x.bin", writers.some_documents(small[1].eos_id), small[1].eos_id)
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[: 4 * 600])
    with pytest.raises(UserError, match="at position 0"):
        source = {"path": str(tmp_path / "x.bin"), "id_type": "uint32"}
        quietly(writers.tokens_config(tmp_path, small[1].tokenizer_directory, source))


def test_empty_documents_are_none(tmp_path, small):
    tokenizer, eos = small[1].tokenizer_directory, small[1].eos_id
    writers.megatron(tmp_path / "x.bin", [[], [4, 5], [eos], [6, eos, eos, 7], []], sequences_each=1)
    prepared = quietly(writers.tokens_config(tmp_path, tokenizer, {"path": str(tmp_path / "x.bin")}, sequence_length=4))
    assert unpack_samples(Reader(prepared.shards("train"))).tolist() == [eos, 4, 5, eos, 6, eos, 7, eos]


def test_limits_count_rows_documents_and_tokens(tmp_path, small):
    tokenizer, eos = small[1].tokenizer_directory, small[1].eos_id
    documents = writers.some_documents(eos)
    writers.megatron(tmp_path / "x.bin", documents)
    for limit, wanted in (
        ({"rows": "10:20"}, documents[10:20]),
        ({"documents": 12}, documents[:12]),
        ({"tokens": sum(map(len, documents[:9])) + 9}, documents[:9]),
    ):
        source = {"path": str(tmp_path / "x.bin"), **limit}
        prepared = quietly(writers.tokens_config(tmp_path, tokenizer, source))
        assert unpack_samples(Reader(prepared.shards("train"))).tolist() == packed(wanted, eos)


def test_a_share_an_amount_and_copies_of_documents_of_ids(tmp_path, small):
    tokenizer, eos = small[1].tokenizer_directory, small[1].eos_id
    documents = writers.some_documents(eos)
    writers.megatron(tmp_path / "x.bin", documents + documents[:5])
    source = {"path": str(tmp_path / "x.bin")}
    config = writers.tokens_config(tmp_path, tokenizer, source, validation=0.3, deduplicate=True)
    prepared = quietly(config)
    sides = [unpack_samples(Reader(prepared.shards(name))) for name in ("train", "validation")]
    found = [part[:-1].tolist() for one in sides for part in np.split(one[1:], np.flatnonzero(one[1:] == eos) + 1)[:-1]]
    assert sorted(found) == sorted({tuple(one): one for one in documents}.values())
    assert set(prepared.baselines) == {"unigram", "bigram"}
    amount = quietly(writers.tokens_config(tmp_path, tokenizer, source, validation={"tokens": 500}))
    held = unpack_samples(Reader(amount.shards("validation")))[1:]
    assert (held != eos).sum() == 500
    total = sum(info.tokens - info.documents for info in amount.sets.values())
    assert total == sum(map(len, documents + documents[:5]))


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path, small, monkeypatch):
    from windlass.data.tokens import documents as page

    tokenizer, eos = small[1].tokenizer_directory, small[1].eos_id
    writers.nanogpt(tmp_path / "x.bin", writers.some_documents(eos), eos)
    real = page.raw_rows

    def raw_rows(path, id_type):
        yield from real(path, id_type)
        writers.nanogpt(tmp_path / "x.bin", writers.some_documents(eos, seed=1), eos)

    monkeypatch.setattr(page, "raw_rows", raw_rows)
    with pytest.raises(UserError, match="changed while it was being prepared"):
        source = {"path": str(tmp_path / "x.bin"), "id_type": "uint16"}
        quietly(writers.tokens_config(tmp_path, tokenizer, source))
