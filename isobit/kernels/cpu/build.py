"""Compiles the C kernels: one shared library per instruction set, in a wheel or at first use in a cache folder.

Standard library only and importable on its own (setup.py does). Does not load what it builds. Invariant: a library is
used only if it was built from exactly the sources that are here (their hash is in its name) and its bytes are those the
compiler wrote (a checksum lies beside it); files appear whole or not at all, so any number of processes may build.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["KernelBuildError", "build_libraries", "file_digest", "find_library", "machine_libraries", "source_hash"]

_HERE = Path(__file__).resolve().parent
_AVX512 = ("-DISOBIT_AVX512", "-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
# Flags that decide which instructions are used. None of them may change a bit of a result.
INSTRUCTION_FLAGS = {
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-DISOBIT_AVX2", "-mavx2", "-mfma"),
    "neon": ("-DISOBIT_NEON",),
    "scalar": ("-DISOBIT_SCALAR",),
}
# -ffp-contract=off: a * b + c is rounded twice unless the source says fma. -fno-math-errno: sqrtf is one instruction.
COMMON_FLAGS = (
    "-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread",
)  # fmt: skip
INSTALL_HINT = (
    "Install a C compiler (Debian, Ubuntu: apt-get install gcc; Fedora: dnf install gcc; macOS: xcode-select "
    "--install), name one in the environment variable CC, or install a wheel of isobit, which carries the kernels."
)


# Libraries of each machine type as `platform.machine()` names it, best first.
MACHINE_LIBRARIES = {
    "x86_64": ("avx512bf16", "avx512", "avx2", "scalar"),
    "amd64": ("avx512bf16", "avx512", "avx2", "scalar"),
    "aarch64": ("neon", "scalar"),
    "arm64": ("neon", "scalar"),
}


class KernelBuildError(RuntimeError):
    """A kernel library is not there and cannot be made; the message says why and what to do."""


def machine_libraries(machine: str) -> tuple[str, ...]:
    """Libraries that exist for a machine type, best first. Raises ValueError where none is written for it."""
    if machine.lower() not in MACHINE_LIBRARIES:
        raise ValueError(f"no CPU kernels for machine {machine!r}; supported: {', '.join(MACHINE_LIBRARIES)}")
    return MACHINE_LIBRARIES[machine.lower()]


@functools.cache
def source_hash() -> str:
    """SHA-256 of the C sources and of the flags they are compiled with: changes with anything that can change a bit."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, INSTRUCTION_FLAGS)).encode())
    for path in sorted((_HERE / "src").glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def find_library(name: str) -> Path:
    """Path of the library `name`: the wheel's, else the cache folder's, else compiled now into the cache folder.

    The cache folder is $XDG_CACHE_HOME/isobit or ~/.cache/isobit. On a machine without a compiler, what any compiler
    made of these sources before is taken. Raises KernelBuildError when nothing was built and there is no compiler, the
    compiler fails, or the cache folder cannot be written; the message says what to do.
    """
    packaged = _HERE / "lib" / _file_name(name)
    if _is_whole(packaged):
        return packaged
    try:
        compiler = find_compiler()
    except KernelBuildError:
        kept = [] if os.environ.get("CC") else sorted(_cache_folder().glob(f"*/{_file_name(name)}"))
        for library in filter(_is_whole, kept):
            return library
        raise
    key = hashlib.sha256(repr((_version(compiler), _command(compiler, name))).encode()).hexdigest()[:16]
    cached = _cache_folder() / key / _file_name(name)
    if not _is_whole(cached):
        print(f"isobit: compiling the {name} kernels, once", file=sys.stderr, flush=True)
        compile_library(compiler, name, cached)
    return cached


def build_libraries(folder: Path) -> list[str]:
    """Compile every library of this machine type into `folder` (for a wheel); returns the names that were built.

    Instruction sets the compiler does not know are left out, with a line on stderr; "scalar" must compile. Raises
    KernelBuildError as `find_library`.
    """
    compiler, built = find_compiler(), []
    for name in machine_libraries(platform.machine()):
        try:
            compile_library(compiler, name, folder / _file_name(name))
        except KernelBuildError as error:
            if name == "scalar":
                raise
            print(f"isobit: the wheel will not carry the {name} kernels: {error}", file=sys.stderr)
        else:
            built.append(name)
    return built


def find_compiler() -> tuple[str, ...]:
    """The C compiler as the start of a command: $CC, else the first of cc, gcc, clang. KernelBuildError if none."""
    if chosen := os.environ.get("CC"):
        command = tuple(shlex.split(chosen))
        if command and shutil.which(command[0]):
            return command
        raise KernelBuildError(f"CC={chosen!r} names no program. {INSTALL_HINT}")
    for program in ("cc", "gcc", "clang"):
        if path := shutil.which(program):
            return (path,)
    raise KernelBuildError(f"isobit's CPU kernels are not compiled yet and there is no C compiler. {INSTALL_HINT}")


def compile_library(compiler: tuple[str, ...], name: str, target: Path) -> None:
    """Compile library `name` to `target` and write its checksum; both appear whole. Raises KernelBuildError."""
    try:
        _compile(compiler, name, target)
    except OSError as error:
        raise KernelBuildError(
            f"the compiled {name} kernels cannot be kept in {target.parent}: {error}. Name a folder that can be "
            "written in the environment variable XDG_CACHE_HOME, or install a wheel of isobit: it carries the kernels."
        ) from error


def _compile(compiler: tuple[str, ...], name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / target.name
        command = [*_command(compiler, name), str(_HERE / "src" / "isobit_cpu.c"), "-o", str(output), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0 or not output.exists():
            raise KernelBuildError(
                f"compiling the {name} kernels failed: {shlex.join(command)}\n{result.stderr[-2000:]}\n{INSTALL_HINT}"
            )
        checksum = Path(folder) / "checksum"
        checksum.write_text(file_digest(output))
        os.replace(output, target)
        os.replace(checksum, _checksum_path(target))


def _command(compiler: tuple[str, ...], name: str) -> tuple[str, ...]:
    return (*compiler, *COMMON_FLAGS, *INSTRUCTION_FLAGS[name])


def _version(compiler: tuple[str, ...]) -> str:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise KernelBuildError(
            f"the C compiler {shlex.join(compiler)} does not run: {error}. {INSTALL_HINT}"
        ) from error


def _file_name(name: str) -> str:
    return f"isobit_{name}_{source_hash()[:16]}.so"


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "isobit"


def _checksum_path(library: Path) -> Path:
    return library.with_suffix(".sha256")


def file_digest(path: Path) -> str:
    """SHA-256 of the bytes of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(library: Path) -> bool:
    """Whether the file is there with the bytes that were written. Loading a damaged library could end the process."""
    try:
        return _checksum_path(library).read_text() == file_digest(library)
    except (OSError, UnicodeDecodeError):
        return False
