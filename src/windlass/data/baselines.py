"""What a model must beat: unigram and bigram predictors, and gzip, bz2, xz, on the validation set.

Predictors are fitted on the training tokens and scored on all validation targets, like the model. (The entropy of the
validation tokens under their own counts is no bar: most pairs occur once, so it is far too low.)

    unigram  q(b)   = (n_b + 1) / (N + V)     bigram   q(b|a) = (n_ab + k q(b)) / (n_a + k),  k = 8
(interpolation with a Dirichlet prior; MacKay and Peto 1995)

bits per byte = summed nats / (ln 2 * bytes): the one figure that compares vocabularies, and models with compressors.
A compressor starts with no knowledge, a model has read the training text; so xz is also shown primed, as the bytes
that the validation text adds when it is compressed behind the training text, with a dictionary that spans both.
"""

import bz2
import gzip
import lzma
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from windlass.data.mds import Reader
from windlass.data.packing import unpack

MAX_TRAIN_TOKENS = 20_000_000  # 160 MB for the pairs, sorted in 2 s; larger corpora have no baselines
MAX_VALIDATION_BYTES = 16 << 20
MAX_PRIMED_BYTES = 32 << 20  # training text for the primed xz: 2 MB/s per core
BIGRAM_PRIOR = 8.0


def are_affordable(train_tokens: int, validation_bytes: int) -> bool:
    return train_tokens <= MAX_TRAIN_TOKENS and validation_bytes <= MAX_VALIDATION_BYTES


def fit_and_score(
    train_directory: Path, validation_directory: Path, vocab_size: int, validation_bytes: int
) -> dict[str, dict[str, float]]:
    """{"unigram": {loss in nats per token, bits_per_byte}, "bigram": ...} over every target of the validation set."""
    train_N = unpack(Reader(train_directory)).astype(np.int64)
    validation_M = unpack(Reader(validation_directory)).astype(np.int64)
    unigram, bigram = predictor_losses(train_N, validation_M, vocab_size)
    per_byte = (len(validation_M) - 1) / (validation_bytes * math.log(2))
    return {
        "unigram": {"loss": unigram, "bits_per_byte": unigram * per_byte},
        "bigram": {"loss": bigram, "bits_per_byte": bigram * per_byte},
    }


def predictor_losses(train_N: np.ndarray, validation_M: np.ndarray, vocab_size: int) -> tuple[float, float]:
    """(unigram, bigram) cross-entropy of validation_M[1:] in nats per token; a token's context is the one before it."""
    counts_V = np.bincount(train_N[1:], minlength=vocab_size)
    contexts_V = np.bincount(train_N[:-1], minlength=vocab_size)
    unigram_V = (counts_V + 1.0) / (len(train_N) - 1 + vocab_size)
    before, after = validation_M[:-1], validation_M[1:]
    pairs, pair_counts = np.unique(train_N[:-1] * vocab_size + train_N[1:], return_counts=True)
    wanted = before * vocab_size + after
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[at] == wanted, pair_counts[at], 0)
    bigram = (seen + BIGRAM_PRIOR * unigram_V[after]) / (contexts_V[before] + BIGRAM_PRIOR)
    return float(-np.log(unigram_V[after]).mean()), float(-np.log(bigram).mean())


def compress(train: bytes, validation: bytes) -> dict[str, dict[str, float]]:
    """Bits per byte of general compressors on the validation text; xz is primed with `train` unless that is empty."""
    sizes = {
        "gzip": len(gzip.compress(validation, 9)),
        "bz2": len(bz2.compress(validation, 9)),
        "xz": len(lzma.compress(validation, preset=6)),
    }
    if train:
        spanning = max(1 << 16, 1 << (len(train) + len(validation)).bit_length())
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": spanning}]

        def size(text: bytes) -> int:
            return len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=filters))

        with ThreadPoolExecutor(2) as threads:  # lzma releases the interpreter lock
            without, together = threads.map(size, (train, train + validation))
        sizes["xz primed with the training text"] = together - without
    return {name: {"bits_per_byte": 8 * size / len(validation)} for name, size in sizes.items()}
