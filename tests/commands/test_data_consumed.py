"""`data consumed` proves a run's samples by themselves, and says so when it cannot."""

import shutil

import pytest
import xxhash

from tests import tiny
from tests.training.runs.test_skips import STEPS, bad_shard, base, whole  # noqa: F401
from windlass.commands.data_consumed import batch_before, consumed
from windlass.data.shards.mds import Reader
from windlass.errors import UserError


def test_the_list_is_what_the_run_was_given_and_what_was_lost_is_reported(base, whole, tmp_path):  # noqa: F811
    config, rows = whole
    lines = list(consumed(config.run.directory, tmp_path / "list"))
    reader = Reader(base / "good" / "train")
    listed = [tuple(map(int, line.split())) for line in (tmp_path / "list").read_text().splitlines()]
    given = [row for step in rows for row in step if any(row)]
    assert [reader.read(*place)[0][:-1].tolist() for place in listed] == given
    blank = STEPS * 8 - len(given)
    (since,) = [int(line.split("left out from ")[1].split()[0]) for line in lines if "left out from" in line]
    assert lines[0] == f"samples 0 to {STEPS * 8} of the stream, shard {bad_shard(base)} left out from {since} on"
    digest = xxhash.xxh3_128_hexdigest((tmp_path / "list").read_bytes())
    assert lines[1] == f"consumed: {len(given)} samples, xxh3-128 of their list {digest}"
    assert lines[2] == f"lost: {blank} samples, whose turn came when their shard was left out"
    assert lines[3].startswith(f"of {reader.num_samples} samples each had its turn 0 to 1 times")


def test_the_batch_of_a_failure_is_named_by_its_samples_or_it_is_said_why_not(base, whole, tmp_path):  # noqa: F811
    config, _ = whole
    list(consumed(config.run.directory, tmp_path / "list"))
    listed = [line.replace(" ", "/") for line in (tmp_path / "list").read_text().splitlines()]
    said = batch_before(config, 8)
    assert said == f"its batch: samples 0 to 8 of the stream, shard/row {' '.join(listed[:8])}"
    nowhere = tiny.recipe(base, run={**config.run.model_dump(), "directory": str(tmp_path / "none")})
    assert batch_before(nowhere, 8).startswith("its batch is not known: ")


def test_other_shards_prove_nothing_and_a_directory_that_is_no_run_is_named(base, whole, tmp_path):  # noqa: F811
    config, _ = whole
    with pytest.raises(UserError, match=r"events\.jsonl does not exist"):
        list(consumed(tmp_path))
    run = shutil.copytree(config.run.directory, tmp_path / "run")
    other = tiny.recipe(base, data={**config.data.model_dump(by_alias=True), "directory": str(tmp_path / "other")})
    from windlass.training.preflight import prepare_only

    (tmp_path / "corpus").mkdir()
    tiny.write_corpus(tmp_path / "corpus", 70)
    settings = {**other.data.model_dump(by_alias=True), "sources": [{"path": str(tmp_path / "corpus")}]}
    prepare_only(tiny.recipe(base, data=settings))
    text = (run / "resolved.yaml").read_text()
    text = text.replace(str(base / "bad"), str(tmp_path / "other")).replace(
        f"path: {base}/corpus", f"path: {tmp_path}/corpus"
    )
    (run / "resolved.yaml").write_text(text)
    with pytest.raises(UserError, match="consumed samples 0 to"):
        list(consumed(run))
    (run / "resolved.yaml").unlink()
    with pytest.raises(UserError, match=r"resolved\.yaml does not exist"):
        list(consumed(run))
