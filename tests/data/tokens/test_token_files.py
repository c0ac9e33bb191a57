"""Which files a source of tokens is, what a recipe may say of them, and sets that hold texts and tokens."""

import json
import os
import random

import numpy as np
import pytest

from tests.data.conftest import make_text, refusal, write_corpus
from tests.data.conftest import small as small  # a fixture
from tests.data.prepare.test_prepare import content, quietly
from tests.data.tokens import writers
from windlass.data.config import DataConfig, SourceConfig
from windlass.data.lint.lint import lint
from windlass.data.packing import unpack_samples
from windlass.data.shards.mds import Reader
from windlass.data.sources import known_hashes
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError

OF_TOKENS = "format=text: it is for files of tokens, and has no effect on rows of this format; "
WHOLE_FILES = "ids are read from whole files on this host; copy them here, and name them as path"


def stream_of(prepared, name="train"):
    return unpack_samples(Reader(prepared.shards(name))).tolist()


@pytest.fixture
def made(tmp_path, small):
    """(directory, tokenizer, EOS id, documents as ids), with x.bin and x.idx of Megatron."""
    eos = small[1].eos_id
    documents = writers.some_documents(eos)
    writers.megatron(tmp_path / "x.bin", documents)
    return tmp_path, small[1].tokenizer_directory, eos, documents


def test_a_file_is_hashed_once(made, monkeypatch):
    root, tokenizer, _, _ = made
    for file in ("x.bin", "x.idx"):
        os.utime(root / file, (1_000_000_000, 1_000_000_000))
    config = writers.tokens_config(root, tokenizer, {"path": str(root / "x.bin")})
    quietly(config)
    hashed = []
    real = known_hashes.hash_file
    monkeypatch.setattr(known_hashes, "hash_file", lambda path, *more: hashed.append(path.name) or real(path, *more))
    lines = []
    quietly(config, lines=lines)
    assert hashed == [] and any("unchanged: skipped" in line for line in lines)
    assert sorted(map(os.path.basename, json.loads((root / "prepared/sources.json").read_text()))) == ["x.bin", "x.idx"]
    os.utime(root / "x.bin", (1_000_000_001, 1_000_000_001))
    quietly(config)
    assert hashed == ["x.bin"]


def test_a_spoilt_shard_is_seen_by_the_hash_of_its_index(made):
    root, tokenizer, _, documents = made
    writers.mds(root / "mds", documents, hashes=["sha256"])
    path = root / "mds" / "shard.00002.mds"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"shard.00002.mds has the hash sha256"):
        quietly(writers.tokens_config(root, tokenizer, {"path": str(root / "mds")}))
    path.unlink()
    with pytest.raises(UserError, match=r"shard.00002.mds is missing"):
        quietly(writers.tokens_config(root, tokenizer, {"path": str(root / "mds")}))


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ({"path": "x.bin", "id_type": "uint16"}, "`id_type: uint16` has no effect on x.bin, which is megatron"),
        ({"path": "x.bin", "text": "tokens"}, "`text: tokens` has no effect on x.bin, which is megatron"),
        ({"path": "x.bin", "file_format": "mds"}, "`file_format: mds` with x.bin, which is megatron"),
        ({"path": "y.bin", "stored": "samples"}, "`stored: samples` has no effect on y.bin, which is bin"),
        ({"path": "y.bin", "rows": ":5"}, "`rows: :5` has no effect on y.bin, which is bin"),
        ({"path": "nothing*.bin"}, "`path: nothing*.bin` holds no tokens"),
        ({"path": ["x.bin", "mds"]}, "x.bin, mds holds mds and megatron files"),
    ],
)
def test_settings_without_effect_and_other_files_are_refused(made, monkeypatch, source, given):
    root, tokenizer, eos, documents = made
    writers.nanogpt(root / "y.bin", documents, eos)
    writers.mds(root / "mds", documents)
    monkeypatch.chdir(root)
    with pytest.raises(UserError) as caught:
        quietly(writers.tokens_config(root, tokenizer, source))
    assert caught.value.given == given


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"path": "x.jsonl", "stored": "samples"},
            f"stored=samples with {OF_TOKENS}set format=tokens, or remove stored",
        ),
        (
            {"path": "x.bin", "id_type": "uint16"},
            f"id_type=uint16 with {OF_TOKENS}set format=tokens, or remove id_type",
        ),
        ({"path": "x.bin", "file_format": "megatron"}, f"file_format=megatron with {OF_TOKENS}set format=tokens, or"),
        ({"path": "s3://b/x.bin", "format": "tokens"}, f"format=tokens with path=s3://b/x.bin: {WHOLE_FILES}"),
        ({"hub": "org/name", "format": "tokens"}, f"format=tokens with hub=org/name: {WHOLE_FILES}"),
        (
            {"path": "in", "grows_until": "_SUCCESS", "format": "tokens"},
            f"format=tokens with path=in and grows_until=_SUCCESS: {WHOLE_FILES}",
        ),
        (
            {"path": "x", "format": "tokens", "file_format": "jsonl"},
            "file_format=jsonl with format=tokens: a file of this format holds text, and ids are in mds, megatron, bin; set "
            "file_format to one of those, or remove it",
        ),
        (
            {"path": "x", "format": "tokens", "bad_rows": {"at_most": 1}},
            "bad_rows={at_most: 1} with format=tokens: an id is right or wrong, and the setting has no effect; remove bad_rows",
        ),
        ({"path": "x", "format": "tokens", "too_long": "drop"}, "too_long=drop with format=tokens: it is for chat and"),
    ],
)
def test_a_wrong_source_of_tokens_is_refused_before_any_file_is_read(settings, says):
    assert says in refusal(SourceConfig, settings)


def test_the_tokenizer_is_named(made):
    root = made[0]
    source = {"path": str(root / "x.bin"), "format": "tokens"}
    trained = {"tokenizer": {"train": 300}, "directory": str(root / "prepared"), "sequence_length": 32}
    assert (
        "sources[0].format=tokens with tokenizer.train=300: ids that were made before belong to the tokenizer that made them; "
        "give tokenizer.from, in place of tokenizer.train"
    ) in refusal(DataConfig, {**trained, "sources": [source]})
    write_corpus(root / "corpus")
    sets = {"other": SourceConfig(**source)}
    config = DataConfig.model_validate({**trained, "sources": [{"path": str(root / "corpus")}]})
    with pytest.raises(UserError, match=r"with `tokenizer: \{train: 300\}`"):
        quietly(config, sets)


def test_a_raw_bin_beside_an_idx_is_read_as_raw_where_asked(made):
    root, tokenizer, eos, documents = made
    source = {"path": str(root / "x.bin"), "file_format": "bin", "id_type": "uint16"}
    prepared = quietly(writers.tokens_config(root, tokenizer, source))
    assert stream_of(prepared) == [eos, *(id for one in documents for id in one), eos]


def test_texts_and_tokens_follow_each_other(made):
    root, tokenizer, eos, documents = made
    texts = write_corpus(root / "corpus", 12)
    rows = writers.windows(documents, eos, 32)[:-1]
    writers.mds(root / "mds", rows)
    config = writers.tokens_config(
        root,
        tokenizer,
        {"path": str(root / "x.bin")},
        {"path": str(root / "corpus"), "format": "text"},
        {"path": str(root / "mds"), "stored": "samples"},
        {"path": str(root / "x.bin"), "documents": 3},
    )
    prepared = quietly(config)
    opened, _ = open_tokenizer(tokenizer)
    ids = [*documents, *(opened.encode(text, add_special_tokens=False).ids for text in texts)]
    first = [eos, *(id for one in ids for id in (*one, eos))]
    count = -(-(len(first) - 1) // 32)
    samples = list(Reader(prepared.shards("train")))
    assert unpack_samples(samples[:count]).tolist() == first
    assert [ids[:32].tolist() for ids, _ in samples[count : count + len(rows)]] == rows
    assert unpack_samples(samples[count + len(rows) :]).tolist() == [
        eos,
        *(id for one in documents[:3] for id in (*one, eos)),
    ]
    assert prepared.sets["train"].documents == 60 + len(texts) + len(rows) + 3


def test_texts_and_tokens_are_mixed_by_weight(made):
    root, tokenizer, eos, documents = made
    texts = [make_text(300, number) for number in range(9)]
    (root / "corpus").mkdir()
    for number, text in enumerate(texts):
        (root / "corpus" / f"{number}.txt").write_text(text)
    sources = {"path": str(root / "x.bin"), "weight": 2}, {"path": str(root / "corpus"), "format": "text", "weight": 1}
    prepared = quietly(writers.tokens_config(root, tokenizer, *sources, validation={"path": str(root / "corpus")}))
    counts = prepared.sets["train"].source_shards
    shards = prepared.shards("train").shards
    first = sum(shard.num_samples for shard in shards[: counts[0]])
    samples = list(Reader(prepared.shards("train")))
    assert len(counts) == 2 and sum(counts) == len(shards)
    assert unpack_samples(samples[:first]).tolist() == [eos, *(id for one in documents for id in (*one, eos))]
    found = np.array(unpack_samples(samples[first:]))
    assert int((found == eos).sum()) == 1 + len(texts)


@pytest.mark.parametrize("stored", [None, "samples"])
def test_lint_has_nothing_to_say_of_clean_tokens(made, stored):
    root, tokenizer, eos, _ = made
    documents = writers.encoded(tokenizer)
    rows = writers.windows(documents, eos, 32)[:-1]
    random.Random(1).shuffle(rows)  # no row continues the one before
    writers.mds(root / "mds", rows)
    writers.megatron(root / "y.bin", documents)
    source = {"path": str(root / ("mds" if stored else "y.bin")), "stored": stored}
    prepared = quietly(writers.tokens_config(root, tokenizer, source))
    assert [finding.code for finding in lint(prepared).findings] == []


def test_lint_sees_ids_of_another_tokenizer(made):
    root, tokenizer, _, _ = made
    prepared = quietly(writers.tokens_config(root, tokenizer, {"path": str(root / "x.bin")}))
    assert "ids-of-another-tokenizer" in [finding.code for finding in lint(prepared).findings]


def test_a_set_that_grows_has_the_same_shards(made):
    root, tokenizer, _, _ = made
    source = {"path": str(root / "x.bin")}
    plain = quietly(writers.tokens_config(root, tokenizer, source))
    grown = writers.tokens_config(
        root, tokenizer, source, directory=str(root / "grown"), order={"first_epoch": "written"}
    )
    quietly(grown)
    shards = {name: data for name, data in content(root / "grown").items() if name.suffix == ".mds"}
    assert shards == {name: data for name, data in content(plain.directory).items() if name.suffix == ".mds"}
