"""The secrets of a URL are in no byte that a preparation or a run writes or prints.

A server answers only requests that are signed, or have a password or a secret folder. What is searched for survives every
encoding of a URL: the letters in the middle of the signature; besides it is searched for with each letter percent-encoded, and in
base64.
"""

import base64
import functools
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from tests import tiny
from windlass.cli import main as cli
from windlass.config import load_recipe
from windlass.errors import UserError
from windlass.training.loop import train
from windlass.training.preflight import prepare_only

CORES = ("xK9zvQ7TfL", "mW4hUe8RsB", "pA3dGy6NcJ")
SIGNATURES = [f"a/{core}+b==" for core in CORES]  # as S3's: to be percent-encoded in a query
NOT_SIGNED = "nO5tSiGn3D"
TOKENS = [f"t-{core}/+" for core in CORES]  # folders of the server
PASSWORDS = [f"p{core}" for core in CORES]


def spellings(core):
    yield core.encode()
    yield "".join(f"%{ord(letter):02x}" for letter in core).encode()
    for before in range(3):  # three places where base64 may cut
        yield base64.b64encode(b"\0" * before + core.encode())[4:-4]


def assert_no_secret(texts, *directories):
    """Neither in `texts` nor in the name or a byte of any file below `directories`, which hold some."""
    found = [text.encode() for text in texts]
    for directory in directories:
        files = [path for path in directory.rglob("*") if path.is_file()]
        assert files, directory
        found += [str(path).encode() + b"\0" + path.read_bytes() for path in files]
    for core in (*CORES, NOT_SIGNED):
        for spelling in spellings(core):
            assert not [data[:300] for data in found if spelling in data or spelling.lower() in data.lower()]


@pytest.fixture
def signed(tmp_path_factory):
    """signed(number, name, core) -> a URL of a corpus, by the signature `number`; requests without a signature are refused."""
    directory = tmp_path_factory.mktemp("served")
    for name in ("a", "b", "c"):
        texts = [path.read_text() for path in sorted(tiny.write_corpus(directory / f".{name}", 30).iterdir())]
        rows = [json.dumps({"text": f"{name} {text}"}) for text in texts]
        (directory / f"{name}.jsonl").write_text("\n".join(rows))

    class Signed(SimpleHTTPRequestHandler):
        def send_head(self):
            given = urllib.parse.urlsplit(self.path)
            folder, _, name = urllib.parse.unquote(given.path)[1:].rpartition("/")
            user, _, password = (
                base64.b64decode(self.headers.get("Authorization", "Basic ")[6:]).decode().partition(":")
            )
            is_signed = urllib.parse.parse_qs(given.query).get("sig", [""])[0] in SIGNATURES
            if folder in TOKENS or (user, password) in [("me", one) for one in PASSWORDS]:
                self.path = f"/{name}"
            elif not is_signed:
                self.send_error(403)
                return None
            return super().send_head()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Signed, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    yield lambda name, signature: f"{address}/{name}.jsonl?v=1&sig={urllib.parse.quote(signature, safe='')}"
    server.shutdown()
    thread.join()
    server.server_close()


def tree(base, url):
    """The tiny recipe with a URL wherever a source may be; `url` makes one of a name."""
    made = tiny.recipe(base).model_dump(mode="json", by_alias=True, exclude_none=True)
    made["run"] |= {"steps": 4}
    made["data"] |= {"sources": [{"path": url("a")}], "validation": {"path": [url("b")]}}
    made["evaluate"] |= {"sets": {"more": {"path": url("c")}}}
    made["checkpoint"] |= {"every_steps": 2}
    return made


def test_a_run_on_signed_urls_writes_and_prints_no_signature_and_a_fresh_one_goes_on(
    signed, tmp_path, capfd, monkeypatch
):
    recipe, base = tmp_path / "given" / "recipe.yaml", tmp_path / "run"
    recipe.parent.mkdir()
    recipe.write_text(yaml.safe_dump(tree(base, lambda name: signed(name, SIGNATURES[0]))))
    override = f"data.sources=[{{path: '{signed('a', SIGNATURES[1])}'}}]"
    monkeypatch.setattr(sys, "argv", ["windlass", "train", str(recipe), override])
    train(load_recipe(recipe, override))
    kept = (base / "run" / "recipe.yaml").read_text()
    assert kept.startswith("# as given") and yaml.safe_load(kept)["data"]["sources"][0]["path"].endswith("a.jsonl?***")
    fresh = [f"data.sources=[{{path: '{signed('a', SIGNATURES[2])}'}}]", "run.steps=6"]
    capfd.readouterr()
    result = train(load_recipe(recipe, *fresh))
    out = capfd.readouterr()
    assert result.step == 6 and "prepared already and unchanged: skipped" in out.out
    assert out.out.count("drift") == 1 and "drift: run.steps 4 in the checkpoint, 6 now" in out.out
    assert [line["kind"] for line in tiny.lines(base / "run") if line["kind"] in ("start", "resume")] == [
        "start",
        "resume",
    ]
    assert_no_secret([out.out, out.err], base)


def test_a_run_on_a_secret_folder_and_a_password_writes_and_prints_neither_and_fresh_ones_go_on(
    signed, tmp_path, capfd, monkeypatch
):
    host, base = signed("a", "").partition("//")[2].partition("/")[0], tmp_path / "run"
    urls = {"a": f"http://{host}/${{FOLDER}}/a.jsonl", "b": f"http://me:${{PASSWORD}}@{host}/b.jsonl"}
    urls["c"] = f"http://{host}/${{FOLDER}}/c.jsonl"
    recipe = tmp_path / "given.yaml"
    recipe.write_text(yaml.safe_dump(tree(base, urls.get)))
    for number, steps in ((0, 2), (1, 3)):
        monkeypatch.setenv("FOLDER", urllib.parse.quote(TOKENS[number], safe=""))
        monkeypatch.setenv("PASSWORD", PASSWORDS[number])
        config = load_recipe(recipe, f"run.steps={steps}")
        assert train(config).step == steps and TOKENS[number] in urllib.parse.unquote(config.data.sources[0].path)
    out = capfd.readouterr()
    assert "prepared already and unchanged: skipped" in out.out and out.out.count("drift") == 1
    kept = yaml.safe_load((base / "run" / "resolved.yaml").read_text())
    assert kept["data"]["sources"][0]["path"] == f"http://{host}/***/a.jsonl"
    assert "/${FOLDER}/a.jsonl" in (base / "run" / "recipe.yaml").read_text()
    written = f"http://me:{PASSWORDS[2]}@{host}/b.jsonl"  # in the recipe itself
    prepared = prepare_only(load_recipe(recipe, f"data.validation={{path: ['{written}']}}"))
    assert prepared.sets["validation"].documents == 30
    assert_no_secret([out.out, out.err, str(prepared)], base)
    monkeypatch.setenv("FOLDER", f"t-{NOT_SIGNED}")
    with pytest.raises(UserError) as caught:
        prepare_only(load_recipe(recipe, f"data.directory={tmp_path / 'other'}"))
    assert f"http://{host}/***/a.jsonl is refused to this process: status 403" in caught.value.given
    assert_no_secret([str(caught.value), repr(caught.value)])


def test_what_is_refused_names_no_signature(signed, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree(tmp_path, lambda name: signed(name, NOT_SIGNED))))
    with pytest.raises(UserError) as caught:
        prepare_only(load_recipe(tmp_path / "recipe.yaml"))
    assert "/a.jsonl?*** is refused to this process: status 403" in caught.value.given
    assert_no_secret([str(caught.value), repr(caught.value)])


def test_a_variable_of_the_environment_is_kept_by_its_name(signed, tmp_path, monkeypatch):
    monkeypatch.setenv("SIG", urllib.parse.quote(SIGNATURES[0], safe=""))
    recipe, base = tmp_path / "recipe.yaml", tmp_path / "run"
    given = "# mine\n" + yaml.safe_dump(tree(base, lambda name: signed(name, "").replace("v=1&sig=", "sig=${SIG}")))
    recipe.write_text(given)
    config = load_recipe(recipe)
    assert prepare_only(config).sets["train"].documents == 30 and config.recipe == given
    assert_no_secret([config.recipe], base / "data")
    assert SIGNATURES[0] in urllib.parse.unquote(config.data.sources[0].path)


PLACES = [
    "data.sources=[{{path: '{url}'}}]",
    "data.sources=[{{hub: '{url}'}}]",
    "data.validation={{path: '{url}'}}",
    "data.directory='{url}'",
    "data.cache={{directory: '{url}'}}",
    "data.tokenizer={{from: '{url}'}}",
    "evaluate.sets.other={{path: '{url}'}}",
    "model={{from: '{url}'}}",
    "run.directory='{url}'",
    "run.start_from='{url}'",
    "hub.cache='{url}'",
    "run.steps='{url}'",
    "nosuch.key='{url}'",
    "run.steps={{'{url}': [",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "url", [f"http://me:{NOT_SIGNED}@127.0.0.1:9/x", f"http://127.0.0.1:9/x.jsonl?sig={NOT_SIGNED}"]
)
def test_wherever_a_url_is_its_refusal_has_no_secret(tmp_path, monkeypatch, capfd, place, url):
    made = tiny.recipe(tmp_path).model_dump(mode="json", by_alias=True, exclude_none=True)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["windlass", "train", "recipe.yaml", place.format(url=url)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    shown = capfd.readouterr()
    assert caught.value.code in (2, 74) and "rule:" in shown.err
    assert_no_secret([shown.out, shown.err], tmp_path)


@pytest.mark.long
def test_every_command_on_two_ranks_keeps_the_secret(signed, tmp_path):
    """Prepare, train on two ranks, resume with a fresh signature, read it all back; then a signature that is refused."""
    base, texts = tmp_path / "run", []
    variables = {name: value for name, value in os.environ.items() if name != "SIG"}

    def windlass(*arguments, signature=SIGNATURES[0], code=0):
        environ = variables | {"SIG": urllib.parse.quote(signature, safe="")}
        command = [sys.executable, "-m", "windlass", *map(str, arguments)]
        done = subprocess.run(command, env=environ, cwd=base, capture_output=True, text=True, timeout=280)
        assert done.returncode == code, done.stderr
        texts.extend([done.stdout, done.stderr])
        return done.stdout + done.stderr

    base.mkdir()
    made = tree(base, lambda name: signed(name, SIGNATURES[0]))
    made["data"]["sources"][0]["path"] = signed("a", "").replace("v=1&sig=", "sig=${SIG}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(made))
    more = f"evaluate.sets.more.path={signed('c', SIGNATURES[1])}"
    windlass("prepare", recipe, more)
    windlass("train", recipe, more, "--nproc", 2)
    again = windlass("train", recipe, more, "run.steps=6", "--nproc", 2, signature=SIGNATURES[2])
    assert "unchanged: skipped" in again and "finished at step 6" in again
    for arguments in (
        ("status", "run"),
        ("evaluate", "run"),
        ("export", "run"),
        ("report", "run"),
        ("data", "inspect", recipe, more),
        ("data", "lint", recipe, more),
        ("data", "consumed", "run"),
        ("checkpoint", "verify", "run"),
    ):
        windlass(*arguments)
    refused = windlass("prepare", recipe, more, signature=NOT_SIGNED, code=2)
    assert "status 403" in refused
    other = f"data.directory={base / 'other'}"
    windlass("train", recipe, more, other, "--nproc", 2, signature=NOT_SIGNED, code=2)
    assert_no_secret(texts, base)
