"""C++ is compiled once for a machine; whatever is in the way of that is said, and stops nothing."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from elastic.compiler import CompileError, compiled_library, load_compiled
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.executor.block_layout import layout_of
from elastic.engines.executor.kernels.elementwise import elementwise_library
from elastic.engines.executor.kernels.paged_attention import attention_library, compiled_attention
from elastic.errors import ConfigError
from elastic.estimation.profiles.store import ProfileStore
from elastic.quant.kernels.compiled import integer_matmul
from elastic.weights.prepacked import small_linear
from elastic.weights.shards import transposed_linear
from support.child_process import in_fork

SOURCE = 'extern "C" int answer() { return 42; }\n'
CXX = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
LIBRARIES = integer_matmul._library, small_linear._library, transposed_linear._library
compiles = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELASTIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("ELASTIC_DISABLE_COMPILE", raising=False)
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def libraries(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "kernels").iterdir())


def in_another_process(source: Path) -> str:
    """Say what the answer is where no library was loaded: what is loaded from a path stands for that path."""
    code = f"""
        import pathlib
        from elastic.compiler import load_compiled
        print(load_compiled(pathlib.Path({str(source)!r}), "answer").answer())
    """
    return in_fork(code, ELASTIC_CACHE=str(source.parent / "cache"))


@compiles
def test_a_source_is_compiled_once_and_another_one_beside_it(source: Path) -> None:
    assert load_compiled(source).answer() == 42
    (library,) = libraries(source)
    before = library.stat()
    assert load_compiled(source).answer() == 42
    assert library.stat() == before
    source.write_text(SOURCE.replace("42", "43"))
    assert load_compiled(source).answer() == 43
    assert len(libraries(source)) == 2


@compiles
@pytest.mark.parametrize("supported", [0, 1])
def test_a_library_says_whether_the_processor_runs_it(source: Path, supported: int) -> None:
    source.write_text(f'{SOURCE}extern "C" int is_supported() {{ return {supported}; }}\n')
    assert (compiled_library(source, "none") is not None) == supported


@compiles
@pytest.mark.parametrize("stays", [20, 0.3, 0.6, 1.0])
def test_a_damaged_library_is_compiled_again(source: Path, stays: float) -> None:
    load_compiled(source)
    (library,) = libraries(source)
    whole = library.read_bytes()
    library.unlink()  # the one that is loaded stays what it is
    left = whole[: int(stays * len(whole)) - 1 if stays <= 1 else int(stays)]
    library.write_bytes(left)
    assert in_another_process(source) == "42\n"
    assert len(library.read_bytes()) == len(whole)


def test_what_a_compiler_says_is_said(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "import sys; print('answer.cpp:1: no such thing', file=sys.stderr); sys.exit(1)"
    monkeypatch.setenv("CXX", shlex.join([sys.executable, "-c", says]))
    with pytest.raises(CompileError, match=r"refuses answer.cpp: answer.cpp:1: no such thing"):
        load_compiled(source)
    assert libraries(source) == []


def test_it_may_say_it_in_any_encoding(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "import sys; sys.stderr.buffer.write('answer.cpp:1: \u00e9chec'.encode('latin-1')); sys.exit(1)"
    monkeypatch.setenv("CXX", shlex.join([sys.executable, "-c", says]))
    with pytest.raises(CompileError, match=r"refuses answer.cpp: answer.cpp:1: .chec"):
        load_compiled(source)


def test_one_that_makes_no_library_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write('nothing')"
    monkeypatch.setenv("CXX", shlex.join([sys.executable, "-c", writes]))
    with pytest.raises(CompileError, match=r"what .* made of answer.cpp cannot be loaded"):
        load_compiled(source)


@compiles
def test_a_library_without_its_functions_is_made_again_or_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text("")
    load_compiled(source)
    (empty,) = libraries(source)
    source.write_text(SOURCE)
    load_compiled(source)
    (library,) = set(libraries(source)) - {empty}
    empty.replace(library)
    assert in_another_process(source) == "42\n"
    monkeypatch.setenv("CXX", f"{CXX} -fvisibility=hidden")
    with pytest.raises(CompileError, match=r"made of answer.cpp cannot be loaded: .*answer; set CXX to another"):
        load_compiled(source, "answer")


@compiles
@pytest.mark.slow
def test_every_kernel_does_without_a_library_that_lacks_it(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", f"{CXX} -fvisibility=hidden")
    for cached in (compiled_library, *LIBRARIES):
        cached.cache_clear()
    try:
        assert [library() for library in LIBRARIES for _ in range(2)] == [None] * 2 * len(LIBRARIES)
        assert elementwise_library() is attention_library(torch.float32, 64, "cpu") is None
    finally:
        for cached in (compiled_library, *LIBRARIES):
            cached.cache_clear()
    assert [record.name for record in caplog.records].count("elastic.compiler") == len(LIBRARIES) + 2


@pytest.mark.parametrize("named", ["~nobody-of-this-name/x", "~nobody-of-this-name"])
def test_a_cache_in_the_home_of_nobody_is_named(source: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.chdir(source.parent)
    monkeypatch.setenv("ELASTIC_CACHE", named)
    with pytest.raises(CompileError, match=r"ELASTIC_CACHE='~nobody-of-this-name.*there is no such user"):
        load_compiled(source)
    with pytest.raises(ConfigError, match=r"ELASTIC_CACHE='~nobody-of-this-name.*there is no such user"):
        ProfileStore()
    assert list(source.parent.iterdir()) == [source]


def test_where_nothing_can_be_compiled_the_remedy_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler -m64")
    with pytest.raises(CompileError, match=r"/no/such/compiler.*set CXX to a C\+\+ compiler"):
        load_compiled(source)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompileError, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\); install one, or set CXX"):
        load_compiled(source)
    monkeypatch.setenv("CXX", "g++ 'unended")
    with pytest.raises(CompileError, match=r"CXX=.*No closing quotation"):
        load_compiled(source)
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setenv("ELASTIC_CACHE", str(source))
    with pytest.raises(CompileError, match=r"set ELASTIC_CACHE to a directory that can be written"):
        load_compiled(source)


def test_what_others_may_write_is_not_loaded(source: Path) -> None:
    directory = source.parent / "cache" / "kernels"
    directory.mkdir(parents=True)
    for mode in (0o777, 0o775):
        directory.chmod(mode)
        with pytest.raises(
            CompileError, match=r"kernels is another user's, or others may write to it; set ELASTIC_CACHE"
        ):
            load_compiled(source)
    assert libraries(source) == []


@compiles
def test_a_directory_of_its_own_is_made_for_its_user_alone(source: Path) -> None:
    load_compiled(source)
    assert (source.parent / "cache" / "kernels").stat().st_mode & 0o777 == 0o700


def test_without_a_home_nothing_is_compiled(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ELASTIC_CACHE")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(CompileError, match=r"home directory.; set ELASTIC_CACHE"):
        load_compiled(source)


def test_without_it_torch_attends_and_that_is_logged_once(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ELASTIC_DISABLE_COMPILE", "1")
    layout = layout_of(KVFormat(4, "head_centric", "float32", 2, 64, (), 1), torch.float32)
    compiled_library.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert [compiled_attention(layout, torch.float32, torch.device("cpu")) for _ in range(2)] == [None, None]
    finally:
        compiled_library.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith("attention is computed by torch's operators")
    assert record.getMessage().endswith(": ELASTIC_DISABLE_COMPILE is set")
