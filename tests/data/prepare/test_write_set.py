"""A set as it is written: how full, and from which source each shard is."""

from pathlib import Path

import pytest
import torch

from tests.data.conftest import data_config, write_corpus
from windlass.data.prepare.prepare import prepare
from windlass.data.shards.mds import Reader


def test_best_fit_keeps_documents_whole_and_tells_how_full(corpus, tmp_path):
    lines = []
    prepared = prepare(data_config(tmp_path, packing="best-fit", sequence_length=500), {}, log=lines.append)
    info, (told,) = prepared.sets["train"], [line for line in lines if line.startswith("train: ")]
    assert f"({100 * info.tokens / (500 * info.samples):.2f} % full, {info.padding} positions are empty)" in told
    assert all(int(ids[0]) == prepared.eos_id for ids, _ in Reader(prepared.directory / "train"))
    ends = [((ids == prepared.eos_id) & (labels != -100))[1:] for ids, labels in Reader(prepared.directory / "train")]
    assert info.max_documents == 1 + max(int(found.sum()) for found in ends)  # the EOS in front is one


def test_no_shard_of_a_mixture_holds_two_sources(corpus, tmp_path):
    write_corpus(tmp_path / "other", num_documents=20, seed=9)
    sources = [{"path": str(tmp_path / name), "weight": 1} for name in ("corpus", "other")]
    mixed = prepare(data_config(tmp_path, sources=sources), {}, log=lambda line: None)
    counts = mixed.sets["train"].source_shards
    assert len(counts) == 2 and sum(counts) == len(Reader(mixed.directory / "train").shards)
    tokenizer = {"from": str(mixed.tokenizer_directory)}
    streams = [list(Reader(mixed.directory / "train"))]
    begin = 0
    for number, name in enumerate(("corpus", "other")):
        alone = data_config(
            tmp_path, sources=[{"path": str(tmp_path / name)}], directory=str(tmp_path / name[:3]), tokenizer=tokenizer
        )
        wanted = [ids.tolist() for ids, _ in Reader(prepare(alone, {}, log=lambda _: None).directory / "train")]
        assert [ids.tolist() for ids, _ in streams[0][begin : begin + len(wanted)]] == wanted, name
        shards = Reader(mixed.directory / "train").shard_samples
        assert sum(shards[sum(counts[:number]) :][: counts[number]]) == len(wanted)
        begin += len(wanted)


def test_no_shard_of_validation_holds_two_sources(corpus, tmp_path):
    write_corpus(tmp_path / "other", num_documents=20, seed=9)
    sources = [{"path": str(tmp_path / name)} for name in ("corpus", "other")]
    found = prepare(data_config(tmp_path, sources=sources, validation=0.3), {}, log=lambda line: None)
    counts, held = found.sets["validation"].source_shards, Reader(found.directory / "validation")
    assert len(counts) == 2 and min(counts) > 0 and sum(counts) == len(held.shards)
    assert found.sets["train"].source_shards == [], "one stream, as they have no weights"
    padded = [int((labels[1:] == -100).sum()) for _, labels in held]
    first = sum(held.shard_samples[: counts[0]])
    assert sum(padded[: first - 1]) == sum(padded[first:-1]) == 0, "each source ends by itself"
    assert sum(padded) == found.sets["validation"].padding > padded[-1]


@pytest.mark.long
def test_torchs_own_sources_fill_samples_of_2048_to_99_8_percent(tmp_path):
    """Some 1,700 documents. With the standard library's 319 one sample more is 0.1 %, and there two are."""
    config = data_config(
        tmp_path,
        sources=[{"path": str(Path(torch.__file__).parent / "**" / "*.py")}],
        tokenizer={"train": 2048},
        sequence_length=2048,
        packing="best-fit",
        shard_bytes=32 << 20,
    )
    info = prepare(config, {}, log=lambda line: None).sets["train"]
    assert info.documents > 1000 and info.tokens / (info.samples * 2048) > 0.998


def test_a_token_of_text_takes_two_bytes_and_compression_changes_no_sample(tmp_path, corpus):
    plain = prepare(data_config(tmp_path), {}, log=lambda line: None)
    changes = {"compression": "zstd", "directory": str(tmp_path / "packed")}
    packed = prepare(data_config(tmp_path, **changes), {}, log=lambda line: None)
    assert packed.stream == plain.stream and packed.fingerprint != plain.fingerprint and packed.sets == plain.sets
    for name in plain.sets:
        one, other = Reader(plain.shards(name)), Reader(packed.shards(name))
        assert one.shard_samples == other.shard_samples
        assert all((a == b).all() for pair in zip(one, other, strict=True) for a, b in zip(*pair))
        assert {shard.columns.id_type for shard in one.shards} == {"<u2"}
        assert [shard.columns.target for shard in one.shards][:-1] == [""] * (len(one.shards) - 1)
        assert all(path.name.endswith(".mds.zstd") for path in (packed.directory / name).glob("shard.*"))
