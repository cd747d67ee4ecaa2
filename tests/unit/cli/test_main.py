"""The commands: what a stranger sees, and one clear line with exit code 2 for what they must change."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from elastic import __version__
from elastic.cli import generate
from elastic.cli.demo import first_place
from elastic.cli.inputs.model_loading import load
from elastic.cli.main import main, parser
from support.child_process import Forked


@pytest.mark.slow
def test_the_demo_writes_the_plain_models_text_while_pages_come_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--max-new-tokens", "72"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "tokens equal to the plain model's in acts 1 and 2: yes; after act 3, unwrapped, again: yes;" in out
    assert "32 of 32 answers are the plain model's, token for token" in out
    for word in ("dropped: ", "restored: ", "KV used", "free, not created", "deferred", "applied", "pause ms"):
        assert word in out


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 20])
def test_the_demo_writes_few_tokens_too(
    tokens: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("elastic.cli.demo.serve_a_burst", lambda *_: True)
    assert main(["demo", "--max-new-tokens", str(tokens)]) == 0
    assert "tokens equal to the plain model's in acts 1 and 2: yes" in " ".join(capsys.readouterr().out.split())


def test_the_package_is_a_command() -> None:
    module = runpy.run_module("elastic", run_name="elastic.__main__")
    assert module["main"] is main


def test_generate_streams_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "import os\n", "--max-new-tokens", "12", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("import os\n")
    assert len(first) > len("import os\n")
    assert main(["generate", "--prompt", "import os\n", "--max-new-tokens", "12", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_generate_loads_in_a_dtype(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(generate, "load", lambda *args: seen.append(load(*args)) or seen[0])
    assert main(["generate", "--prompt", "import os", "--dtype", dtype, "--max-new-tokens", "4"]) == 0
    (loaded,) = seen
    assert loaded.model.dtype is (torch.float32 if dtype == "auto" else torch.bfloat16)


def test_generate_can_prepack_weights(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--prompt", "import os\n", "--max-new-tokens", "2", "--prepack"]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("import os\n")


@pytest.mark.slow
def test_a_command_ends_quietly_when_nobody_reads_its_output_any_more() -> None:
    """As in `elastic generate ... | head -c 1`."""
    child = Forked("""
        import sys
        from elastic.cli.main import main, parser
        sys.exit(main(["generate", "--prompt", "import os", "--max-new-tokens", "400"]))
    """)
    with closing(child):
        assert child.stdout.read(1) == b"i"
        child.stdout.close()
        error = child.stderr.read().decode()
        assert (child.wait(), error) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model", "/nowhere"], "--model /nowhere: no model there"),
        (["--prompt", "  "], "--prompt '  ' is empty"),
        (["--place", "cpu=1MiB", "--max-new-tokens", "4"], "place cpu is too small for this model"),
        (["--place", "cpu=lots"], "budget of place cpu='lots' is not a size"),
        (["--place", "gpu"], "'gpu' is not a place"),
        (["--place", "cuda:99"], "cuda:99"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be at least 1"),
        (["--max-new-tokens", "5000"], "more than the 1024"),
        (["--prompt", "x " * 2000], "more than the 1024"),
    ],
)
@pytest.mark.parametrize("command", ["demo", "generate"])
@pytest.mark.slow
def test_what_the_caller_must_change(
    command: str, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = [] if "--prompt" in arguments or command == "demo" else ["--prompt", "import os"]
    assert main([command, *prompt, *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.startswith(f"elastic {command}: ")
    assert error.count("\n") == 1


def test_a_damaged_model_is_one_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["generate", "--model", str(tmp_path), "--prompt", "x"]) == 2
    assert capsys.readouterr().err.startswith(f"elastic generate: --model {tmp_path} cannot be loaded")


@pytest.mark.parametrize(
    ("arguments", "budget", "pages"),
    [
        ([], 24 << 20, 4096),
        (["--place", "cpu=64MiB/64KiB"], 64 << 20, 65536),
        (["--place", "cpu=64MiB/64KiB", "--pages", "8KiB"], 64 << 20, 8192),
        (["--model", "mine"], None, None),
        (["--model", "mine", "--pages", "64KiB"], None, 65536),
    ],
)
def test_the_demo_has_room_for_a_model_of_ones_own(arguments: list[str], budget: int | None, pages: int | None) -> None:
    place = first_place(parser().parse_args(["demo", *arguments]))
    assert (place.budget_bytes, place.page_bytes) == (budget, pages)


@pytest.mark.slow
def test_the_demo_needs_a_page_size_that_the_system_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--pages", "5000", "--max-new-tokens", "4"]) == 2
    assert "page_bytes=5000" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert __version__ in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirected", "code", "line"),
    [
        ("simulate > /dev/full", 2, "elastic simulate: what it writes has nowhere to go: No space left on device\n"),
        ("simulate >&-", 2, "elastic simulate: standard output is closed; give it a file, or /dev/null\n"),
        ("simulate > /dev/null", 0, ""),
    ],
)
def test_output_that_has_nowhere_to_go_is_one_line(redirected: str, code: int, line: str) -> None:
    command = ["sh", "-c", f"{sys.executable} -m elastic {redirected}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (code, line)


@pytest.mark.slow
def test_what_a_terminal_cannot_write_is_a_question_mark() -> None:
    command = [sys.executable, "-m", "elastic", "generate", "--prompt", "é = 1", "--max-new-tokens", "2"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("? = 1")


INTERRUPTS = """
import os, runpy, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):
                    pass
            except KeyboardInterrupt:
                raise ImportError("taken for an error of its own") from None
sys.meta_path.insert(0, Interrupts())
sys.argv = ["elastic", "simulate"]
{start}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "start"),
    [
        ("elastic.cli.main", "from elastic.__main__ import main; main()"),
        ("elastic.sim.run", "from elastic.__main__ import main; main()"),
        ("elastic.cli.main", "runpy.run_module('elastic', run_name='__main__')"),
        ("elastic.sim.run", "runpy.run_module('elastic', run_name='__main__')"),
    ],
)
def test_an_interrupt_while_the_command_is_imported_ends_it_in_silence(package: str, start: str) -> None:
    command = [sys.executable, "-c", INTERRUPTS.format(package=package, start=start)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "", "")


@pytest.mark.slow
def test_without_rich_there_is_help_and_the_others_name_what_to_install() -> None:
    child = Forked("""
        import sys
        for name in list(sys.modules):
            if name.partition(".")[0] == "rich" or name.startswith("elastic.cli"):
                del sys.modules[name]
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "rich":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Absent())
        from elastic.cli.main import main, parser
        try:
            main(["--help"])
        except SystemExit as error:
            print("help:", error.code)
        codes = [main(["simulate"]), main(["top", "--once"]), main(["plan", "x", "--places", "cpu=1GiB"])]
        print("codes:", codes)
    """)
    with closing(child):
        out, error = child.stdout.read().decode(), child.stderr.read().decode()
        assert child.wait() == 0, error
    assert "help: 0" in out
    assert "codes: [2, 2, 2]" in out
    needs = "No module named 'rich'; tables and live views need: pip install 'elastic-llm[cli]'"
    assert error == f"elastic simulate: {needs}\nelastic top: {needs}\nelastic plan: {needs}\n"
