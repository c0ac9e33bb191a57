"""docs/howto/add-a-family.md: its class is qwen2's, what it names exists, its commands run or choose tests."""

import inspect
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from windlass.model.families import family_table

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "howto" / "add-a-family.md").read_text()
COMMANDS = re.findall(r"^    (python .+?)(?:  +#.*)?$", PAGE, re.M)
QWEN2 = family_table.FAMILIES["qwen2"]


def printed(command):
    words = shlex.split(command)
    assert words[0] == "python"
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_class_is_a_sketch_of_the_one_that_is_there():
    (block,) = re.findall(r"^    class (?:.*\n|\n)+?(?=^\S)", PAGE, re.M)
    names = dict(vars(family_table))
    exec(textwrap.dedent(block), names)
    shown = names["Qwen2Fields"]
    assert shown is not QWEN2 and shown.__bases__ == QWEN2.__bases__
    assert (shown.family, shown.architecture_class) == (QWEN2.family, QWEN2.architecture_class)
    default = shown.model_fields["num_key_value_heads"].default
    assert default == QWEN2.model_fields["num_key_value_heads"].default == 32
    assert shown.extras(None) == QWEN2.extras(None) == {"qkv_bias": True}
    own = {name: type(value) for name, value in vars(QWEN2).items() if inspect.isroutine(value) and name in block}
    assert own == {name: type(vars(shown)[name]) for name in ("extras", "windowed_by_rule", "from_architecture")}
    assert QWEN2.fixed["use_mrope"] == (False, None) and '`"use_mrope": (False, None)`' in PAGE


def test_families_have_as_many_lines_as_it_says():
    said = re.search(r"have, in lines: (.+?)\.", PAGE, re.S)[1]
    lines = {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", said)}
    assert len(lines) == 6
    assert lines == {name: len(inspect.getsource(family_table.FAMILIES[name]).splitlines()) for name in lines}


def test_what_it_names_is_there():
    """Each file; and in each line of the table the names of the code in one of the line's files."""
    files = set(re.findall(r"`((?:[\w.]+/)+\w+\.(?:py|md))`", PAGE))
    places = {file: [path for path in (ROOT / file, ROOT / "src/windlass" / file) if path.is_file()] for file in files}
    assert len(files) >= 12 and [file for file, found in places.items() if not found] == []
    text = "".join(path.read_text() for path in (ROOT / "src/windlass/model").rglob("*.py"))
    names = set(re.findall(r"`(\w+)`", PAGE.partition("## 3")[2].partition("## 4")[0]))
    assert {"_block_shapes", "stored_names", "AttentionLayout"} <= names
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
    for file, name in re.findall(r"`(FAMILIES|CONFIGS)` of\s+`([\w/.]+)`", PAGE):
        assert re.search(rf"^{file} = ", (ROOT / name).read_text(), re.M), (file, name)


def test_its_commands_for_files_and_for_the_count_run():
    where, count = (command for command in COMMANDS if " -c " in command)
    folder = Path(printed(where).strip())
    assert {"configuration_qwen2.py", "modeling_qwen2.py"} <= {file.name for file in folder.iterdir()}
    assert printed(count) == "1543714304\n"


def test_its_commands_for_tests_choose_some():
    commands = [shlex.split(command)[3:] for command in COMMANDS if " -m pytest " in command]
    assert len(commands) == 4
    files = {word for words in commands for word in words if word.endswith(".py")}
    found = printed(f"python -m pytest --long --collect-only {' '.join(sorted(files))}").splitlines()
    for words in commands:
        name = words[words.index("-k") + 1] if "-k" in words else ""
        for file in (word for word in words if word.endswith(".py")):
            assert [line for line in found if line.startswith(f"{file}::") and name in line], (file, name)
