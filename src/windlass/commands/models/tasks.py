"""Tasks of EleutherAI's evaluation harness (lm-eval) on a model, from local files: `windlass evaluate PATH --tasks FILE`.

The harness asks for three things, and `Scorer` answers them with our model:

    loglikelihood          ln p(continuation | context), and whether greedy decoding says it: tasks with given answers
    loglikelihood_rolling  ln p(text), every token once, each seeing as much before it as the model's positions hold: perplexity
    generate_until         what the model says after a context, up to one of the given strings

Context and continuation are encoded together, and the continuation is what comes behind the tokens of the context alone; white
space at the end of a context belongs to the continuation. So the harness's own models do it, and figures compare.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch

from windlass.commands.models.generate import end_ids, sample, tokenizer_of
from windlass.commands.models.sampling import Sampling
from windlass.errors import UserError
from windlass.training.start.open_saved import SavedModel, open_saved

LOGITS: Final = 1 << 27  # elements of a forward's logits: 512 MiB in fp32
NEW_TOKENS: Final = 256  # the harness's own default
KNOWN: Final = ("until", "max_gen_toks", "do_sample", "temperature", "top_p")


class Scorer:
    """A model that answers the harness's three kinds of request."""

    def __init__(self, saved: SavedModel):
        """Raises UserError for a model without a tokenizer."""
        self._saved = saved
        self._tokenizer, self._eos_id = tokenizer_of(saved)
        self._most = saved.architecture.max_positions

    def loglikelihood(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(nats, is greedy) of each (context, continuation). What is longer than the model loses the begin of its context."""
        return self._score([self._pair(*pair) for pair in pairs])

    def loglikelihood_rolling(self, texts: Iterable[str]) -> list[float]:
        """Nats of each whole text, behind the end of a document."""
        found = []
        for text in texts:
            ids = self._encode(text)
            pieces = [([self._eos_id, *ids[:at]], ids[at : at + self._most]) for at in range(0, len(ids), self._most)]
            found.append(sum(nats for nats, _ in self._score(pieces)))
        return found

    def generate_until(self, requests: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
        """What follows each (context, settings), up to the string that ends it. Raises UserError for settings that are not known
        here."""
        return [self._until(context, settings) for context, settings in requests]

    def _until(self, context: str, settings: dict[str, Any]) -> str:
        unknown = sorted(set(settings) - set(KNOWN))
        if unknown:
            raise UserError(
                f"a task whose generation_kwargs have {', '.join(unknown)}",
                f"known are {', '.join(KNOWN)}",
                "leave the rest out of the task's file",
            )
        given = settings.get("until") or []
        ends = [given] if isinstance(given, str) else given
        most = min(int(settings.get("max_gen_toks", NEW_TOKENS)), self._most - 1)
        temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
        sampling = Sampling(most, temperature, float(settings.get("top_p", 1.0)))
        ids = (self._encode(context) or [self._eos_id])[-(self._most - most) :]
        (new_ids,) = sample(self._saved, [ids], end_ids(self._saved.architecture, self._eos_id), sampling)
        text = self._tokenizer.decode(new_ids)
        found = [at for end in ends if end and (at := text.find(end)) >= 0]
        return text[: min(found)] if found else text

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context.strip():
            return [self._eos_id], self._encode(context + continuation)
        bare = context.rstrip()
        ids = self._encode(bare)
        return ids, self._encode(context + continuation)[len(ids) :]

    @torch.no_grad()
    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(nats, is greedy) of the second of each pair of ids behind the first. Raises UserError for one that is too long."""
        longest = max((len(ids) for _, ids in pairs), default=0)
        if longest > self._most:
            raise UserError(
                f"a continuation of {longest} tokens for a model of {self._most} positions",
                "a continuation is scored as one piece",
                "take tasks with shorter answers",
            )
        rows = [(before + ids)[-(self._most + 1) :] for before, ids in pairs]
        width = max((len(row) for row in rows), default=2) - 1
        at_once = max(1, LOGITS // (width * self._saved.architecture.vocab_size))
        found = []
        for at in range(0, len(rows), at_once):
            part = rows[at : at + at_once]
            ids_BT = torch.tensor(
                [row[:-1] + [0] * (width + 1 - len(row)) for row in part]
            )  # nobody sees what is behind
            logits_BTV = self._saved.model(ids_BT)
            for logits_TV, row, (_, ids) in zip(logits_BTV, part, pairs[at : at + at_once]):
                scored_TV = logits_TV[len(row) - 1 - len(ids) : len(row) - 1].log_softmax(-1)
                targets_T = torch.tensor(ids, dtype=torch.int64)
                nats = scored_TV.gather(1, targets_T[:, None]).double().sum().item()
                found.append((nats, bool((scored_TV.argmax(-1) == targets_T).all())))
        return found


def run_tasks(
    path: Path, tasks: Path, *, step: int | None = None, base: Path | None = None, limit: int | None = None
) -> list[str]:
    """Runs the harness's tasks in a YAML file, or in all those of a directory -> one line per task and metric. `limit`: the
    first rows of each task. Raises UserError, also where lm-eval is not installed."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError(
            "--tasks, and lm-eval is not installed",
            "tasks are run by EleutherAI's harness",
            "pip install 'windlass-lm[eval]'",
        ) from None
    manager = TaskManager(include_path=str(tasks if tasks.is_dir() else tasks.parent), include_defaults=False)
    names = [name for name in manager.all_subtasks if tasks.is_dir() or _file_of(manager, name) == tasks.resolve()]
    if not names:
        raise UserError(
            f"--tasks {tasks}: it holds no task",
            "a task is a YAML file with `task: NAME`, as the harness reads it",
            "give such a file, or the directory that holds it",
        )
    scorer = Scorer(open_saved(path, step, base=base))

    class Model(LM):
        def loglikelihood(self, requests: Any) -> Any:
            return scorer.loglikelihood(one.args for one in requests)

        def loglikelihood_rolling(self, requests: Any) -> Any:
            return scorer.loglikelihood_rolling(one.args[0] for one in requests)

        def generate_until(self, requests: Any) -> Any:
            return scorer.generate_until(one.args for one in requests)

    found = simple_evaluate(Model(), tasks=names, task_manager=manager, limit=limit, log_samples=False)
    assert found is not None, "one process"
    return list(_lines(found["results"]))


def _file_of(manager: Any, name: str) -> Path | None:
    file = manager.task_index[name].yaml_path
    return None if file is None else Path(file).resolve()


def _lines(results: dict[str, dict[str, Any]]) -> Iterable[str]:
    """`task: metric value +- standard error`; the harness calls a metric `acc,FILTER`, and its error `acc_stderr,FILTER`."""
    for task, figures in results.items():
        for key, value in figures.items():
            metric, comma, by = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{metric}_stderr,{by}")
            spread = f" ± {error:.4f}" if isinstance(error, float) else ""
            yield f"{task}: {metric}{'' if by == 'none' else f' ({by})'} {value:.4f}{spread}"
