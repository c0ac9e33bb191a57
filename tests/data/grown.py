"""A training set that grows as a test says, without sources and tokenizer: shards of a few samples, their ids known."""

import numpy as np

from windlass.data.shards.journal import Beat, Journal, JournaledWriter, begin_journal

LENGTH, ROWS = 5, 5  # ids of a sample, samples of a shard
EOS = 0


class Grown:
    """`directory` with a journal and the set `train`. `write(n)`: n more shards."""

    def __init__(self, directory, beats=True):
        self.directory = directory
        (directory / "train").mkdir(parents=True)
        begin_journal(directory, {"fingerprint": "mine", "sets": {}, "files": {}})
        self.go_on(beats)

    def go_on(self, beats=True):
        """As a preparation does that was killed: from the first shard again."""
        self.journal, self.beat = Journal(self.directory), Beat()
        self.journal.read()
        if beats:
            self.beat.begin(self.directory)
        shard_bytes = 8 << 10
        self.writer = JournaledWriter(
            self.directory / "train", LENGTH, shard_bytes, self.journal, self.beat, EOS, LENGTH
        )
        self.num_shards = 0
        return self

    def write(self, num_shards):
        for _ in range(num_shards):
            ids = samples_of(self.num_shards)
            self.writer.write(ids, ids)
            self.num_shards = self.writer.end_shard()
        return self

    def end(self):
        self.writer.close()
        if self.journal.end is None:
            self.journal.add({"kind": "end", "train": {}})
        return self


def samples_of(shard, rows=ROWS):
    """[rows, LENGTH] int32: first the shard, then the row; a document border in every third row."""
    ids = np.full((rows - shard % 2, LENGTH), 7, np.int32)
    ids[:, 0], ids[:, 1] = 1000 + shard, 1 + np.arange(len(ids))
    ids[::3, 2] = EOS
    return ids
