"""Building and finding the kernel libraries: cache, damage, races, compilers, CPU features. A fake compiler, for speed.

What the real compiler builds is tested wherever kernels run; here only which file is used, and what the user is told.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.kernels.cpu import build, features, library

FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake $FAKE_VERSION"; exit 0; fi
case " $* " in *"$FAKE_REFUSES"*) echo "unknown option" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
echo built >> "$FAKE_LOG"
sleep "$FAKE_SECONDS"
printf 'library of version %s' "$FAKE_VERSION" > "$2"
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake compiler as $CC, an empty cache folder, and a log with one line for each compilation."""
    compiler = tmp_path / "fake compiler"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(0o755)
    settings = {"CC": f"'{compiler}'", "XDG_CACHE_HOME": str(tmp_path / "cache"), "FAKE_LOG": str(tmp_path / "log")}
    for name, value in {**settings, "FAKE_VERSION": "1", "FAKE_REFUSES": "nothing", "FAKE_SECONDS": "0"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "log").touch()
    return tmp_path / "log"


def compilations(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_compiled_once_with_a_line_of_progress(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = build.find_library("avx2"), build.find_library("avx2")
    assert first == second and first.read_bytes() == b"library of version 1"
    assert compilations(log) == 1
    assert capsys.readouterr().err == "isobit: compiling the avx2 kernels, once\n"
    assert first.is_relative_to(log.parent / "cache" / "isobit")
    assert [path.name for path in first.parent.iterdir() if path.is_dir()] == [], "temporary files are left"


def test_another_compiler_or_library_is_another_file(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.find_library("avx2")
    assert build.find_library("scalar") != first
    monkeypatch.setenv("FAKE_VERSION", "2")
    assert build.find_library("avx2") != first
    assert compilations(log) == 3


@pytest.mark.parametrize("damage", ["truncate", "flip", "no checksum", "garbage checksum"])
def test_a_damaged_file_is_built_again(log: Path, damage: str) -> None:
    library = build.find_library("avx2")
    checksum = library.with_suffix(".sha256")
    if damage == "truncate":
        library.write_bytes(library.read_bytes()[:-3])
    elif damage == "flip":
        library.write_bytes(b"L" + library.read_bytes()[1:])
    elif damage == "no checksum":
        checksum.unlink()
    else:
        checksum.write_bytes(b"\xff\xfe")
    assert build.find_library("avx2").read_bytes() == b"library of version 1"
    assert compilations(log) == 2


def test_two_processes_may_build_at_once(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    program = "from isobit.kernels.cpu.build import find_library; print(find_library('avx2').read_text())"
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert outputs == ["library of version 1\n"] * 3
    raced = compilations(log)
    build.find_library("avx2")
    assert compilations(log) == raced, "what the race left is not usable"


def test_a_wheel_brings_its_libraries(log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    monkeypatch.setattr(build, "_HERE", tmp_path)
    build.compile_library(build.find_compiler(), "avx2", tmp_path / "lib" / build._file_name("avx2"))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.find_library("avx2").parent == tmp_path / "lib"
    with pytest.raises(RuntimeError, match="CC='no-such-compiler' names no program"):
        build.find_library("scalar")


def test_build_for_a_wheel_leaves_out_what_the_compiler_does_not_know(
    log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("FAKE_REFUSES", "-mavx512bf16")
    assert build.build_libraries(tmp_path / "lib") == ["avx512", "avx2", "scalar"]
    assert "will not carry the avx512bf16 kernels" in capsys.readouterr().err
    monkeypatch.setenv("FAKE_REFUSES", "-DISOBIT_SCALAR")
    with pytest.raises(RuntimeError, match="compiling the scalar kernels failed"):
        build.build_libraries(tmp_path / "lib")


def test_without_a_compiler_the_message_says_what_to_install(
    log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"there is no C compiler\. Install a C compiler .*apt-get install gcc"):
        build.find_library("avx2")


def test_without_a_compiler_what_was_compiled_before_is_used(
    log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = build.find_library("avx2")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.KernelBuildError, match="names no program"):
        monkeypatch.setenv("CC", "no-such-compiler")  # a mistake is told, whatever is kept
        build.find_library("avx2")
    monkeypatch.delenv("CC")
    assert build.find_library("avx2") == kept and compilations(log) == 1
    kept.write_bytes(b"damaged")
    with pytest.raises(build.KernelBuildError, match="there is no C compiler"):
        build.find_library("avx2")


def test_a_cache_folder_that_cannot_be_written(log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(build.KernelBuildError, match=r"cannot be kept in .*file/isobit.*XDG_CACHE_HOME"):
        build.find_library("avx2")


def test_a_compiler_that_does_not_run(log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "compiler").write_text("no program")
    (tmp_path / "compiler").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "compiler"))
    with pytest.raises(build.KernelBuildError, match=r"compiler does not run: .*Install a C compiler"):
        build.find_library("avx2")


def test_the_sources_compile_without_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    for name in build.machine_libraries(build.platform.machine()):
        command = [*build._command(build.find_compiler(), name), "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        result = subprocess.run([*command, str(build._HERE / "src" / "isobit_cpu.c")], capture_output=True, text=True)
        assert result.returncode == 0, f"{name}: {result.stderr}"


def test_source_hash_covers_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    monkeypatch.setattr(build, "_HERE", tmp_path)
    seen = set()
    for content in ("int a;", "int b;"):
        for name in ("a.c", "a.h"):
            (tmp_path / "src" / name).write_text(content)
            seen.add(build.source_hash.__wrapped__())
    assert len(seen) == 4, "a changed file left the hash as it was"
    assert len(build.source_hash()) == 64


# ---- features

ALL_FLAGS = "flags : fpu sse2 fma avx2 avx512f avx512bw avx512dq avx512vl avx512_bf16"


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("", ("avx512bf16", "avx512", "avx2", "scalar")),
        ("avx512_bf16", ("avx512", "avx2", "scalar")),
        ("avx512vl", ("avx2", "scalar")),
        ("fma", ("scalar",)),
    ],
)
def test_supported_libraries_follow_the_flags(
    missing: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = frozenset(ALL_FLAGS.split()) - {missing}
    monkeypatch.setattr(features.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(features, "_cpu_flags", lambda: flags)
    assert features.supported_libraries() == expected
    assert features.choose_library("auto") == expected[0]


def test_arm_and_unknown_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features.platform, "machine", lambda: "aarch64")
    assert features.supported_libraries() == ("neon", "scalar")
    with pytest.raises(ValueError, match="'avx2' does not run on this CPU; supported: auto, neon, scalar"):
        features.choose_library("avx2")
    monkeypatch.setattr(features.platform, "machine", lambda: "riscv64")
    with pytest.raises(ValueError, match="no CPU kernels for machine 'riscv64'; supported: x86_64"):
        features.supported_libraries()


def test_every_supported_library_loads_here() -> None:
    assert features.supported_libraries()[-1] == "scalar"
    for name in features.supported_libraries():
        assert os.path.getsize(build.find_library(name)) > 10_000
        ctypes.CDLL(str(build.find_library(name)))


def test_another_binary_of_the_same_sources_is_proven_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library.CpuLibrary("scalar", 1)
    assert library.CpuLibrary("scalar", 2).source_hash == first.source_hash
    other = tmp_path / "other.so"
    other.write_bytes(build.find_library("scalar").read_bytes() + b"made by another compiler")
    monkeypatch.setattr(library, "find_library", lambda name: other)
    second = library.CpuLibrary("scalar", 1)
    assert build.source_hash() in first.source_hash and build.source_hash() in second.source_hash
    assert second.source_hash != first.source_hash, "the verdicts of one binary would be taken for the other"
