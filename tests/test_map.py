"""The map of the house: who may import whom, how long a file and a function may be, what no file may hold.

This is the import table of the design as a test. Imports are read with ast, so the lazy ones inside functions count.
Where building shows that a rule is wrong, change the rule here and in docs/design.md with the reason.
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "windlass"

ROOMS = (
    "cli", "commands", "commands.models", "commands.launch", "commands.speed", "commands.recipes", "proof", "training",
    "objectives", "adapters",
    "data", "data.curate", "data.sources", "data.tokenize", "data.tokens", "data.prepare",
    "data.shards", "data.stream", "data.lint", "model", "model.attention", "model.families", "model.head", "model.lora",
    "precision", "parallel", "parallel.rules", "optim", "checkpoint", "report", "report.page", "report.sinks", "launch", "flyte",
    "supervise", "doctor", "hub", "other_names", "profiling", "advice", "ranks", "plan", "training.start", "training.parts",
    "training.sizing",
)  # fmt: skip
HALL = (
    "errors",
    "units",
    "hardware",
    "settings",
    "status",
    "version",
    "other_names.answers",
    "other_names.renamed_keys",
    "other_names.target_names",
    "other_names.values",
    "contract",
    "signals",
    "output",
    "safe_text",
    "object_store",
    "data.batch_fields",
)
# which rooms a room may import besides itself and the lower hall
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "optim": ("ranks",),
    "report": (),
    "precision": ("ranks",),
    "hub": (),
    "other_names": (),
    "ranks": (),
    "checkpoint": ("ranks",),
    "doctor": ("supervise",),
    "supervise": ("report",),  # what it finds is a line of events.jsonl
    "profiling": ("",),
    "advice": ("report", "profiling", "parallel"),
    "plan": ("model", "model.lora", "precision", "parallel"),
    "launch": ("report", "supervise"),
    "data": ("hub",),
    "data.shards": ("data",),
    "data.curate": (),
    "data.sources": ("data", "data.curate", "hub"),
    "data.tokenize": ("data", "data.sources", "hub"),
    "data.tokens": ("data", "data.sources", "data.tokenize", "data.shards"),
    "data.prepare": ("data", "data.curate", "data.sources", "data.tokenize", "data.tokens", "data.shards"),
    "data.stream": ("data", "data.prepare", "data.shards"),
    "data.lint": ("data.tokenize", "data.prepare", "data.shards"),
    "report.page": ("report", "profiling"),
    "report.sinks": ("report",),
    "model": ("model.attention", "model.families", "model.head", "model.lora", "hub", "ranks"),
    "model.attention": ("model",),
    "model.families": ("model",),
    "model.head": ("model",),
    "model.lora": ("adapters", "model"),
    "parallel": ("model", "model.attention", "model.head", "model.lora", "precision", "ranks", "parallel.rules"),
    "parallel.rules": ("model", "model.lora", "parallel", "precision"),
    "objectives": ("model.head", "parallel"),
    "adapters": ("model", "model.lora", "ranks"),
    "training": (
        "", "objectives", "data.tokenize", "data.prepare", "data.stream", "data.lint", "model", "model.families",
        "model.lora", "precision", "parallel", "optim", "checkpoint", "report", "report.page", "report.sinks",
        "supervise", "profiling", "advice", "ranks", "training.start", "training.parts", "training.sizing",
    ),
    "training.start": (
        "", "objectives", "adapters", "data", "data.prepare", "model", "model.lora", "precision", "parallel", "optim",
        "checkpoint", "report", "hub",
    ),
    "training.parts": (
        "", "objectives", "data", "data.prepare", "data.shards", "data.stream", "model", "model.families", "precision",
        "parallel", "optim", "checkpoint", "report", "report.sinks", "plan", "ranks", "training.start",
    ),
    "training.sizing": (
        "", "model", "model.attention", "model.lora", "precision", "parallel", "optim", "plan", "training.start",
        "training.parts",
    ),
    "commands": (
        "", "training", "data.sources", "data.tokenize", "data.prepare", "data.stream", "data.lint", "model",
        "model.lora", "precision", "parallel", "parallel.rules", "checkpoint", "report", "report.page", "supervise",
        "doctor", "profiling", "ranks", "training.start",
    ),
    "commands.models": (
        "", "training", "objectives", "adapters", "data.sources", "data.tokenize", "data.prepare", "data.stream",
        "model", "model.lora", "precision", "parallel", "optim", "checkpoint", "report", "hub", "training.start",
        "training.parts",
    ),
    "commands.launch": ("", "training", "data.prepare", "model", "launch"),
    "commands.speed": ("", "checkpoint", "report", "advice"),
    "commands.recipes": ("", "data", "data.sources", "data.tokenize", "model", "hub", "other_names"),
    "proof": (
        "", "training", "adapters", "data", "data.prepare", "data.shards", "data.stream", "model", "model.attention",
        "model.families", "model.lora", "precision", "parallel", "parallel.rules", "optim", "report", "ranks",
        "training.start", "training.parts",
    ),
    "flyte": ("", "commands.models", "training", "data", "data.prepare", "checkpoint", "report.page", "training.start"),
    "cli": (
        "", "commands", "commands.models", "commands.launch", "commands.speed", "commands.recipes", "proof", "training",
        "report.sinks",
        "launch", "training.start",
    ),
    "": (  # config checks a recipe by the rules; they take an Architecture
        "cli", "model", "model.families", "parallel.rules", "ranks",
    ),
}  # fmt: skip

# room -> the modules that other rooms may import; the docstring of the room's __init__ lists them first
PUBLIC: dict[str, tuple[str, ...]] = {
    "checkpoint": (
        "config",
        "checkpoints",
        "restore",
        "commit",
        "manifest",
        "verify",
        "index",
        "keep",
        "sealed_json",
        "grid",
        "reshard",
        "provenance",
        "mirror",
        "shared_storage",
    ),
    "cli": ("main",),
    "commands": (
        "smoke",
        "checkpoints",
        "reshard",
        "report",
        "stacks",
        "profile",
        "status",
        "doctor",
        "data_inspect",
        "data_lint",
        "data_consumed",
        "prepare_parts",
    ),
    "commands.launch": ("slurm", "kubernetes", "flyte", "sky"),
    "commands.models": ("evaluate", "tasks", "generate", "sampling", "prompts", "export"),
    "commands.speed": ("advise", "bench"),
    "commands.recipes": ("new_recipe",),
    "data": ("config", "batch_fields", "held_out", "files", "packing", "verified_file"),
    "data.curate": ("config", "filters", "language", "near_duplicates"),
    "data.lint": ("statistics", "lint", "findings", "overview"),
    "data.prepare": ("prepare", "manifest", "background", "part", "part_record"),
    "data.shards": ("mds", "shard_format", "index", "small_files", "config", "cache", "remote", "journal", "growing"),
    "data.sources": (
        "config",
        "scan",
        "source_files",
        "known_hashes",
        "hub",
        "growing",
        "chat_rows",
        "preference_rows",
        "fetch",
        "select",
        "bad_rows",
        "compression",
    ),
    "data.tokens": ("token_files", "documents", "token_parts"),
    "data.stream": (
        "open_stream",
        "open_order",
        "batch_source",
        "config",
        "mixture_shares",
        "loader",
        "ledger",
        "evaluation_set",
    ),
    "data.tokenize": (
        "tokenizer",
        "tiktoken_encoder",
        "pool",
        "resume",
        "chat_template",
        "template_files",
        "encode_rows",
        "cores",
        "fitting",
        "preferences",
        "fill_in_middle",
        "flags",
    ),
    "hub": ("client", "config", "push"),
    "flyte": ("tasks", "ranks"),
    "launch": ("local", "nodes", "restarts", "slurm", "kubernetes", "flyte", "sky", "job_names", "config"),
    "doctor": ("diagnosis", "gpus", "host", "network", "run_storage"),
    "supervise": (
        "heartbeat",
        "rank_stacks",
        "incident",
        "watchdog",
        "beside",
        "across_hosts",
        "host_faults",
        "resident",
        "gpu_health",
        "kernel_log",
    ),
    "model": (
        "config",
        "open_config",
        "architecture",
        "names",
        "flops",
        "transformer",
        "layers",
        "moe",
        "kernels",
        "dropout",
        "chunks",
        "cache",
        "slices",
        "init",
        "weight_files",
        "hf",
    ),
    "model.attention": ("attend", "layout", "documents", "context", "flash_versions"),
    "model.families": ("family_table", "family", "rope_scaling", "presets"),
    "model.head": ("head", "loss", "source_losses"),
    "model.lora": ("adapter", "linear", "nf4"),
    "objectives": ("config", "objective", "kept_scores"),
    "adapters": ("config", "peft_config", "peft_format"),
    "optim": ("config", "optimizer", "elementwise", "rules", "groups", "clip", "schedule"),
    "profiling": ("recorder", "summary"),
    "advice": ("facts", "observed", "levers", "mfu"),
    "parallel": (
        "config",
        "mesh",
        "program",
        "records",
        "build",
        "stages",
        "activations",
        "invariants",
        "runtime_checks",
    ),
    "other_names": ("answers", "renamed_keys", "table", "values", "target_names"),
    "parallel.rules": ("check_layout", "pipeline", "schedules", "batch", "budget"),
    "precision": ("config", "policy", "masters", "sums", "fp8", "fp8_weights", "loss_scale", "same_bits"),
    "plan": ("memory", "sizes", "zero"),
    "proof": ("verify",),
    "ranks": ("meeting", "awaited_work", "tree", "stopping", "owned_part", "open_files"),
    "report": ("config", "events", "metrics", "recorded_run", "console"),
    "report.page": ("write", "serve", "child", "data_page"),
    "report.sinks": ("sync", "start", "follow", "sink"),
    "training": (
        "config",
        "loop",
        "assemble",
        "preflight",
        "interruptible",
        "run_directory",
        "left_open",
    ),
    "training.start": ("pins", "open_saved", "model_plan", "parameter_rules", "base_model", "restore", "drift"),
    "training.parts": (
        "open_data",
        "open_program",
        "open_checkpoints",
        "open_recorder",
        "device_memory",
        "own_parts",
        "reference_scores",
    ),
    "training.sizing": ("choose_sizes", "choose_flash", "out_of_memory", "compiled"),
}
TORCH_FREE = (
    *(f"windlass.{room}.config" for room, names in PUBLIC.items() if "config" in names),
    *(f"windlass.{room}.{name}" for room in ("parallel.rules", "plan") for name in PUBLIC[room]),
    *(
        f"windlass.{name}"
        for name in (
            "config",
            "launch.local",
            "training.interruptible",
            "contract",
            "signals",
            "output",
            "errors",
            "hardware",
            "other_names.answers",
            "other_names.renamed_keys",
            "recipe",
            "safe_text",
            "settings",
            "units",
        )
    ),
)
MAX_PUBLIC = 12  # besides config and the modules that load no torch
MAX_FILES = 20  # of a folder; over a dozen, its docstring puts the public ones first
INDEXED = {
    "docs/howto",
    "docs/techniques",
    "benchmarks/results",
}  # a page a subject, which docs/index.md groups; a file a script
LAZY = {  # imports of ours inside a function
    **{
        ("windlass", f"windlass.{module}"): "importing windlass loads nothing"
        for module in (
            "config",
            "commands.models.evaluate",
            "commands.models.export",
            "commands.models.generate",
            "commands.models.sampling",
            "proof.verify",
        )
        + ("training.loop", "training.start.pins", "training.preflight")
    },
    ("windlass.report.sinks.follow", "windlass.report.sinks.to_tensorboard"): "its package is an extra",
    ("windlass.report.sinks.follow", "windlass.report.sinks.to_wandb"): "its package is an extra",
    ("windlass.report.sinks.follow", "windlass.report.sinks.to_trackio"): "its package is an extra",
    ("windlass.checkpoint.keep", "windlass.checkpoint.staging"): "`windlass checkpoint list` loads no torch",
}
# names of files that two folders have; the folder says which is meant
SAME_NAME = {
    "build",
    "cache",
    "checkpoints",
    "config",
    "context",
    "documents",
    "errors",
    "expert",
    "flyte",
    "growing",
    "index",
    "kubernetes",
    "manifest",
    "pipeline",
    "pool",
    "reshard",
    "restore",
    "sky",
    "slurm",
    "status",
    "tasks",
    "verify",
}

# commands: a function of cli/ parses one, or a task of flyte/ starts it, and the function that does the work has the same name;
# any other name belongs to one public function, so that a search finds the right one
SAME_COMMAND = {
    "advise",
    "bench",
    "doctor",
    "evaluate",
    "export",
    "generate",
    "import_file",
    "init",
    "launch_flyte",
    "launch_kubernetes",
    "launch_nodes",
    "launch_sky",
    "launch_slurm",
    "main",  # the process, and the command line that it runs
    "prepare",
    "profile",
    "report",
    "runs",
    "stacks",
    "status",
    "sync",
    "train",
    "verify",
}

MAX_FILE_LINES = 300
MAX_IMPORTS_OF_ASSEMBLE = 20  # modules of ours: each makes one part of a run, or checks it
MAX_FUNCTION_LINES = 50
LONGER_FUNCTIONS = {("training/loop.py", "loop"): 80}  # the loop is one page
# recipe.py for ${NAME} alone, the doctor to look at the whole environment, prepare_parts for the task's number in its array
ENVIRONMENT_READERS = (
    *("runtime.py", "contract.py", "launch/", "recipe.py", "commands/doctor.py", "commands/prepare_parts.py"),
    "precision/same_bits.py",  # writes what cuBLAS reads
)
# an __init__ is a docstring; this one is not
INIT_WITH_CODE = {"__init__.py": "fetches its functions when they are first named"}
BROAD_EXCEPT = {
    "model/attention/flash_versions.py": "a kernel's package, or its compiler, raises anything: said, and torch's own runs",
    "__main__.py": "whatever a rank failed with, it ends at once, with its words and its code",
    "data/sources/urls.py": "each file system of fsspec raises its own library's errors: named with the URL; others are raised",
    "signals.py": "whatever work in a thread raises is raised by the caller",
    "object_store.py": "each file system of fsspec raises its own library's errors: retried, then named with the URL",
    "report/events.py": "a listener of a script may raise anything: logged, and it is not called again",
    "report/sinks/start.py": "a sink of a script may raise anything: logged, and the run goes on without it",
    "data/stream/loader.py": "whatever the loader's thread raises is raised by next()",
    "data/tokenize/tokenizer.py": "tokenizers raises a bare Exception for a file that it cannot read: named with the file",
    "proof/pool.py": "a pool's rank sends whatever it raised to the caller, who raises it",
    "flyte/page.py": "an upload raises whatever Flyte raises: said, and tried again",
    "checkpoint/exchange.py": "one rank's failure is carried to all ranks, which raise it together; alone it would hang them",
}
# files whose behaviour is proved where it is used: each with the test that turns red
NO_TEST_OF_ITS_OWN = {
    "data/batch_fields.py": "an alias and a number",
    "__main__.py": "one line: python -m windlass",
    "cli/checkpoint.py": "cli/test_main.py runs its commands, commands/test_checkpoints.py and test_reshard.py what they call",
    "cli/models.py": "cli/test_main.py runs its commands, commands/models/ what they call",
    "report/sinks/sink.py": "a protocol, and what it is given: report/sinks/test_follow.py",
    "cli/recipes.py": "commands/recipes/test_new_recipe.py types its commands",
    "commands/recipes/first_rows.py": "commands/recipes/test_new_recipe.py: files of each shape, and few rows that differ",
    "commands/recipes/foreign_facts.py": "commands/recipes/test_import_recipe.py: six files, whole",
    "commands/recipes/foreign_files.py": "commands/recipes/test_import_recipe.py: six files, whole",
    "commands/recipes/torchtune_file.py": "commands/recipes/test_import_recipe.py: six files, whole",
    "cli/runs.py": "cli/test_main.py runs its commands, commands/test_status.py, test_stacks.py, speed/ what they call",
    "cli/data.py": "cli/test_main.py runs its commands, commands/test_data_*.py what they call",
    "data/held_out.py": "data/test_config.py: every form of validation; data/prepare/test_hold_out.py: what is held out",
    "data/tokenizer_config.py": "data/test_config.py: every rule",
    "data/tokens/stored_row.py": "data/tokens/test_documents.py reads rows of every kind; test_megatron.py damages files",
    "data/sources/shape_config.py": "data/sources/test_row_shapes.py: every shape, and every mapping that cannot be; "
    "data/tokenize/test_fill_in_middle.py: marks",
    "data/stream/batch_source.py": "a protocol; data/stream/test_loader.py reads every source by it",
    "other_names/answers.py": "other_names/test_table.py: what a recipe with a row of the table is answered",
    "other_names/spellings.py": "other_names/test_table.py: every spelling, where a recipe has it",
    "hub/errors.py": "hub/test_client.py: every refusal of a hub that refuses",
    "checkpoint/manifest.py": "checkpoint/test_verify.py and test_commit.py read and write nothing else",
    "model/attention/layout.py": "a frozen record; model/attention/test_attend.py reads every field of it",
    "model/chunks.py": "a frozen record; attention/test_unfused.py, test_loss.py and proof/test_watch.py build with small ones",
    "model/head/head.py": "model/head/test_loss.py: chunks, padding, precision, under FSDP2",
    "training/memory_advice.py": "training/sizing/test_out_of_memory.py: a step that runs out",
    "training/parts/open_recorder.py": "training/test_assemble.py: one console; training/test_run.py reads what it records",
    "training/parts/open_data.py": "training/test_assemble.py opens a run's, commands/models/test_evaluate.py sets alone",
    "adapters/config.py": "model/lora/test_adapter.py and training/runs/test_adapter_run.py: its rules, where recipes are read",
    "doctor/diagnosis.py": "a named tuple: doctor/test_*.py read every field",
    "commands/models/export_adapter.py": "training/runs/test_adapter_run.py exports every adapter, both ways",
    "proof/proxy_adapter.py": "proof/test_verify.py proves recipes with adapters",
    "flyte/ranks.py": "flyte/test_tasks.py: which failures of a container with two ranks are retried",
    "training/parts/reference_scores.py": "training/runs/test_preference_run.py: kept, read again, damaged, of other weights",
    "proof/proxy_data.py": "proof/test_proxy.py",
    "proof/reference_preference.py": "proof/test_same_loss.py: ours against it",
    "proof/reference_routers.py": "proof/test_same_loss.py: ours against it",
    "proof/reference_adapter.py": "proof/test_same_loss.py and model/lora/test_nf4.py: ours against it",
    "launch/volume.py": "launch/test_kubernetes.py and launch/test_flyte.py: what is not on the volume is refused",
    "parallel/cut.py": "parallel/test_tensor.py: what it sends, and what it computes",
    "model/lora/linear.py": "model/lora/test_adapter.py computes with it, with and without factors",
}


def source_files():
    return sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(), str(path))


def place(path):
    return path.relative_to(SOURCE).as_posix()


def room_of(module):
    """ "data.sources" of windlass.data.sources.scan; "" for a file of the hall."""
    inner = module.removeprefix("windlass").strip(".")
    return inner if inner in ROOMS else inner.rpartition(".")[0]


def module_of(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("windlass", *(part for part in parts if part != "__init__")))


def imports_of(tree, module):
    """(line, full name of ours) for every import: `from a.b import c` gives a.b.c when that is a module, else a.b."""
    package = module if (SOURCE.parent / Path(*module.split("."))).is_dir() else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = SOURCE.parent / Path(*base.split(".")) / alias.name
                is_module = deeper.is_dir() or deeper.with_suffix(".py").is_file()
                yield node.lineno, f"{base}.{alias.name}" if is_module or base == "windlass" else base


def forbidden_imports(module, tree):
    room = room_of(module)
    found = []
    for line, name in imports_of(tree, module):
        if name.split(".")[0] != "windlass" or name.removeprefix("windlass.") in HALL:
            continue
        other = room_of(name)
        is_config = name.endswith(".config") and module.endswith(
            ".config"
        )  # a recipe's sections are made of each other
        is_door = module == "windlass" and (module, name) in LAZY  # the package hands out functions of any room
        if other != room and other not in MAY_IMPORT[room] and not is_config and not is_door:
            found.append((line, name))
    return found


def functions_of(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def reads_environment(tree):
    """Lines that touch os.environ or os.getenv, under whatever name os or they were imported."""
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names = {alias.asname or alias.name for alias in imports if alias.name == "os"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
            if isinstance(node.value, ast.Name) and node.value.id in names:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in ("environ", "environb", "getenv"))


def broad_excepts(tree):
    """Lines of `except:`, `except Exception` and `except BaseException`, alone or in a tuple, that do not raise again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            last = node.body[-1]
            if isinstance(last, ast.Raise) and last.exc is None:
                continue
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(
                one is None or (isinstance(one, ast.Name) and one.id in ("Exception", "BaseException"))
                for one in caught
            ):
                yield node.lineno


def assert_none(found):
    """Fails with one finding per line, all of them."""
    assert not found, "\n" + "\n".join(str(one) for one in found)


def inside_and_public(room):
    """(public, inside): the modules that the docstring of a room's __init__ lists, before and after the line "Inside:"."""
    lines = ast.get_docstring(tree_of(SOURCE.joinpath(*room.split("."), "__init__.py"))).splitlines()
    files = {path.stem for path in SOURCE.joinpath(*room.split(".")).glob("*.py")} - {"__init__"}
    at = lines.index("Inside:") if "Inside:" in lines else len(lines)
    first_words = [line.split(" ")[0] for line in lines]
    return [word for word in first_words[:at] if word in files], [word for word in first_words[at:] if word in files]


@functools.cache
def edges():
    """Every import of ours: (importing module, line, imported module, whether it is inside a function)."""
    return list(_edges())


def _edges():
    for path in source_files():
        tree, module = tree_of(path), module_of(path)
        at_top = {
            line
            for node in tree.body
            for line, _ in imports_of(ast.Module([node], []), module)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        for line, name in imports_of(tree, module):
            if name.split(".")[0] == "windlass":
                yield module, line, name, line not in at_top


def circles(graph):
    """The circles of a directed graph: sets of nodes that reach each other (Tarjan 1972)."""
    number, low, stack, found = {}, {}, [], []

    def visit(node):
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in number:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == number[node]:
            circle = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in list(graph):
        if node not in number:
            visit(node)
    return found


def test_only_public_modules_of_a_room_are_imported_from_outside():
    found = []
    for module, line, name, _ in edges():
        room, other = room_of(module), room_of(name)
        if other in ("", room) or name.rpartition(".")[2] in PUBLIC[other]:
            continue
        found.append(f"{module}:{line} imports {name}")
    assert_none(found)


def test_a_rooms_init_lists_its_public_modules():
    listed = {room: inside_and_public(room)[0] for room in ROOMS}
    assert listed == {room: list(PUBLIC[room]) for room in ROOMS}
    imported = {name for module, _, name, _ in edges() if room_of(module) != room_of(name)}
    imported |= {"windlass.flyte.tasks", "windlass.flyte.ranks"}  # by the pipeline that launch/flyte.py writes
    unused = [f"{room}.{name}" for room in ROOMS for name in PUBLIC[room] if f"windlass.{room}.{name}" not in imported]
    assert_none(unused)


def test_no_files_import_each_other_in_a_circle():
    graph = {}
    for module, _, name, _ in edges():
        graph.setdefault(module, set()).add(name)
    assert_none(circles(graph))


def circles_of_subjects(imports):
    """Circles between subjects: a room with the rooms in it. `imports`: (importing module, imported module). A recipe is made of
    its sections, so that config.py of a subject is imported by any other."""
    graph = {}
    for module, name in imports:
        one, other = (part.removeprefix("windlass").strip(".").split(".")[0] for part in (module, name))
        if one and one != other and room_of(name) and not name.endswith(".config"):
            graph.setdefault(one, set()).add(other)
    return circles(graph)


def test_subjects_import_each_other_in_no_circle():
    assert_none(circles_of_subjects((module, name) for module, _, name, _ in edges()))


def test_nothing_of_ours_is_imported_inside_a_function():
    lazy = {(module, name) for module, _, name, is_lazy in edges() if is_lazy and room_of(module) != "cli"}
    assert_none(sorted(lazy - set(LAZY)))


def test_folders_are_small_and_names_differ():
    folders = {}
    for path in source_files():
        folders.setdefault(path.parent, []).append(path.stem)
    assert_none([f"{place(folder)}: {len(files)}" for folder, files in folders.items() if len(files) > MAX_FILES])
    for name in ("tests", "docs", "benchmarks", "scripts", "recipes"):
        kept = [folder for folder in (ROOT / name).rglob("*") if folder.is_dir() and folder.name != "__pycache__"]
        for folder in {ROOT / name, *kept} - {ROOT / indexed for indexed in INDEXED}:
            files = [
                path for path in folder.iterdir() if path.is_file() and path.name not in ("__init__.py", "conftest.py")
            ]
            assert len(files) <= MAX_FILES, f"{folder.relative_to(ROOT)}: {len(files)}"
    stems = [path.stem for path in source_files() if not path.stem.startswith("__")]
    assert {stem for stem in stems if stems.count(stem) > 1} == SAME_NAME


def test_no_two_classes_have_one_name():
    names = [
        node.name
        for path in source_files()
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert_none(sorted({name for name in names if names.count(name) > 1}))


def functions_by_name(trees):
    """name -> the files that define a public function of that name at their top. trees: file -> its tree."""
    found = {}
    for file, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(file)
    return found


def ambiguous_functions(trees, same_command):
    """Names that several functions have, unless it is a command with exactly one function outside cli/ and flyte/."""
    several = {name: files for name, files in functions_by_name(trees).items() if len(files) > 1}
    inner = {
        name: [file for file in files if not file.startswith(("cli/", "flyte/"))] for name, files in several.items()
    }
    return [f"{name}: {files}" for name, files in several.items() if name not in same_command or len(inner[name]) != 1]


def test_no_two_functions_have_one_name():
    trees = {place(path): tree_of(path) for path in source_files()}
    assert_none(ambiguous_functions(trees, SAME_COMMAND))
    found = functions_by_name(trees)
    assert_none(sorted(name for name in SAME_COMMAND if len(found.get(name, ())) < 2))


def test_a_room_has_a_small_door():
    graph = {}
    for path in source_files():
        names = {name for node in tree_of(path).body for _, name in imports_of(ast.Module([node], []), module_of(path))}
        graph[module_of(path)] = names
    with_torch = {
        room: [name for name in names if name != "config" and loads_torch(graph, f"windlass.{room}.{name}")]
        for room, names in PUBLIC.items()
    }
    assert "build" in with_torch["parallel"] and "manifest" not in with_torch["checkpoint"]
    assert_none([f"{room}: {len(names)}" for room, names in with_torch.items() if len(names) > MAX_PUBLIC])


def loads_torch(graph, start):
    return "torch" in {name.split(".")[0] for name in reached(graph, start)}


def reached(graph, start):
    """Everything that `start` imports, itself and by others."""
    seen, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph.get(name, ())
    return seen


def test_configs_rules_and_the_hall_load_no_torch():
    program = "; ".join(f"import {name}; 'torch' in sys.modules and print('torch: {name}')" for name in TORCH_FREE)
    done = subprocess.run([sys.executable, "-c", f"import sys; {program}"], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_every_folder_is_a_known_room_with_something_in_it():
    folders = {path.parent.relative_to(SOURCE).as_posix().replace("/", ".") for path in source_files()} - {"."}
    assert folders == set(ROOMS)
    assert [room for room in ROOMS if len(list(SOURCE.joinpath(*room.split(".")).glob("*.py"))) < 2] == []


def test_imports_go_down_only():
    assert_none(
        [
            f"{place(path)}:{line} imports {name}"
            for path in source_files()
            for line, name in forbidden_imports(module_of(path), tree_of(path))
        ]
    )


def test_every_room_that_a_room_may_import_is_imported():
    """A grant that nothing uses forbids nothing."""
    used = {room: set() for room in MAY_IMPORT}
    for module, _, name, _ in edges():
        is_door = module == "windlass" and (module, name) in LAZY
        if not is_door and not (name.endswith(".config") and module.endswith(".config")):
            used[room_of(module)].add(room_of(name))
    assert_none([f"{room}: {one}" for room, grants in MAY_IMPORT.items() for one in grants if one not in used[room]])


def test_a_rooms_config_imports_configs_its_own_room_and_the_lower_hall():
    """So that a recipe can be checked without a file, a network or another room."""
    allowed = {f"windlass.{name}" for name in HALL} | {f"windlass.{room}.config" for room in ROOMS}
    found = []
    for module, _, name, _ in edges():
        room, is_config = module.rpartition(".")[0], module.endswith(".config") and module != "windlass.config"
        if is_config and name not in allowed and not name.startswith(f"{room}."):
            found.append(f"{module} imports {name}")
    assert_none(found)


FILE_CALLS = {"open", "read_text", "read_bytes", "is_file", "is_dir", "exists", "stat", "iterdir", "glob"}


def test_a_rooms_config_looks_at_no_file():
    assert_none(
        [
            f"{place(path)}:{node.lineno} calls {node.attr}"
            for path in source_files()
            if path.name == "config.py" and path.parent != SOURCE
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute) and node.attr in FILE_CALLS
        ]
    )


def test_config_files_and_the_hall_import_no_heavy_library():
    heavy = {"torch", "transformers", "datasets", "tokenizers", "numpy", "safetensors"}
    hall = [path for path in source_files() if path.name == "config.py" or path.parent == SOURCE]
    assert_none(
        [
            f"{place(path)}:{node.lineno} imports {name}"
            for path in hall
            if path.name not in ("runtime.py", "host_speeds.py", "flight_recorder.py")  # they speak with other ranks
            for node in tree_of(path).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
            if name.split(".")[0] in heavy
        ]
    )


def test_files_are_short():
    lengths = {place(path): len(path.read_text().splitlines()) for path in source_files()}
    assert_none([f"{name}: {length} lines" for name, length in lengths.items() if length > MAX_FILE_LINES])


def test_assemble_makes_a_run_of_few_parts():
    """Past the limit a rare feature has come into the file, where it belongs into the file that makes its part."""
    imported = sorted({name for module, _, name, _ in edges() if module == "windlass.training.assemble"})
    assert "windlass.training.parts.open_program" in imported
    assert len(imported) <= MAX_IMPORTS_OF_ASSEMBLE, imported


def test_functions_are_short():
    lengths = {
        (place(path), function.name): function.end_lineno - function.lineno + 1
        for path in source_files()
        for function in functions_of(tree_of(path))
    }
    limits = {where: LONGER_FUNCTIONS.get(where, MAX_FUNCTION_LINES) for where in lengths}
    assert_none([f"{where}: {length} lines" for where, length in lengths.items() if length > limits[where]])


def test_every_file_opens_with_what_it_is():
    assert_none([place(path) for path in source_files() if not ast.get_docstring(tree_of(path))])


def test_a_rooms_init_is_a_docstring_only():
    inits = [path for path in source_files() if path.name == "__init__.py" and place(path) not in INIT_WITH_CODE]
    assert_none([place(path) for path in inits if len(tree_of(path).body) != 1])


def test_a_rooms_init_names_every_file_of_it():
    missing = []
    for path in source_files():
        index = path.parent / "__init__.py"
        if not path.stem.startswith("__"):
            first_words = {line.split(" ")[0] for line in ast.get_docstring(tree_of(index)).splitlines() if line}
            missing += [] if path.stem in first_words else [place(path)]
    assert_none(missing)


def test_the_door_of_the_command_line_names_every_command():
    """In the line of the file that parses it."""
    from windlass import cli
    from windlass.cli.main import app

    commands = [(one.name or one.callback.__name__, one.callback.__module__) for one in app.registered_commands]
    groups = [
        (one.name, one.typer_instance.registered_commands[0].callback.__module__) for one in app.registered_groups
    ]
    lines = {line.partition(" ")[0]: line for line in cli.__doc__.splitlines()}
    missing = [
        f"{file.rpartition('.')[2]}: {name}"
        for name, file in (*commands, *groups)
        if not re.search(rf"`(windlass )?{name}[ `]", lines[file.rpartition(".")[2]])
    ]
    assert_none(missing)
    assert len(commands) > 15 and {name for name, _ in groups} == {"data", "checkpoint", "launch"}


def test_the_environment_is_read_where_it_is_listed():
    others = [path for path in source_files() if not place(path).startswith(ENVIRONMENT_READERS)]
    assert_none([f"{place(path)}:{line}" for path in others for line in reads_environment(tree_of(path))])


def test_nothing_catches_what_it_cannot_know():
    strict = [path for path in source_files() if place(path) not in BROAD_EXCEPT]
    assert_none([f"{place(path)}:{line}" for path in strict for line in broad_excepts(tree_of(path))])
    assert_none([name for name in BROAD_EXCEPT if not any(broad_excepts(tree_of(SOURCE / name)))])


def test_no_global_statement():
    nodes = [(path, node) for path in source_files() for node in ast.walk(tree_of(path))]
    assert_none([f"{place(path)}:{node.lineno}" for path, node in nodes if isinstance(node, ast.Global)])


def mirror_of(path):
    """The file of tests that mirrors a file of the source."""
    room = "hall" if path.parent == SOURCE else path.parent.relative_to(SOURCE)
    return ROOT / "tests" / room / f"test_{path.name}"


def test_tests_mirror_the_source():
    tested = [path for path in source_files() if path.name != "__init__.py" and place(path) not in NO_TEST_OF_ITS_OWN]
    assert_none([str(path.relative_to(ROOT)) for path in map(mirror_of, tested) if not path.is_file()])


def test_what_has_no_test_of_its_own_is_tested_where_it_says():
    assert_none([name for name in NO_TEST_OF_ITS_OWN if mirror_of(SOURCE / name).is_file()])
    known = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = [(name, test) for name, why in NO_TEST_OF_ITS_OWN.items() for test in re.findall(r"test_\w+\.py", why)]
    assert_none([f"{name}: {test}" for name, test in named if test not in known])
    paths = [
        (name, test) for name, why in NO_TEST_OF_ITS_OWN.items() for test in re.findall(r"[a-z_/]+/test_\w+\.py", why)
    ]
    assert_none([f"{name}: {test}" for name, test in paths if not list((ROOT / "tests").rglob(test))])


def modules_after(statement):
    """Every module that is loaded once `statement` has run in a fresh interpreter."""
    code = f"import sys; {statement}; print(); print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def loaded_by(statement):
    return {name.split(".")[0] for name in modules_after(statement)}


@pytest.mark.parametrize("module", ["windlass", "windlass.cli.main", "windlass.config"])
def test_the_hall_loads_no_torch(module):
    assert not {"torch", "transformers", "numpy", "datasets"} & loaded_by(f"import {module}")


def test_importing_windlass_loads_nothing_else():
    """Counted in modules, not in seconds: what Python itself loads for a module that imports `typing` and no more."""
    assert modules_after("import windlass") - modules_after("import typing") == {
        "windlass",
        "windlass.errors",
        "windlass.safe_text",
        "windlass.version",
    }


def test_the_loop_loads_no_pipelining_and_no_compiler():
    """216 modules of 2,462. A launcher, evaluate and generate do without; in a run torch's Optimizer loads dynamo by itself."""
    assert not {"torch.distributed.pipelining", "torch._dynamo", "torch._inductor"} & modules_after(
        "import windlass.training.loop"
    )


def test_a_recipe_and_its_fingerprint_need_no_torch():
    assert "torch" not in loaded_by("from windlass import fingerprint, load_recipe, parse_recipe")


def test_help_loads_no_heavy_library():
    heavy = {"torch", "transformers", "numpy", "datasets", "tokenizers", "pyarrow", "pydantic"}
    assert not heavy & loaded_by("from windlass.cli.main import app; app(['--help'], standalone_mode=False)")


# ---- the checks themselves, on code that breaks each rule


def test_the_import_rule_sees_lazy_and_relative_imports():
    lazy = ast.parse("def f():\n    from windlass.data.nothing import thing\n    import windlass.cli.main")
    assert forbidden_imports("windlass.model.x", lazy) == [(2, "windlass.data.nothing"), (3, "windlass.cli.main")]
    relative = ast.parse("from ..report import events\nfrom .. import errors\nfrom . import loss")
    assert forbidden_imports("windlass.model.x", relative) == [(1, "windlass.report.events")]
    fine = ast.parse("from windlass.errors import UserError\nfrom windlass.units import GIB\nimport torch")
    assert forbidden_imports("windlass.model.x", fine) == []


def test_the_import_rule_knows_each_floor():
    launch = ast.parse("from windlass.launch.local import start\nfrom windlass.cli.main import app")
    assert forbidden_imports("windlass.training.x", launch) == [(1, "windlass.launch.local"), (2, "windlass.cli.main")]
    config = ast.parse("from windlass.report.config import ReportConfig\nfrom windlass.report.metrics import Recorder")
    assert forbidden_imports("windlass.config", config) == [(2, "windlass.report.metrics")]
    assert forbidden_imports("windlass.parallel.x", ast.parse("from windlass.optim.adamw import f"))
    pool = ast.parse("from windlass.data.tokenize.pool import encode")
    assert forbidden_imports("windlass.data.sources.x", pool) and not forbidden_imports("windlass.data.prepare.x", pool)
    assert not forbidden_imports("windlass.parallel.x", ast.parse("from windlass.model.head.loss import Head"))


def test_the_other_rules_see_their_case():
    assert list(reads_environment(ast.parse("import os as o\no.environ['A']\nfrom os import getenv"))) == [3, 2]
    assert list(broad_excepts(ast.parse("try: ...\nexcept (ValueError, Exception): ..."))) == [2]
    assert list(broad_excepts(ast.parse("try: ...\nexcept: ..."))) == [2]
    assert list(broad_excepts(ast.parse("try: ...\nexcept OSError: ..."))) == []
    assert list(broad_excepts(ast.parse("try: ...\nexcept BaseException:\n    call()\n    raise"))) == []
    one, other = ast.parse("def train(): ..."), ast.parse("def train(): ...\ndef _own(): ...")
    assert ambiguous_functions({"cli/x.py": one, "flyte/x.py": one, "training/x.py": other}, {"train"}) == []
    assert ambiguous_functions({"cli/x.py": one, "training/x.py": other}, set()) == [
        "train: ['cli/x.py', 'training/x.py']"
    ]
    assert ambiguous_functions({"cli/x.py": one, "data/x.py": one, "training/x.py": other}, {"train"}) == [
        "train: ['cli/x.py', 'data/x.py', 'training/x.py']"
    ]
    back = [("windlass.parallel.rules.x", "windlass.optim.groups"), ("windlass.optim.groups", "windlass.parallel.mesh")]
    assert circles_of_subjects(back) == [["optim", "parallel"]]
    assert circles_of_subjects([back[0], ("windlass.optim.groups", "windlass.parallel.config")]) == []
    assert circles_of_subjects([back[0], ("windlass.parallel.mesh", "windlass.parallel.rules.x")]) == []
    twice = {"cli/x.py": one, "cli/y.py": one}
    assert ambiguous_functions(twice, {"train"}) == ["train: ['cli/x.py', 'cli/y.py']"]


# ---- the repository around the source


def tracked_files():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: no list of tracked files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_names_a_machines_paths_or_a_registry():
    here = Path(__file__).name
    machine = "|".join(("work", "root", "opt", r"home/\w+", r"tmp/\w+_jobs\."))
    listing = "simple"  # the folder that registries list packages in
    registry = rf"--(extra-)?index-url|--find-links|https?://\S+/(packages/[0-9a-f]{{2}}|{listing})/|/{listing}/?\s"
    pattern = re.compile(rf"(?<![\w.$}}/-])/({machine})/|{registry}")
    found = []
    for path in tracked_files():
        if path.name == here or path.suffix in (".png", ".ico"):
            continue
        lines = path.read_text().splitlines()
        found += [
            f"{path.relative_to(ROOT)}:{at}: {line.strip()}" for at, line in enumerate(lines, 1) if pattern.search(line)
        ]
    assert_none(found)


def test_the_lock_is_names_and_versions_only():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert len(lines) > 20
    for line in lines:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9][0-9a-z.]*", line), line
    assert lines == sorted(lines, key=lambda line: line.split("==")[0]) and len(set(lines)) == len(lines)


def test_the_lock_covers_what_pyproject_asks_for():
    import tomllib

    from packaging.requirements import Requirement

    locked = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    apart = ("eval", "flyte", "wandb", "trackio")  # extras that requirements.lock does not hold
    listed = (texts for name, texts in project["optional-dependencies"].items() if name not in apart)
    extras = [text for texts in listed for text in texts]
    for text in (*project["dependencies"], *extras):
        requirement = Requirement(text)
        name = requirement.name.lower()
        if name == "windlass-lm":  # an extra that takes in other extras
            continue
        assert name in locked, f"{name} is missing: make lock"
        assert requirement.specifier.contains(locked[name]), f"{text} against {locked[name]}"


def test_the_citation_names_this_version():
    import yaml

    import windlass

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["title"] == "windlass"
    assert citation["version"] == windlass.__version__ and citation["license"] == "Apache-2.0"
    assert citation["authors"] and citation["message"] and citation["type"] == "software"


def test_makefile_offers_the_promised_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "test-all", "check", "bench"} <= targets
