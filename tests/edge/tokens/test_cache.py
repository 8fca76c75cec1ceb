"""Loading tokenizers: shared, cached, refused, and with helpful errors."""

import asyncio
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rollout_server.core.message import Message
from rollout_server.core.outcome import Category
from rollout_server.core.spec import TokenizerName
from rollout_server.edge import tokens
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.testing.tokenizer import TOY_TOKENIZER

TOY = TokenizerName("toy")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the toy tokenizer that a test may change."""
    at = tmp_path / "copied"
    at.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOY_TOKENIZER / file, at)
    return at


async def refusal(tokenizers: Tokenizers, name: str, revision: str = "") -> str:
    """The error text of a load that fails; it must reveal no server internals."""
    with pytest.raises(RolloutFailed) as caught:
        await tokenizers.load(TokenizerName(name, revision))
    failure = caught.value.failure
    assert failure.category is Category.TOKENIZER
    for inside in ("http", "Traceback", "\n", str(TOY_TOKENIZER), "/tmp", "site-packages"):
        assert inside not in failure.message.replace(repr(name), "")
    return failure.message


async def test_all_who_ask_at_once_share_one_load(tokenizers) -> None:
    made = tokenizers()
    loaded = await asyncio.gather(*(made.load(TOY) for _ in range(20)))
    assert {id(each) for each in loaded} == {id(await made.load(TOY))}


async def test_revisions_are_not_looked_at_where_a_directory_is_given(tokenizers) -> None:
    made = tokenizers()
    assert await made.load(TokenizerName("toy", "main")) is await made.load(TOY)


async def test_who_leaves_takes_nothing_from_the_others(tokenizers) -> None:
    made = tokenizers()
    leaving, staying = asyncio.create_task(made.load(TOY)), asyncio.create_task(made.load(TOY))
    await asyncio.sleep(0)
    leaving.cancel()
    loaded = await staying
    assert leaving.cancelled()
    assert await made.load(TOY) is loaded


async def test_a_load_that_all_left_is_kept(tokenizers) -> None:
    made = tokenizers(threads=1)
    leaving = asyncio.create_task(made.load(TOY))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert await made.load(TOY) is await made.load(TOY)


async def test_the_one_used_longest_ago_is_dropped_and_lives_on_where_it_is_held(tokenizers) -> None:
    names = dict.fromkeys(("a", "b", "c"), TOY_TOKENIZER)
    made = tokenizers(names, cache_size=2)
    a, b = [await made.load(TokenizerName(name)) for name in ("a", "b")]
    assert await made.load(TokenizerName("a")) is a
    await made.load(TokenizerName("c"))
    assert await made.load(TokenizerName("a")) is a
    assert await made.load(TokenizerName("b")) is not b
    hello = [Message.parse('{"role": "user", "content": "Hello"}')]
    rendered = [await Renderer(each, [], {}).predict(hello, None, 0) for each in (a, b)]
    assert rendered[0] == rendered[1]


async def test_a_failed_load_is_not_remembered(tokenizers, copy) -> None:
    template = (copy / "chat_template.jinja").rename(copy / "gone")
    made = tokenizers({"toy": copy})
    refusals = await asyncio.gather(*(refusal(made, "toy") for _ in range(5)))
    assert set(refusals) == {
        "tokenizer 'toy' was loaded, but its chat template is missing; the server's setting ROLLOUT_TEMPLATES can map "
        "the name to a file with the template that the trainer uses"
    }
    template.rename(copy / "chat_template.jinja")
    assert (await made.load(TOY)).name == "toy"


async def test_a_mapped_template_stands_in(tokenizers, copy, tmp_path) -> None:
    (copy / "chat_template.jinja").unlink()
    (tmp_path / "mine.jinja").write_text("{{ messages | map(attribute='content') | join }}!")
    loaded = await tokenizers({"toy": copy}, templates={"toy": tmp_path / "mine.jinja"}).load(TOY)
    rendered = await Renderer(loaded, [], {}).predict([Message.parse('{"role": "user", "content": "8"}')], None, 0)
    assert rendered.predicted.environment == loaded.encode("8!")
    made = tokenizers({"toy": copy}, templates={"toy": tmp_path / "not-there.jinja"})
    assert "ROLLOUT_TEMPLATES names for tokenizer 'toy' cannot be read" in await refusal(made, "toy")


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (
            "{{ messages[-1].content }}!",
            "leaves out what was said before: 'Qf7xSaidByTheModel', said by the model, is not in 'Hello!'",
        ),
        ("{{ raise_exception('Not today.') }}", "refuses the conversation: Not today. (tried with 'Hello' from a user"),
        ("{{ messages[1].content.nothing.at_all }}", "(tried with 'Hello' from a user"),
    ],
)
async def test_a_template_that_cannot_be_followed_is_refused_with_an_example(
    tokenizers, copy, tmp_path, template: str, named: str
) -> None:
    (tmp_path / "bad.jinja").write_text(template)
    made = tokenizers({"toy": copy}, templates={"toy": tmp_path / "bad.jinja"})
    told = await refusal(made, "toy")
    assert told.startswith("tokenizer 'toy' cannot be used: the chat template")
    assert named in told
    assert str(tmp_path) not in told


@pytest.mark.parametrize(
    "name",
    [
        str(TOY_TOKENIZER),
        "/etc",
        "../x",
        "a/../../b",
        ".",
        "./x",
        "~",
        "~root/x",
        "a\\b",
        "C:/x",
        "a..b",
        "..",
        "",
    ],
)
async def test_requests_name_no_directories(tokenizers, name) -> None:
    assert "ROLLOUT_TOKENIZER_DIRECTORIES=true" in await refusal(tokenizers(), name)


async def test_nor_what_happens_to_lie_where_the_server_runs(tokenizers) -> None:
    name = next(path.name for path in Path.cwd().iterdir() if not path.name.startswith("."))
    assert "ROLLOUT_TOKENIZER_DIRECTORIES=true" in await refusal(tokenizers(), name)


async def test_unless_a_setting_lets_them(tokenizers) -> None:
    made = tokenizers(allow_directories=True)
    assert (await made.load(TokenizerName(str(TOY_TOKENIZER)))).probed.final is not None
    assert "cannot be read as a tokenizer" in await refusal(made, "/not/there")


@pytest.mark.parametrize("name", ["nobody/has-this", "no such name", "a/b/c", "x" * 5000, "nul\0l", "https://a.b/c"])
async def test_what_is_not_here_without_a_network(tokenizers, name) -> None:
    text = await refusal(tokenizers(), name)
    assert "is not on this server" in text
    assert len(text) < 600


async def test_code_that_comes_with_a_tokenizer_is_not_run(tokenizers, copy) -> None:
    path = copy / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (copy / "own.py").write_text(f"open({str(copy / 'was-run')!r}, 'w')\n")
    assert "TOKENIZER_TRUST_REMOTE_CODE=true" in await refusal(tokenizers({"toy": copy}), "toy")
    assert not (copy / "was-run").exists()


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["", "{}", "[]", "\xff", None])
async def test_damaged_files(tokenizers, copy, file, damage) -> None:
    if damage is None:
        (copy / file).unlink()
    else:
        (copy / file).write_text(damage, encoding="latin-1")
    made = tokenizers({"toy": copy})
    try:
        loaded = await made.load(TOY)
    except RolloutFailed:
        assert "its directory cannot be read as a tokenizer" in await refusal(made, "toy")
    else:  # much of a configuration may be missing
        assert file == "tokenizer_config.json"
        assert loaded.encode("<|im_end|>") == (await tokenizers().load(TOY)).encode("<|im_end|>")


def test_settings_that_keep_nothing() -> None:
    for settings in (LoaderSettings(cache_size=0), LoaderSettings(threads=0)):
        with pytest.raises(ValueError, match="at least 1"):
            Tokenizers(settings)


def run(code: str, **environment: str) -> Any:
    """Run code in a new interpreter and parse its JSON output; nothing else may be printed."""
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_importing_loads_no_tokenizer_library() -> None:
    modules = ", ".join(module.name for module in pkgutil.iter_modules(tokens.__path__))
    code = f"import json, sys; from rollout_server.edge.tokens import {modules}; print(json.dumps(sorted(sys.modules)))"
    assert {"transformers", "tokenizers", "huggingface_hub", "torch", "jinja2"}.isdisjoint(run(code))


def test_loading_prints_nothing() -> None:
    code = (
        "import asyncio\n"
        "from rollout_server.edge.tokens.cache import Tokenizers\n"
        "from rollout_server.edge.tokens.loader import LoaderSettings\n"
        "from rollout_server.core.spec import TokenizerName\n"
        "async def main():\n"
        f"    tokenizers = Tokenizers(LoaderSettings(directories={{'toy': {str(TOY_TOKENIZER)!r}}}))\n"
        "    await tokenizers.load(TokenizerName('toy'))\n"
        "    await tokenizers.close()\n"
        "    print('true')\n"
        "asyncio.run(main())\n"
    )
    assert run(code) is True
