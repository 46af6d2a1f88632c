"""The rules of the house, checked by machine: imports go down, Orders see no batch, numbers are added in kernels/ only.

Every rule has a control: a planted violation that the check must find. Public names and options are frozen here, so
that a change to them is a decision.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import isobit
from isobit import cli, order
from isobit.architectures import ARCHITECTURES
from isobit.config import EngineConfig
from isobit.kernels.cpu.build import INSTRUCTION_FLAGS

PACKAGE = Path(order.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
RELATIVE = [path.relative_to(PACKAGE).as_posix() for path in FILES]

# Level of each file or folder below isobit/. Level 0 and 1 import no torch.
LEVELS = {
    "order": 0, "order_table": 0, "config": 0, "model_config": 0, "architectures": 0, "plan": 0, "request": 0,
    "checkpoint": 0, "hf_config": 0, "gguf_config": 0, "gguf_file": 0, "rope_config": 0,
    "sampling_defaults": 0,
    "scheduler": 1, "pages": 1, "prefix_cache": 1,
    "ops": 2, "kernels": 2,
    "layers": 3, "kv_cache": 3, "rope": 3,
    "models": 4, "weights": 4, "batch": 4, "sampler": 4,
    "runner": 5, "loading": 5,
    "llm": 6, "engine": 6, "tokenizer": 6, "gguf_tokenizer": 6, "detokenizer": 6, "output": 6,
    "cli": 7, "server": 7, "demo": 7, "doctor": 7, "__main__": 7,
    "__init__": 7,
}  # fmt: skip
MAX_LINES = 340
MAX_FUNCTION_LINES, MAX_ARGUMENTS, MAX_JIT_LINES = 40, 8, 65


def dotted(module: str) -> str:
    """isobit/models/llama.py -> isobit.models.llama; a package's __init__.py is the package."""
    return ".".join(("isobit", *module.removesuffix(".py").split("/"))).removesuffix(".__init__")


def level_of(module: str) -> int:
    """Level of a dotted module name; `isobit` itself is the facade at the top."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    assert name in LEVELS, f"{module}: give {name!r} a level in tests/test_house.py and docs/structures.md"
    return LEVELS[name]


def imports_of(source: str, module: str, is_package: bool) -> list[str]:
    """Dotted names of every import in `source`, wherever it stands (functions and TYPE_CHECKING too)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = module.split(".")
                anchor = anchor[: len(anchor) - node.level + is_package]
                base = ".".join([*anchor, base] if base else anchor)
            # `from isobit import order` imports a module of the package, not a name of the facade
            found += [f"isobit.{alias.name}" if base == "isobit" and alias.name in LEVELS else base
                      for alias in node.names]  # fmt: skip
    return found


def level_violations(source: str, module: str, is_package: bool = False) -> list[str]:
    level, bad = level_of(module), []
    for name in imports_of(source, module, is_package):
        root = name.split(".")[0]
        if root == "isobit" and (level_of(name) > level):
            bad.append(f"{module} (level {level}) imports {name} (level {level_of(name)})")
        if level <= 1 and root in ("torch", "transformers", "tokenizers"):
            bad.append(f"{module} (level {level}) imports {name}")
    return bad


@pytest.mark.parametrize("file", RELATIVE)
def test_imports_go_down(file: str) -> None:
    source = (PACKAGE / file).read_text(encoding="utf-8")
    assert level_violations(source, dotted(file), file.endswith("__init__.py")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from isobit.engine import LLMEngine",
        "from isobit import engine",
        "from . import engine",
        "from .kernels import admission",
        "def f():\n    import isobit.models.llama",
        "import torch.nn",
        "import isobit",
        "from isobit import LLM",
    ],
)
def test_import_check_finds_a_planted_violation(source: str) -> None:
    assert len(level_violations(source, "isobit.scheduler")) == 1


def test_level_0_and_1_load_no_torch() -> None:
    names = ["isobit"] + [dotted(file) for file in RELATIVE if file != "__init__.py" and level_of(dotted(file)) <= 1]
    assert {"isobit.order", "isobit.config", "isobit.plan", "isobit.scheduler", "isobit.pages"} <= set(names)
    program = (
        "import importlib, sys\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    control = subprocess.run(
        [sys.executable, "-c", program.replace("import importlib", "import torch, importlib")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert control.stdout.strip() == "['torch']"


# Names that speak of a batch: how many rows, tokens, sequences or requests there are, or how long they are.
BATCH_WORDS = re.compile(
    r"^(m|b|bs|t)$|batch|rows?(_(?!sum)|$)|tokens?(_|$)|^num_|(^|_)count$|seq|requests?(_|$)|prompt|(^|_)lens?(_|$)|length"
)  # "row_sum" is the sum over one row of attention weights, the field's name for the softmax denominator


def names_seen_by(thing: object) -> list[str]:
    """Fields of a dataclass, or parameters of a function."""
    if is_dataclass(thing):
        return [field.name for field in fields(thing)]
    assert callable(thing)
    return list(inspect.signature(thing).parameters)


def orders_and_choosers() -> dict[str, object]:
    """Every `*Order` class of order.py and every public function there."""
    found: dict[str, object] = {}
    for name, thing in vars(order).items():
        if getattr(thing, "__module__", None) != "isobit.order" or name.startswith("_"):
            continue
        if (inspect.isclass(thing) and name.endswith("Order")) or inspect.isfunction(thing):
            found[name] = thing
    return found


def test_no_order_or_chooser_sees_the_batch() -> None:
    things = orders_and_choosers()
    assert {"LinearOrder", "AttentionOrder", "linear_order", "attention_order", "model_orders"} <= set(things)
    seen = [f"{name}.{word}" for name, thing in things.items() for word in names_seen_by(thing)]
    assert [name for name in seen if BATCH_WORDS.search(name.split(".")[1])] == []


def test_orders_are_frozen() -> None:
    for name, thing in orders_and_choosers().items():
        if inspect.isclass(thing):
            assert is_dataclass(thing) and thing.__dataclass_params__.frozen, name  # type: ignore[attr-defined]


def test_order_check_finds_a_planted_violation() -> None:
    def chooser(n: int, k: int, m: int, num_tokens: int, batch_size: int, rows: int, max_seq_len: int) -> None: ...

    assert [name for name in names_seen_by(chooser) if not BATCH_WORDS.search(name)] == ["n", "k"]


# Functions of torch or numpy, and methods of any object, that add numbers in an order of their own choosing, or whose
# vector tails use another formula than their body (silu and relatives: measured, docs/determinism.md).
BANNED_METHODS = {
    "sum", "nansum", "mean", "nanmean", "var", "std", "average", "softmax", "log_softmax", "logsumexp", "logcumsumexp",
    "einsum", "matmul", "mm", "bmm", "addmm", "addmm_", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "inner",
    "tensordot", "cumsum", "cumprod", "nanprod", "index_add", "index_add_", "scatter_add", "scatter_add_",
    "scatter_reduce", "scatter_reduce_", "all_reduce", "reduce_scatter", "reduce_scatter_tensor",
    "scaled_dot_product_attention", "silu", "sigmoid", "gelu", "softplus", "rsqrt",
}  # fmt: skip
BANNED_FUNCTIONS = BANNED_METHODS | {
    "linear", "Linear", "prod", "norm", "vector_norm", "matrix_norm", "compile", "convolve", "correlate", "trace",
    "rms_norm", "layer_norm", "normalize", "cross_entropy", "nll_loss", "bincount", "histogram", "cdist", "outer",
    "conv1d", "conv2d", "bilinear", "embedding_bag", "multi_dot", "kron", "trapezoid", "interp", "cov", "corrcoef",
}  # fmt: skip
NUMERIC_ROOTS = ("torch", "numpy")


def numeric_aliases(tree: ast.AST) -> dict[str, str]:
    """Local names that stand for torch or numpy, one of their modules, or one of their functions."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in NUMERIC_ROOTS:
                    aliases[alias.asname or alias.name.split(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in NUMERIC_ROOTS:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def banned_calls(source: str) -> list[str]:
    """Uses of a banned name (called, or passed on as a function) and of the operator @, as "line: text"."""
    tree = ast.parse(source)
    aliases = numeric_aliases(tree)
    found = []
    for node in ast.walk(tree):
        bad = False
        if isinstance(node, (ast.BinOp, ast.AugAssign)):
            bad = isinstance(node.op, ast.MatMult)
        elif isinstance(node, ast.Attribute):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            numeric = isinstance(root, ast.Name) and root.id in aliases
            bad = node.attr in (BANNED_FUNCTIONS if numeric else BANNED_METHODS)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            bad = aliases.get(node.id, "").split(".")[-1] in BANNED_FUNCTIONS
        if bad:
            found.append(f"{node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("file", [file for file in RELATIVE if not file.startswith("kernels/")])
def test_numbers_are_added_in_kernels_only(file: str) -> None:
    assert banned_calls((PACKAGE / file).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "y = x @ w",
        "x @= w",
        "y = x.sum(-1)",
        "y = x.mean()",
        "import torch\ny = torch.softmax(x, -1)",
        "import torch as t\ny = t.nn.functional.linear(x, w)",
        "from torch.nn import functional as F\ny = F.linear(x, w)",
        "import torch.nn.functional as F\ny = F.rms_norm(x, (4,))",
        "from torch.nn.functional import linear as project\ny = project(x, w)",
        "import numpy as np\ny = np.dot(x, w)",
        "import numpy as np\ny = np.linalg.norm(x)",
        "import numpy as np\ny = list(map(np.prod, x))",
        "from torch import einsum\ny = einsum('ij,jk->ik', x, w)",
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\nf = torch.compile(g)",
        "y = x.log_softmax(-1)",
        "y = x.bmm(w)",
        "y = x.silu()",
        "total = x.cumsum(0)",
    ],
)
def test_banned_call_check_finds_a_planted_violation(source: str) -> None:
    assert len(banned_calls(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "total = sum(len(page) for page in pages)",  # Python's own sum, over whole numbers
        "import math\nsize = math.prod(shape)",
        "y = self.ops.linear(x, w)\nz = self.norm(y)",
        "import torch\ny = torch.empty(3).max()",  # a maximum has no order
        "import re\npattern = re.compile('x')",
    ],
)
def test_banned_call_check_lets_own_calls_pass(source: str) -> None:
    assert banned_calls(source) == []


# Reduction loops in isobit/kernels, each with its comment `REDUCTION ORDER: see <Order>`.
NUM_REDUCTION_TAGS = {
    "cpu/src/attention.c": 2,
    "cpu/src/attention_page.h": 5,
    "cpu/src/head.c": 3,
    "cpu/src/linear.c": 1,
    "cpu/src/linear_blocks.h": 3,
    "cpu/src/pointwise.c": 2,
    "cpu/src/sample.c": 2,
    "reference/ops.py": 13,
    "triton/attention_decode.py": 2,
    "triton/attention_math.py": 1,
    "triton/attention_tiles.py": 4,
    "triton/attention_wgmma.py": 2,
    "triton/linear_kernels.py": 6,
    "triton/math.py": 1,
    "triton/mla_tiles.py": 4,
    "triton/mla_wgmma.py": 4,
    "triton/moe_combine.py": 1,
    "triton/moe_kernels.py": 5,
    "triton/norm.py": 1,
    "triton/rope.py": 1,
    "triton/sampling.py": 1,
    "triton/threshold.py": 2,
    "triton/vocabulary.py": 2,
}
TAG = re.compile(r"REDUCTION ORDER(?:: (?:see )?(\w+))?")


def reduction_tags() -> dict[str, list[str]]:
    """Orders named by the tags of each source file of the kernels that has any; "" for a tag that names none."""
    folder = PACKAGE / "kernels"
    sources = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c", ".h"))
    found = {path.relative_to(folder).as_posix(): TAG.findall(path.read_text(encoding="utf-8")) for path in sources}
    return {name: tags for name, tags in found.items() if tags}


def test_every_reduction_loop_names_its_order() -> None:
    tags = reduction_tags()
    known = {name for name, thing in orders_and_choosers().items() if inspect.isclass(thing)}
    assert {name for names in tags.values() for name in names} <= known
    counts = {file: len(names) for file, names in tags.items()}
    assert counts == NUM_REDUCTION_TAGS, "a reduction loop came or went: is its Order still what runs?"


def test_reduction_tags_stand_in_kernels_only() -> None:
    for file in RELATIVE:
        if not file.startswith("kernels/"):
            assert not TAG.search((PACKAGE / file).read_text(encoding="utf-8")), file


@pytest.mark.parametrize("file", RELATIVE)
def test_file_opens_with_a_docstring_and_is_one_room(file: str) -> None:
    source = (PACKAGE / file).read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source)), f"isobit/{file}: say what it is, and what it does not know"
    assert source.count("\n") <= MAX_LINES, f"isobit/{file} has more than {MAX_LINES} lines: one room or two?"


def is_jit(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Compiled for a GPU: its arguments are what a launch hands over, and it cannot be cut where it likes."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def large_functions(source: str) -> list[str]:
    """Functions with more lines, or more arguments (self and cls apart), than the house allows."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            num_arguments = len([argument for argument in given if argument.arg not in ("self", "cls")])
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if is_jit(node):
                num_lines, num_arguments = num_lines - (MAX_JIT_LINES - MAX_FUNCTION_LINES), 0
            if num_lines > MAX_FUNCTION_LINES or num_arguments > MAX_ARGUMENTS:
                found.append(node.name)
    return found


@pytest.mark.parametrize("file", RELATIVE)
def test_functions_are_small(file: str) -> None:
    assert large_functions((PACKAGE / file).read_text(encoding="utf-8")) == []


def test_size_check_finds_a_planted_violation() -> None:
    arguments = ", ".join("abcdefghi")
    assert large_functions(f"def wide({arguments}): ...\ndef fine(self, {arguments[:-3]}): ...") == ["wide"]
    assert large_functions("def long():\n" + "    pass\n" * 40) == ["long"]
    assert large_functions(f"@triton.jit\ndef kernel({arguments}):\n" + "    pass\n" * 64) == []
    assert large_functions("@triton.jit\ndef kernel():\n" + "    pass\n" * 65) == ["kernel"]


ENVIRONMENT = re.compile(r"\b(?:environ|getenv)\b")


def test_the_environment_names_folders_and_a_compiler_only() -> None:
    readers = {file for file in RELATIVE if ENVIRONMENT.search((PACKAGE / file).read_text(encoding="utf-8"))}
    assert readers == {"kernels/cpu/build.py", "kernels/verdict_cache.py"}, "no mode and no number from the environment"
    used = set().union(*(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', (PACKAGE / file).read_text()) for file in readers))
    assert used == {"CC", "XDG_CACHE_HOME"}


def architecture_names(source: str) -> list[str]:
    """Architecture names that stand in `source` as strings."""
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and re.fullmatch(r"\w+For(CausalLM|\w*Generation)", text)]


def test_only_the_registry_names_architectures() -> None:
    named = {file: architecture_names((PACKAGE / file).read_text(encoding="utf-8")) for file in RELATIVE}
    assert named.pop("architectures.py") == list(ARCHITECTURES), "control: the registry itself is found"
    named.pop("demo.py")  # its control is one class of transformers
    assert {file: names for file, names in named.items() if names} == {}
    for name, architecture in ARCHITECTURES.items():
        assert hasattr(importlib.import_module(f"isobit.models.{architecture.module}"), name)


def test_public_names_are_frozen() -> None:
    assert isobit.__all__ == [
        "LLM", "CompletionOutput", "EngineConfig", "RequestResult", "SamplingParams", "TokenLogprob", "__version__",
    ]  # fmt: skip
    assert order.__all__ == [
        "DEVICE_CLASSES", "KV_BLOCK", "NUMERICS_VERSION", "AttentionOrder", "LinearOrder", "LogprobsOrder",
        "MmaAttentionOrder", "MmaLinearOrder", "MoeCombineOrder", "NormOrder", "Order", "PointwiseOrder",
        "SamplingOrder", "attention_order", "fingerprint", "linear_order", "logprobs_order", "mma_attention_order",
        "mma_linear_order", "model_orders", "moe_combine_order", "norm_order", "pointwise_order", "sampling_order",
    ]  # fmt: skip
    assert all(hasattr(isobit, name) for name in isobit.__all__)
    assert all(hasattr(order, name) for name in order.__all__)


ENGINE_OPTIONS = {
    "--activation-dtype", "--chat-template", "--chunked-prefill-size", "--config", "--context-length", "--cpu-library",
    "--device", "--disable-radix-cache", "--dtype", "--help", "--hf-overrides", "--kv-cache-dtype", "--load-format",
    "--max-logprobs",
    "--max-queued-requests", "--max-running-requests", "--max-total-tokens", "--model", "--num-threads",
    "--random-seed", "--served-model-name",
    # names of other engines
    "--max-model-len", "--max-num-batched-tokens", "--max-num-seqs", "--model-path", "--no-enable-prefix-caching",
    "--threads",
}  # fmt: skip
OPTIONS = {
    "serve": ENGINE_OPTIONS | {"--generation-config", "--host", "--port", "--sampling-defaults"},
    "generate": ENGINE_OPTIONS
    | {"--chat", "--json", "--system", "--stop"}
    | {
        "--frequency-penalty", "--logprobs", "--max-tokens", "--min-p", "--min-tokens", "--n", "--presence-penalty",
        "--repetition-penalty", "--seed", "--temperature", "--top-k", "--top-p",
    },
    "score": ENGINE_OPTIONS | {"--json"},
    "plan": ENGINE_OPTIONS,
    "orders": ENGINE_OPTIONS,
    "doctor": {"--device", "--help", "--json", "--model"},
}  # fmt: skip


def test_command_line_options_are_frozen() -> None:
    _, commands = cli.build_parser()
    found = {name: cli.option_names(parser) for name, parser in commands.items()}
    assert found == {name: sorted(options) for name, options in OPTIONS.items()}


def test_cpu_libraries_to_choose_from_are_those_that_are_built() -> None:
    choices = next(spec for spec in fields(EngineConfig) if spec.name == "cpu_library").metadata["choices"]
    assert choices == ("auto", *INSTRUCTION_FLAGS)


def test_version_is_one() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{isobit.__version__}"\n' in text
