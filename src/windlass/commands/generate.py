"""Text from a model: one prompt, one token at a time, with a KV cache.

Each new token needs only its own query: keys and values of earlier positions are kept, so a token costs one pass over the
weights. temperature 0 takes the likeliest token; else the distribution is sharpened by 1/temperature and cut to the smallest set
of tokens with probability top_p (nucleus sampling, Holtzman et al., arXiv 1904.09751). Draws are a function of the seed.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from windlass.data.tokenize.tokenizer import CONFIG_FILE, TOKENIZER_FILE, open_tokenizer
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.cache import KVCache
from windlass.report.events import EventLog
from windlass.training.open_saved import SavedModel, open_saved


def generate(
    path: Path,
    prompts: list[str],
    *,
    step: int | None = None,
    max_tokens: int = 64,
    temperature: float = 0.6,
    top_p: float = 0.95,
    seed: int = 0,
    record: bool = False,
    base: Path | None = None,
) -> list[str]:
    """One continuation per prompt. `record`: also write them to the run's events, for the report. `base`: of a run with an
    adapter, where that has moved. Raises UserError."""
    check_sampling(max_tokens, temperature, top_p)
    if record and not (path / "events.jsonl").is_file():
        raise UserError(
            f"--record with {path}",
            "samples are written into a run's events.jsonl",
            "give the run directory, and --step",
        )
    saved = open_saved(path, step, base=base)
    if not (saved.tokenizer_directory / TOKENIZER_FILE).is_file():
        raise UserError(
            f"{saved.tokenizer_directory} has no {TOKENIZER_FILE}",
            "text is made of a tokenizer's tokens",
            f"copy the model's {TOKENIZER_FILE} and {CONFIG_FILE} there",
        )
    tokenizer, eos_id = open_tokenizer(saved.tokenizer_directory)
    ends = ends_of(saved.architecture, eos_id)
    texts = []
    for prompt in prompts:
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [eos_id]
        new_ids = list(sample(saved, prompt_ids, ends, max_tokens, temperature, top_p, seed))
        texts.append(tokenizer.decode(new_ids))
    if record:
        assert saved.step is not None, "a run directory has checkpoints"
        log = EventLog(path / "events.jsonl")
        for prompt, text in zip(prompts, texts):
            log.write("sample", saved.step, {"prompt": prompt, "text": text})
    return texts


def check_sampling(max_tokens: int, temperature: float, top_p: float) -> None:
    if max_tokens < 1:
        raise UserError(f"--max-tokens {max_tokens}", "at least one token is generated", "use 1 or more")
    if not 0 <= temperature < math.inf:
        raise UserError(
            f"--temperature {temperature}", "a temperature is 0 (greedy) or positive", "0.6 is a usual value"
        )
    if not 0 < top_p <= 1:
        raise UserError(f"--top-p {top_p}", "top-p is a probability above 0", "use 1 for no cut, 0.95 as usual")


def ends_of(architecture: Architecture, eos_id: int) -> set[int]:
    """Where generation stops: at the end of a document, and where the model's own config says."""
    own = architecture.eos_token_id
    return {eos_id, *(own if isinstance(own, tuple) else [] if own is None else [own])}


@torch.no_grad()
def sample(
    saved: SavedModel,
    prompt_ids: list[int],
    ends: set[int],
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> Iterator[int]:
    """New ids until one of `ends`, `max_tokens`, or the last position of the model."""
    model, architecture = saved.model, saved.architecture
    room = architecture.max_positions - len(prompt_ids)
    if room < 1:
        raise UserError(
            f"a prompt of {len(prompt_ids)} tokens for a model of {architecture.max_positions} positions",
            "prompt and continuation fit the model's positions",
            f"shorten the prompt to {architecture.max_positions - 1} tokens or less",
        )
    parameter = next(model.parameters())
    length = min(architecture.max_positions, len(prompt_ids) + max_tokens)
    cache = KVCache(architecture, 1, length, dtype=parameter.dtype, device=parameter.device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([prompt_ids], device=parameter.device)
    for _ in range(min(max_tokens, room)):
        logits_V = model(ids, cache=cache)[0, -1]
        new_id = choose(logits_V.cpu(), temperature, top_p, generator)
        if new_id in ends:
            return
        yield new_id
        ids = torch.tensor([[new_id]], device=parameter.device)


def choose(logits_V: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token id."""
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V, order_V = (logits_V.double() / temperature).softmax(-1).sort(descending=True)
    before_V = probabilities_V.cumsum(-1) - probabilities_V  # a token stays while those before it hold less than top_p
    kept_V = probabilities_V.where(before_V < top_p, 0.0)
    return int(order_V[torch.multinomial(kept_V, 1, generator=generator)])
