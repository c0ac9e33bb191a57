"""The other side: what runs in the environment with MosaicML's streaming library. It imports nothing of windlass.

    python benchmarks/meters/mosaic_side.py read DIRECTORY                   sha256 over all samples, in order
    python benchmarks/meters/mosaic_side.py write DIRECTORY IDS.npy KIND     MDSWriter; KIND: none, zstd, zstd:7, gz, snappy, br
    python benchmarks/meters/mosaic_side.py tokens DIRECTORY IDS.npy ENCODING DTYPE KIND    one column, without hashes
    python benchmarks/meters/mosaic_side.py speed DIRECTORY                  one pass of iter(StreamingDataset), and of ds[i]

Each prints one line of JSON.
"""

import hashlib
import json
import sys
import time
import warnings

import numpy as np

warnings.filterwarnings("ignore")


def read(directory: str) -> dict[str, object]:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=directory, remote=None, shuffle=False, batch_size=1, validate_hash="xxh64")
    digest, num_ids = hashlib.sha256(), 0
    for number in range(len(dataset)):
        sample = dataset[number]
        ids = sample["input_ids"].astype("<i4")
        labels = sample.get("labels", ids)
        if "loss_mask" in sample:
            labels = np.where(sample["loss_mask"] != 0, ids, -100)
        digest.update(ids.tobytes() + labels.astype("<i4").tobytes())
        if "document_ends" in sample:
            assert sample["document_ends"].dtype == np.uint8, sample["document_ends"].dtype
            digest.update(sample["document_ends"].tobytes())
        num_ids += len(sample["input_ids"])
    return {"samples": len(dataset), "ids": num_ids, "sha256": digest.hexdigest()}


def write(directory: str, ids: str, kind: str) -> dict[str, object]:
    from streaming import MDSWriter

    pairs = np.load(ids)  # [samples, 2, ids]
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    compression = None if kind == "none" else kind
    with MDSWriter(
        out=directory, columns=columns, compression=compression, hashes=["xxh64"], size_limit=1 << 20
    ) as out:
        for input_ids, labels in pairs:
            out.write({"input_ids": input_ids, "labels": labels})
    return {"samples": len(pairs)}


def tokens(directory: str, ids: str, encoding: str, dtype: str, kind: str) -> dict[str, object]:
    """The column `tokens`, as LLM Foundry has it."""
    from streaming import MDSWriter

    rows = np.load(ids)[:, 0].astype(dtype)
    more = {"columns": {"tokens": encoding}, "compression": None if kind == "none" else kind, "size_limit": 1 << 20}
    with MDSWriter(out=directory, **more) as out:
        for row in rows:
            out.write({"tokens": row.tobytes() if encoding == "bytes" else row})
    return {"samples": len(rows)}


def speed(directory: str) -> dict[str, object]:
    import torch
    from streaming import StreamingDataset

    torch.set_num_threads(1)
    dataset = StreamingDataset(local=directory, remote=None, shuffle=True, batch_size=8)
    found: dict[str, object] = {}
    for name, samples in (("iter", iter(dataset)), ("index", (dataset[number] for number in range(len(dataset))))):
        start_s, start_cpu_s, num_ids = time.perf_counter(), time.process_time(), 0
        for sample in samples:
            num_ids += len(sample["input_ids"])
        used_s, took_s = time.process_time() - start_cpu_s, time.perf_counter() - start_s
        found[name] = {"mtok_per_cpu_s": num_ids / used_s / 1e6, "mtok_per_s": num_ids / took_s / 1e6}
    return found


if __name__ == "__main__":
    print(json.dumps({"read": read, "write": write, "tokens": tokens, "speed": speed}[sys.argv[1]](*sys.argv[2:])))
