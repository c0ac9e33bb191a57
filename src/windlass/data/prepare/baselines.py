"""What a model must beat: unigram and bigram predictors, and gzip, bz2, xz, on the validation set.

Predictors are fitted on the training tokens and scored on all validation targets, like the model. (The entropy of the
validation tokens under their own counts is no bar: most pairs occur once, so it is far too low.)

    unigram  q(b)   = (n_b + 1) / (N + V)     bigram   q(b|a) = (n_ab + k q(b)) / (n_a + k),  k = 8
(interpolation with a Dirichlet prior; MacKay and Peto 1995)

Where documents are isolated, their first tokens are no targets: the predictors are scored without them, too.

bits per byte = summed nats / (ln 2 * bytes): the one figure that compares vocabularies, and models with compressors.
A compressor starts with no knowledge, a model has read the training text; so xz is also shown primed, as the bytes
that the validation text adds when it is compressed behind the training text, with a dictionary that spans both.
"""

import bz2
import gzip
import lzma
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from windlass.data.packing import targets, unpack_samples
from windlass.data.shards.mds import Reader

MAX_TRAIN_TOKENS = 20_000_000  # counted in 1.5 s; larger corpora have no baselines
MAX_VALIDATION_BYTES = 16 << 20
MAX_PRIMED_BYTES = 8 << 20  # training text for the primed xz: it takes 11 times that in memory, and 1 s per 2 MB
BIGRAM_PRIOR = 8.0  # times that a pair counts as seen, by the unigram; chosen
PART_TOKENS = 1 << 20  # of the training tokens, counted at once: some arrays of 8 MB


def are_affordable(train_tokens: int, validation_bytes: int) -> bool:
    return train_tokens <= MAX_TRAIN_TOKENS and validation_bytes <= MAX_VALIDATION_BYTES


Scores = dict[str, dict[str, float]]


def fit_and_score(
    train_directory: Path, validation_directory: Path, eos_id: int, bytes_V: np.ndarray, validation_bytes: int
) -> tuple[Scores, Scores]:
    """{"unigram": {loss in nats per token, bits_per_byte}, "bigram": ...} over every target of the validation set, and over those
    that are none's first token. bytes_V: bytes of text per token id."""
    validation_M = unpack_samples(Reader(validation_directory, max_mapped=1))
    nats_2M = predictor_losses(targets(Reader(train_directory, max_mapped=1)), validation_M, len(bytes_V))
    is_inside_M = validation_M[:-1] != eos_id
    inside_bytes = validation_bytes - int(bytes_V[validation_M[1:][~is_inside_M]].sum(dtype=np.int64))
    return _scores(nats_2M, validation_bytes), _scores(nats_2M[:, is_inside_M], inside_bytes)


def _scores(nats_2M: np.ndarray, num_bytes: int) -> Scores:
    if num_bytes == 0:  # of one document of one token, nothing but its first one
        return {}
    return {
        name: {"loss": float(nats_M.mean()), "bits_per_byte": float(nats_M.sum()) / (num_bytes * math.log(2))}
        for name, nats_M in zip(("unigram", "bigram"), nats_2M)
    }


def predictor_losses(train: Iterable[np.ndarray], validation_M: np.ndarray, vocab_size: int) -> np.ndarray:
    """[2, M - 1]: nats of each of validation_M[1:] under unigram and bigram; a token's context is the one before it. Of the pairs
    in `train`, a stream in pieces, only those are counted that are asked for."""
    before, after = validation_M[:-1], validation_M[1:]
    wanted_P, index_M = np.unique(_pairs(validation_M, vocab_size), return_inverse=True)
    seen_P, counts_V, contexts_V = (np.zeros(size, np.int64) for size in (len(wanted_P), vocab_size, vocab_size))
    for part in _parts(train):
        counts_V += np.bincount(part[1:], minlength=vocab_size)
        contexts_V += np.bincount(part[:-1], minlength=vocab_size)
        pairs, times = np.unique(_pairs(part, vocab_size), return_counts=True)
        at = np.minimum(np.searchsorted(wanted_P, pairs), len(wanted_P) - 1)
        is_wanted = wanted_P[at] == pairs
        seen_P[at[is_wanted]] += times[is_wanted]
    unigram_V = (counts_V + 1.0) / (counts_V.sum() + vocab_size)
    bigram = (seen_P[index_M] + BIGRAM_PRIOR * unigram_V[after]) / (contexts_V[before] + BIGRAM_PRIOR)
    return -np.log(np.stack([unigram_V[after], bigram]))


def _pairs(ids_N: np.ndarray, vocab_size: int) -> np.ndarray:
    """[N - 1]: one number per pair of neighbours."""
    return ids_N[:-1].astype(np.int64) * vocab_size + ids_N[1:]


def _parts(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The pieces joined into parts of about PART_TOKENS; each begins with the last token of the one before."""
    held: list[np.ndarray] = []
    num_held = 0
    for piece in pieces:
        held.append(piece)
        num_held += len(piece)
        if num_held >= PART_TOKENS:
            part = np.concatenate(held)
            yield part
            held, num_held = [part[-1:]], 1
    yield np.concatenate(held)


def compress(train: bytes, validation: bytes) -> dict[str, dict[str, float]]:
    """Bits per byte of general compressors on the validation text; xz is primed with `train` unless that is empty."""
    sizes = {
        "gzip": len(gzip.compress(validation, 9)),
        "bz2": len(bz2.compress(validation, 9)),
        "xz": len(lzma.compress(validation, preset=6)),
    }
    if train:
        spanning = max(1 << 16, len(train) + len(validation))
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": spanning}]

        def size(text: bytes) -> int:
            return len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=filters))

        with ThreadPoolExecutor(2) as both:  # xz lets go of the interpreter, and takes most of a small preparation
            behind, alone = both.map(size, (train + validation, train))
        sizes["xz primed with the training text"] = behind - alone
    return {name: {"bits_per_byte": 8 * size / len(validation)} for name, size in sizes.items()}
