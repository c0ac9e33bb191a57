"""A set as it is written: how full, and from which source each shard is."""

import re
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from tests.data.conftest import data_config, write_corpus
from tests.data.prepare.test_prepare import documents_of
from windlass.data.packing import unpack_samples
from windlass.data.prepare.prepare import prepare
from windlass.data.shards.mds import Reader
from windlass.data.sources.config import FillInMiddleConfig, SourceConfig
from windlass.data.tokenize.fill_in_middle import MARKS, middles_of
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError


def test_best_fit_keeps_documents_whole_and_reports_how_full(corpus, tmp_path):
    lines = []
    prepared = prepare(data_config(tmp_path, packing="best-fit", sequence_length=500), {}, log=lines.append)
    info, (logged,) = prepared.sets["train"], [line for line in lines if line.startswith("train: ")]
    assert f"({100 * info.tokens / (500 * info.samples):.2f} % full, {info.padding} positions are empty)" in logged
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


@pytest.fixture
def marked(corpus, tmp_path):
    """A tokenizer with the marks of prefix, suffix and middle, which are not special in it, as Qwen's are not."""
    first = prepare(data_config(tmp_path, directory=str(tmp_path / "first")), {}, log=lambda _: None)
    tokenizer = Tokenizer.from_file(str(first.tokenizer_directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS[0]])
    tokenizer.save(str(first.tokenizer_directory / "tokenizer.json"))
    return {"from": str(first.tokenizer_directory)}


def test_the_middle_of_training_documents_is_moved_and_no_other(corpus, tmp_path, marked):
    """By workers that read chunks, and by the parent where a limit counts documents: the same shards."""
    found = {}
    for name, limit in (("plain", {}), ("chunked", {}), ("limited", {"documents": 1000})):
        middles = {} if name == "plain" else {"fill_in_middle": {"share": 0.6}}
        sources, lines = [{"path": str(tmp_path / "corpus"), **limit, **middles}], []
        config = data_config(tmp_path, sources=sources, tokenizer=marked, directory=str(tmp_path / name))
        found[name] = prepare(config, {}, log=lines.append)
        assert not [line for line in lines if "rewrites text" in line]
    plain, chunked, _ = found.values()
    assert plain.fingerprint != chunked.fingerprint
    for name in ("train", "validation"):
        rows = [[ids.tolist() for ids, _ in Reader(one.directory / name)] for one in found.values()]
        assert rows[1] == rows[2] and (rows[0] == rows[1]) == (name == "validation")
        assert [one.sets[name].bytes_add_up for one in found.values()] == [True] * 3, "a mark is no text"
    assert chunked.sets["train"].bytes == plain.sets["train"].bytes
    opened, eos_id = open_tokenizer(chunked.tokenizer_directory)
    middles = middles_of(FillInMiddleConfig(share=0.6), [chunked.tokenizer_directory / "tokenizer.json"])
    train = documents_of(plain, "train")
    moved = [middles.parts(text) for text in train]
    num_moved = sum(len(parts) > 1 for parts in moved)
    assert 0.3 < num_moved / len(train) < 0.9
    assert f"train: source 0: the middle of {num_moved} of {len(train)} documents is moved behind the end" in lines
    expected = [
        [number for part, mark in parts for number in [*opened.encode(part).ids, eos_id if mark is None else mark]]
        for parts in moved
    ]
    stream = unpack_samples(Reader(chunked.directory / "train"))[1:].tolist()
    assert stream[: sum(map(len, expected))] == [number for document in expected for number in document]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"sources": [{"path": "x", "format": "chat", "fill_in_middle": {}}]},
            "fill_in_middle={} with format=chat: only texts have a middle that is moved; remove fill_in_middle",
        ),
        (
            {"validation": {"path": "x", "fill_in_middle": {}}},
            "validation.fill_in_middle={}: it is for training sources, and has no effect on validation; remove validation.fill",
        ),
    ],
)
def test_a_middle_where_none_is_moved_is_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        data_config(tmp_path, tokenizer={"from": "x"}, **change)


def test_a_middle_is_refused_before_anything_is_read(corpus, tmp_path, marked):
    asked = {"path": str(tmp_path / "corpus"), "fill_in_middle": {}}
    with pytest.raises(UserError, match="is trained here or has no") as caught:
        prepare(data_config(tmp_path, sources=[asked]), {}, log=lambda _: None)
    assert "data.tokenizer.from" in caught.value.change
    ends = {**asked, "fill_in_middle": {"marks": [*MARKS[0][:2], "<|endoftext|>"]}}
    with pytest.raises(UserError, match=r"without '<\|endoftext\|>'"):
        prepare(data_config(tmp_path, sources=[ends], tokenizer=marked), {}, log=lambda _: None)
    with pytest.raises(UserError, match=r"evaluate.sets.held.fill_in_middle"):
        sets = {"held": SourceConfig.model_validate(asked)}
        prepare(data_config(tmp_path, tokenizer=marked), sets, log=lambda _: None)
