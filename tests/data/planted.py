"""Prepared data made by hand, so that a fault can be planted in it: ids and labels are whatever a test says."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from windlass.data.packing import pack, pack_best_fit
from windlass.data.shards.mds import Writer
from windlass.data.tokenize.tokenizer import vocab_size_of

LENGTH = 32
BOS, TURN = "<s>", "<|im_end|>"
WORDS = [
    "rope",
    "anchor",
    "deck",
    "mast",
    "wind",
    "hull",
    "sail",
    "tide",
    "keel",
    "oar",
    "bow",
    "stern",
    "port",
    "helm",
]


def text(number, num_words=60):
    """A document like no other, of plain words."""
    draw = np.random.default_rng(number)
    return f"{number} " + " ".join(draw.choice(WORDS) for _ in range(num_words))


def texts(first=0, count=30):
    return [text(first + number) for number in range(count)]


class Planted:
    """A tokenizer with an EOS, a BOS and an end of turn, and preparations of documents that a test gives."""

    def __init__(self, small, directory: Path):
        _, self._like, _ = small
        self.directory = directory
        folder = directory / "tokenizer"
        shutil.copytree(self._like.tokenizer_directory, folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens([BOS, TURN])
        tokenizer.save(str(folder / "tokenizer.json"))
        self.set_config(bos_token=BOS)
        tokenizer.encode_special_tokens = True
        self.tokenizer, self.vocab_size, self.eos = tokenizer, vocab_size_of(tokenizer), self._like.eos_id
        self.bos, self.turn = tokenizer.token_to_id(BOS), tokenizer.token_to_id(TURN)

    def set_config(self, **changes):
        path = self.directory / "tokenizer" / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def ids(self, text):
        """A document's ids, with its EOS."""
        return [*self.tokenizer.encode(text, add_special_tokens=False).ids, self.eos]

    def prepared(
        self, train, validation=None, *, documents=None, edit=None, settings=None, best_fit=False, shard_bytes=8192
    ):
        """`train`, `validation`: lists of texts or of lists of ids. `edit(ids, labels)` changes the training samples.
        `documents`: what prepared.json says there are in train."""
        sets = {"train": train, "validation": texts(1000, 5) if validation is None else validation}
        infos = {}
        for name, given in sets.items():
            parts = [self.ids(one) if isinstance(one, str) else one for one in given]
            way = pack_best_fit if best_fit else pack
            packed = list(way([np.array(ids, np.int32) for ids in parts], self.eos, LENGTH))
            ids_NL, labels_NL = (np.concatenate(column).copy() for column in zip(*packed))
            if edit is not None and name == "train":
                edit(ids_NL, labels_NL)
            writer = Writer(self.directory / name, LENGTH + 1, shard_bytes)
            writer.write(ids_NL, labels_NL)
            writer.close()
            infos[name] = replace(
                self._like.sets["train"],
                documents=documents if documents is not None and name == "train" else len(given),
                tokens=sum(map(len, parts)),
                samples=len(ids_NL),
            )
        base = {
            "sources": [{"path": "here"}],
            "validation": 0.1,
            "sequence_length": LENGTH,
            "packing": "best-fit" if best_fit else "concatenate",
        }
        return replace(
            self._like,
            directory=self.directory,
            vocab_size=self.vocab_size,
            sets=infos,
            settings={**base, **(settings or {})},
        )
