"""Text from a model: prompts together, one token of each at a time, with a KV cache.

Each new token needs only its own query: keys and values of earlier positions are kept, so a token costs one pass over the
weights, for all prompts of a batch together. Rows are padded in front to the longest prompt; the padding is a document of its own
(model/attention/documents.py), so that a row sees itself alone, at its own positions, and says what it says alone. A row that has
ended leaves the batch.

temperature 0 takes the likeliest token; else the distribution is sharpened by 1/temperature and cut to the smallest set of tokens
with probability top_p (nucleus sampling, Holtzman et al., arXiv 1904.09751). Draws are a function of the seed, the prompt, and
how often it came before: not of the batch.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from windlass.commands.models.prompts import Messages, Prompt, prompt_text, shown_prompt
from windlass.commands.models.sampling import USUAL, Sampling
from windlass.data.tokenize.chat_template import PROBE, Template
from windlass.data.tokenize.fitting import LEAST_WORDS
from windlass.data.tokenize.tokenizer import CONFIG_FILE, TOKENIZER_FILE, open_tokenizer
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.cache import KVCache
from windlass.report.events import EventLog
from windlass.safe_text import say
from windlass.training.start.open_saved import SavedModel, open_saved

ROWS: Final = 16  # prompts at a time: a bound on the cache's memory


def generate(
    path: Path | str,
    prompts: Sequence[Prompt],
    sampling: Sampling = USUAL,
    *,
    step: int | None = None,
    chat: bool = False,
    cut_prompt: bool = False,
    record: bool = False,
    base: Path | None = None,
) -> list[str]:
    """One continuation per prompt, in their order; `chat`: one answer to each, a question or the messages of a conversation, as
    the tokenizer's chat template writes them. `cut_prompt`: one that leaves no room is cut, else refused. `record`: also write
    them to the run's events, for the report. `base`: of an adapter, where that has moved. Raises UserError."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        raise UserError(
            f"generate(..., {prompts!r:.80})",
            "prompts are a list: there is one text for each",
            f"give [{prompts!r:.40}]" if isinstance(prompts, str) else "give a list of texts",
        )
    path = Path(path)
    if record and not (path / "events.jsonl").is_file():
        raise UserError(
            f"--record with {path}",
            "samples are written into a run's events.jsonl",
            "give the run directory, and --step",
        )
    saved = open_saved(path, step, base=base)
    if chat:
        writer = ChatWriter(saved, cut_prompt)
        asked = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
        texts = writer.answer(asked, sampling)
    else:
        texts = _continued(saved, prompts, sampling, cut_prompt)
    if record:
        assert saved.step is not None, "a run directory has checkpoints"
        log = EventLog(path / "events.jsonl")
        for prompt, text in zip(prompts, texts):
            log.write("sample", saved.step, {"prompt": shown_prompt(prompt), "text": text})
    return texts


def _continued(saved: SavedModel, prompts: Sequence[Prompt], sampling: Sampling, cut_prompt: bool) -> list[str]:
    if saved.has_learned_answers:
        say("this model has learned answers: --chat asks it in its chat template; here it continues text", sys.stderr)
    tokenizer, eos_id = tokenizer_of(saved)
    given = [tokenizer.encode(prompt_text(prompt), add_special_tokens=False).ids or [eos_id] for prompt in prompts]
    if cut_prompt:
        room = prompt_room(saved, sampling)
        for ids in (ids for ids in given if len(ids) > room):
            say(f"a prompt of {len(ids)} tokens is cut to its last {room}", sys.stderr)
            del ids[:-room]
    return [tokenizer.decode(ids) for ids in sample(saved, given, end_ids(saved.architecture, eos_id), sampling)]


def converse(
    path: Path,
    lines: Iterable[str],
    sampling: Sampling,
    *,
    step: int | None,
    base: Path | None,
    cut_prompt: bool = False,
) -> Iterator[str]:
    """Answers to what the user says line by line; each sees all that was said before it. Raises UserError."""
    writer, said = ChatWriter(open_saved(path, step, base=base), cut_prompt), Messages()
    for line in lines:
        said.append({"role": "user", "content": line})
        (answer,) = writer.answer([said], sampling)
        said.append({"role": "assistant", "content": answer})
        yield answer


class ChatWriter:
    """A model, and conversations as its tokenizer's chat template writes them, with the cue for an answer."""

    def __init__(self, saved: SavedModel, cut_prompt: bool = False):
        """`cut_prompt`: what is asked is cut where it leaves no room. Raises UserError for a tokenizer without a template."""
        self._saved, self._cut_prompt, self._has_said = saved, cut_prompt, False
        self._tokenizer, eos_id = tokenizer_of(saved)
        self._template = Template(saved.tokenizer_directory)
        self._tokenizer.encode_special_tokens = False  # those of the template; in words they are refused
        self._ends = end_ids(saved.architecture, eos_id) | self._turn_end()

    def answer(self, conversations: Iterable[Messages], sampling: Sampling) -> list[str]:
        """What the model says next in each. Raises UserError."""
        given, room = [], prompt_room(self._saved, sampling)
        for messages in conversations:
            self._template.check_words(messages, "what is asked")
            ids = self._asked(messages)
            given.append(self._cut(messages, room) if self._cut_prompt and len(ids) > room else ids)
        return [self._tokenizer.decode(ids) for ids in sample(self._saved, given, self._ends, sampling)]

    def _cut(self, messages: Messages, room: int) -> list[int]:
        """Without the oldest turns behind the system's words; where the last one is too long by itself, without the middle of
        its last message. Raises UserError where hardly a word of that would stay."""
        if not self._has_said:
            say(f"the conversation is cut to {room} tokens: the oldest turns go first (--cut-prompt)", sys.stderr)
            self._has_said = True
        system = messages[: int(messages[0]["role"] == "system")]
        turns = messages[len(system) :]
        while len(ids := self._asked([*system, *turns])) > room:
            later = [number for number, message in enumerate(turns) if number and message["role"] == "user"]
            if not later:
                break
            turns = turns[later[0] :]
        words = self._ids(turns[-1]["content"])
        kept = len(words)
        while len(ids) > room:
            kept -= len(ids) - room
            if kept < LEAST_WORDS:
                given = f"a conversation that needs {len(ids)} tokens with its last message cut to {max(kept, 0)}"
                change = "shorten the messages before the last one, or ask for fewer --max-tokens"
                raise UserError(given, f"{room} tokens have room, and {LEAST_WORDS} of the message are kept", change)
            halves = words[: (kept + 1) // 2], words[len(words) - kept // 2 :]
            last = {**turns[-1], "content": "".join(map(self._tokenizer.decode, halves))}
            ids = self._asked([*system, *turns[:-1], last])
        return ids

    def _asked(self, messages: Messages) -> list[int]:
        return self._ids(self._template.render(messages, "what is asked", cue=True))

    def _turn_end(self) -> set[int]:
        """The first special token that the template writes behind an answer. The tokenizer's EOS may be another one."""
        question, answer = PROBE[:2]
        behind = self._template.render([question, answer], "a probe").rpartition(answer["content"])[2]
        special = {number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return set([number for number in self._ids(behind) if number in special][:1])

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def tokenizer_of(saved: SavedModel) -> tuple[Tokenizer, int]:
    """(tokenizer, EOS id) of a model. Raises UserError where it has none."""
    if not (saved.tokenizer_directory / TOKENIZER_FILE).is_file():
        raise UserError(
            f"{saved.tokenizer_directory} has no {TOKENIZER_FILE}",
            "text is made of a tokenizer's tokens",
            f"copy the model's {TOKENIZER_FILE} and {CONFIG_FILE} there",
        )
    return open_tokenizer(saved.tokenizer_directory)


def end_ids(architecture: Architecture, eos_id: int) -> set[int]:
    """Where generation stops: at the end of a document, and where the model's own config says."""
    own = architecture.eos_token_id
    return {eos_id, *(own if isinstance(own, tuple) else [] if own is None else [own])}


def prompt_room(saved: SavedModel, sampling: Sampling) -> int:
    """Tokens of a prompt that is cut: what the continuation leaves of the positions, and half of them at least."""
    most = saved.architecture.max_positions
    return most - min(sampling.max_tokens, most // 2)


def sample(saved: SavedModel, prompts: Sequence[list[int]], ends: set[int], sampling: Sampling) -> list[list[int]]:
    """New ids of each prompt, until one of `ends`, `max_tokens`, or the last position of the model. Raises UserError for a prompt
    that leaves no position."""
    most = saved.architecture.max_positions
    longest = max(map(len, prompts), default=0)
    if longest >= most:
        raise UserError(
            f"a prompt of {longest} tokens for a model of {most} positions",
            "prompt and continuation fit the model's positions",
            f"shorten the prompt to {most - 1} tokens or less, or add --cut-prompt",
        )
    before: Counter[tuple[int, ...]] = Counter()
    rows = [_Row.begin(ids, before, sampling, most) for ids in prompts]
    for at in range(0, len(rows), ROWS):
        _continue(saved, rows[at : at + ROWS], ends, sampling)
    return [row.new_ids for row in rows]


@dataclass(frozen=True)
class _Row:
    prompt_ids: list[int]
    room: int
    """New tokens at most."""
    generator: torch.Generator
    new_ids: list[int]

    @classmethod
    def begin(cls, ids: list[int], before: Counter[tuple[int, ...]], sampling: Sampling, most: int) -> "_Row":
        """`before`: how often each prompt came; this one is counted."""
        drawn_by = hashlib.blake2b(repr((sampling.seed, before[tuple(ids)], ids)).encode(), digest_size=8).digest()
        before[tuple(ids)] += 1
        generator = torch.Generator().manual_seed(int.from_bytes(drawn_by, "big", signed=True))
        return cls(ids, min(sampling.max_tokens, most - len(ids)), generator, [])


@torch.no_grad()
def _continue(saved: SavedModel, rows: list[_Row], ends: set[int], sampling: Sampling) -> None:
    """Fills `new_ids` of rows of one batch."""
    parameter = next(saved.model.parameters())
    longest = max(len(row.prompt_ids) for row in rows)
    padding = [longest - len(row.prompt_ids) for row in rows]
    capacity = longest + max(row.room for row in rows)
    cache = KVCache(saved.architecture, len(rows), capacity, dtype=parameter.dtype, device=parameter.device)
    ids_BT = torch.tensor([[0] * pad + row.prompt_ids for pad, row in zip(padding, rows)], device=parameter.device)
    # a row without padding is one document: its second begins where no position is
    starts_B2 = torch.tensor([[0, pad or capacity] for pad in padding], device=parameter.device)
    while True:
        logits_BV = saved.model(ids_BT, cache=cache, documents=starts_B2 if any(padding) else None)[:, -1].cpu()
        chosen = [choose_token(one_V, sampling, row.generator) for one_V, row in zip(logits_BV, rows)]
        kept = []
        for number, (row, new_id) in enumerate(zip(rows, chosen)):
            if new_id not in ends:
                row.new_ids.append(new_id)
                if len(row.new_ids) < row.room:
                    kept.append(number)
        if not kept:
            return
        if len(kept) < len(rows):
            rows, padding = [rows[number] for number in kept], [padding[number] for number in kept]
            cache.keep(torch.tensor(kept, dtype=torch.int64, device=parameter.device))
            starts_B2 = starts_B2[kept]
        ids_BT = torch.tensor([[chosen[number]] for number in kept], device=parameter.device)


def choose_token(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities_V, order_V = (logits_V.double() / sampling.temperature).softmax(-1).sort(descending=True)
    before_V = probabilities_V.cumsum(-1) - probabilities_V  # a token stays while those before it hold less than top_p
    kept_V = probabilities_V.where(before_V < sampling.top_p, 0.0)
    return int(order_V[torch.multinomial(kept_V, 1, generator=generator)])
