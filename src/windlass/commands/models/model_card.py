"""The model card of an export: README.md with the YAML front matter that the Hugging Face hub reads.

It says where the weights come from: the recipe, the run, the step and its validation loss, code, versions, data, the command.
It holds only what is known: a license is never guessed, `base_model` and `datasets` are hub names that the recipe holds.
It gives the number of hosts, and not their names.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jinja2
import yaml

from windlass.adapters.peft_config import CONFIG
from windlass.checkpoint.provenance import redact
from windlass.checkpoint.verify import Checkpoint
from windlass.config import check_recipe, to_yaml
from windlass.data.tokenize.tokenizer import TOKENIZER_FILE
from windlass.hub.config import NAME
from windlass.model.architecture import Architecture
from windlass.model.flops import count_parameters
from windlass.safe_text import printable
from windlass.training.start.base_model import FRONT_MATTER, KEPT_CARD, kept_base_files
from windlass.training.start.open_saved import SavedModel
from windlass.units import format_count
from windlass.version import __version__

TEMPLATE = Path(__file__).with_name("card.md.j2")
SHOWN_PACKAGES = ("torch", "transformers", "tokenizers")
IN_LLAMA_CPP: Final = frozenset(["llama", "mistral", "mixtral", "qwen3", "granite", "olmo2", "smollm3", "starcoder2"])
"""Families whose GGUF was seen to continue a text as transformers does: docs/howto/serve.md says how."""
PLACE: Final = '"PATH OR NAME"'
CONTINUE: Final = """\
ids = tokenizer("A text begins", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))"""
ANSWER: Final = """\
asked = [{"role": "user", "content": "A question?"}]
ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0, ids["input_ids"].shape[1] :]))"""


def write_card(
    directory: Path, saved: SavedModel, dtype: str, command: list[str], compared: str, is_adapter: bool = False
) -> None:
    """README.md of `directory`. `command`: what exported it; `compared`: a sentence on what was checked."""
    template = jinja2.Template(
        TEMPLATE.read_text("utf-8"), keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    architecture = saved.architecture
    config = saved.trainer_state.get("config", {})
    facts = {
        "front_matter": yaml.safe_dump(front_matter(saved, is_adapter), sort_keys=False, allow_unicode=True),
        "base": saved.trainer_state["base"]["from"] if is_adapter else None,
        "ask": ANSWER if saved.has_learned_answers else CONTINUE,
        "config_file": CONFIG if is_adapter else "config.json",
        "title": _title(saved),
        "architecture": f"A {architecture.family} model",
        "parameters": f"{count_parameters(architecture):,} ({format_count(count_parameters(architecture))})",
        "training": _training(config, _record(saved).get("parts", {})),
        "vocabulary": f"Its vocabulary has {architecture.vocab_size:,} tokens.",
        "serving": serving(saved, is_adapter),
        "provenance": provenance(saved, dtype, command),
        "compared": compared,
        "model": json.dumps(
            json.loads((directory / (CONFIG if is_adapter else "config.json")).read_text("utf-8")), indent=2
        ),
        "recipe": to_yaml(check_recipe(config)) if config else "",
        "diff_lines": ((_record(saved).get("git") or {}).get("diff") or "").count("\n"),
    }
    (directory / "README.md").write_text(template.render(facts), "utf-8")


def export_command(
    saved: SavedModel, path: Path, target: Path | None, dtype: str, merge: bool, base: Path | None
) -> list[str]:
    """What exports the same from the directory that the recipe ran in."""
    source = path if saved.step is None else saved.trainer_state["config"]["run"]["directory"]
    words = ["windlass", "export", str(source), *([] if target is None else [str(target)]), "--dtype", dtype]
    words += [] if saved.step is None else ["--step", str(saved.step)]
    return words + ["--merge"] * merge + ([] if base is None else ["--base", str(base)])


def front_matter(saved: SavedModel, is_adapter: bool = False) -> dict[str, Any]:
    """What the hub shows and searches by."""
    config = saved.trainer_state.get("config", {})
    base = config.get("model", {}).get("from")
    sources = [source.get("hub") for source in config.get("data", {}).get("sources", ())]
    library = "peft" if is_adapter else "transformers"
    found: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    kept = kept_base_files(saved.directory) if saved.step is not None else {}
    license_name = base_license(kept.get(KEPT_CARD, b""))
    if license_name is not None:
        found["license"] = license_name
    if base is not None and NAME.fullmatch(base):
        found["base_model"] = base
    if any(sources):
        found["datasets"] = [name for name in sources if name]
    kind = config.get("objective", {}).get("kind")
    adapter = config.get("adapter", {}).get("kind", "none")
    found["tags"] = [
        "windlass",
        saved.architecture.family,
        *([kind] if kind else []),
        *([adapter] * (adapter != "none")),
    ]
    return found


def base_license(card: bytes) -> str | None:
    """The license that the front matter of a card names."""
    match = FRONT_MATTER.match(card.decode("utf-8", errors="replace"))
    try:
        found = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return None
    name = found.get("license") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def serving(saved: SavedModel, is_adapter: bool = False) -> list[tuple[str, str]]:
    """(sentence, command) per tool that serves it. vLLM has every family in its list; llama.cpp reads some of ours otherwise than
    transformers does, or not at all."""
    architecture = saved.architecture
    if is_adapter:
        adapter, base = saved.trainer_state["config"]["adapter"], saved.trainer_state["base"]["from"]
        if adapter["also_train"]:
            return []  # vLLM takes factors alone
        rank = max(16, 1 << (adapter["rank"] - 1).bit_length())
        beside = f"vllm serve {shlex.quote(base)} --enable-lora --max-lora-rank {rank} --lora-modules tuned={PLACE}"
        return [("vLLM, beside its base; requests name the model `tuned`:", beside)]
    found = [("vLLM:", f"vllm serve {PLACE}")]
    if not _is_read_by_llama_cpp(architecture):
        return found
    convert = f"{PLACE} --outfile model.gguf"
    if not _is_trained_here(saved.tokenizer_directory):
        return [*found, ("llama.cpp, in its checkout:", f"python convert_hf_to_gguf.py {convert}")]
    known = 'TextModel.get_vocab_base_pre = lambda *_: "gpt-2"'
    program = f"from conversion.base import TextModel; {known}; import convert_hf_to_gguf as c; c.main()"
    why = "llama.cpp, in its checkout; its converter does not know this tokenizer, which splits text as GPT-2's does:"
    return [*found, (why, f"python -c '{program}' {convert}")]


def _is_trained_here(tokenizer_directory: Path) -> bool:
    """Whether the tokenizer is one as windlass trains them: bytes, split as GPT-2 splits, and one added token, the first. A run
    that begins at an export has it from there, and its own recipe does not say so."""
    file = tokenizer_directory / TOKENIZER_FILE
    if not file.is_file():
        return False
    found = json.loads(file.read_text("utf-8"))
    split, added = found.get("pre_tokenizer") or {}, found.get("added_tokens") or ()
    is_gpt2s = split.get("type") == "ByteLevel" and split.get("use_regex", True) and not split.get("add_prefix_space")
    is_first = [token["id"] for token in added] == [0]  # GPT-2's own token is its last
    return bool(is_gpt2s and is_first and not found.get("normalizer"))


def _is_read_by_llama_cpp(arch: Architecture) -> bool:
    """With a window its text was another; of SmolLM3 it leaves every fourth layer without positions."""
    fourth = tuple(range(3, arch.num_layers, 4)) if arch.family == "smollm3" else ()
    return arch.family in IN_LLAMA_CPP and arch.window is None and arch.unrotated_layers == fourth


def provenance(saved: SavedModel, dtype: str, command: list[str]) -> dict[str, str]:
    """The rows of the card's table."""
    rows: dict[str, str] = {}
    if saved.step is not None:
        manifest, record, state = Checkpoint.open(saved.directory).manifest, _record(saved), saved.trainer_state
        loss = "not measured at this step" if manifest.metric is None else _loss(manifest.metric, state["config"])
        git, hosts = record.get("git"), record.get("hosts", [])
        versions = {name: record.get("packages", {}).get(name) for name in SHOWN_PACKAGES}
        rows |= {
            "run": f"`{manifest.run_id}`, step {saved.step} of {state['total_steps']}",
            "validation loss": loss,
            "data": f"corpus `{state['data']['corpus_hash']}`, {state['samples_consumed']:,} sequences read",
            "code": f"commit `{git['commit']}`" if git else "no git repository",
            "ranks": f"{manifest.world} on {len(set(hosts))} host{'s' if len(set(hosts)) != 1 else ''}",
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
            "trained by": f"`{_command(record.get('argv', []))}`",
        }
        if parts := record.get("parts"):
            rows["of the script"] = ", ".join(f"{kind} `{name}`" for kind, name in parts.items())
        base = state["config"]["model"]
        if base.get("from") is not None:
            rows["base model"] = base["from"] + (f" at commit `{base['commit']}`" if base.get("commit") else "")
    rows["weights"] = f"{dtype}, exported by windlass {__version__}: `{_command(command)}`"
    return {name: printable(text) for name, text in rows.items()}


def _loss(value: float, config: dict[str, Any]) -> str:
    """The loss of the checkpoint's model, with its unit. That model's base may be in NF4 where the export's is not."""
    recipe = check_recipe(config)
    unit = "nats per answer token" if recipe.counts_answers("validation") else "nats per token"
    unit = "per pair" if recipe.objective.unit == "pairs" else unit
    return f"{value:.4f} {unit}" + (", with the base in NF4" if recipe.adapter.base == "nf4" else "")


def _record(saved: SavedModel) -> dict[str, Any]:
    if saved.step is None:
        return {}
    record: dict[str, Any] = json.loads(Checkpoint.open(saved.directory).read("provenance.json"))
    return record


def _command(argv: list[str]) -> str:
    """A command as it was typed: the program by its name, not by its place on that machine; safe in a table."""
    words = [Path(argv[0]).name if argv else "", *redact(argv[1:])]
    if words[0] in ("__main__.py", "cli/main.py"):
        words[0] = "windlass"
    return shlex.join(words).replace("|", "\\|").replace("\n", " ")


def _title(saved: SavedModel) -> str:
    return saved.directory.parent.parent.name if saved.step is not None else saved.directory.name


def _training(config: dict[str, Any], parts: Mapping[str, str]) -> str:
    if not config:
        return "converted from a Hugging Face directory"
    base = config["model"].get("from")
    begun = f"that began from {base}" if base else "trained from random weights"
    adapter = config["adapter"]
    beside = f", as LoRA factors of rank {adapter['rank']} beside it" if adapter["kind"] == "lora" else ""
    objective = f"the objective `{config['objective']['kind']}`"
    if "objective" in parts:
        objective = f"a script's objective `{parts['objective']}`"
    return f"{begun} by {objective}{beside}"
