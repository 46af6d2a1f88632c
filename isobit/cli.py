"""The command line: `isobit serve | generate | score | plan | orders | doctor`.

The engine's options are generated from the fields of EngineConfig, here and in a YAML file alike. Invariant: a mistake
of the user ends in one line that says what is possible and exit code 2, never in a traceback; `--help` needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from isobit import __version__
from isobit.config import EngineConfig, check_type
from isobit.kernels.cpu.build import KernelBuildError
from isobit.request import SamplingParams

if TYPE_CHECKING:
    from isobit.output import RequestResult

# Names that users of other engines type; they mean exactly the option on the left.
ALIASES = {
    "model": ("--model-path",),
    "context_length": ("--max-model-len",),
    "max_running_requests": ("--max-num-seqs",),
    "chunked_prefill_size": ("--max-num-batched-tokens",),
    "disable_radix_cache": ("--no-enable-prefix-caching",),
    "num_threads": ("--threads",),
}
SAMPLING_OPTIONS: dict[str, type] = {
    "max_tokens": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float, "seed": int, "n": int,
    "repetition_penalty": float, "frequency_penalty": float, "presence_penalty": float, "min_tokens": int,
    "logprobs": int,
}  # fmt: skip


SERVE_OPTIONS = {"host": "str", "port": "int", "generation_config": "str", "sampling_defaults": "str"}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 when the work failed, 2 for a mistake of the user."""
    parser, commands = build_parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        command = commands[options.command]
        command.error(f"unknown option {' '.join(unknown)}; known: {', '.join(option_names(command))}")
    try:
        return int(options.run(options))
    except (ValueError, OSError, KernelBuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and that of each command."""
    parser = Parser(prog="isobit", description="Deterministic LLM inference: serve, generate, score, prove.")
    parser.add_argument("--version", action="version", version=f"isobit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    made: dict[str, Parser] = {}
    for name, text, add_options, run in (
        ("serve", "serve a model with the OpenAI API", _serve_options, run_serve),
        ("generate", "continue a prompt, or answer it with --chat", _generate_options, run_generate),
        ("score", "print the log-prob of every token of a text", _score_options, run_score),
        ("plan", "print what the options resolve to, and why", _add_engine_options, run_plan),
        ("orders", "print the reduction Orders of a model", _add_engine_options, run_orders),
        ("doctor", "prove every kernel on this machine and print the table", _doctor_options, run_doctor),
    ):
        made[name] = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        add_options(made[name])
        made[name].set_defaults(run=run)
    return parser, made


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """The long options of a parser, sorted."""
    return sorted(name for action in parser._actions for name in action.option_strings if name.startswith("--"))


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine options")
    group.add_argument("--config", metavar="FILE", help="YAML file with options by name; the command line wins")
    for spec in fields(EngineConfig):
        names = [f"--{spec.name.replace('_', '-')}", *ALIASES.get(spec.name, ())]
        default = "" if spec.default in (None, MISSING) else f" (default: {spec.default})"
        help_text = f"{spec.metadata['help']}{default}".replace("%", "%%")
        if spec.type == "bool":
            group.add_argument(*names, dest=spec.name, action="store_true", default=argparse.SUPPRESS, help=help_text)
            continue
        group.add_argument(
            *names, dest=spec.name, type=int if "int" in str(spec.type) else str, default=argparse.SUPPRESS,
            choices=spec.metadata["choices"], help=help_text,
        )  # fmt: skip


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--host", default=argparse.SUPPRESS, help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=argparse.SUPPRESS, help="port; 0 picks one (default: 8000)")
    parser.add_argument("--generation-config", choices=("auto", "none"), default=argparse.SUPPRESS,
                        help="auto: the checkpoint's sampling defaults apply to what a request leaves out "
                             "(default: auto)")  # fmt: skip
    parser.add_argument("--sampling-defaults", metavar="JSON", default=argparse.SUPPRESS,
                        help="sampling defaults that win over the checkpoint's")  # fmt: skip
    _add_engine_options(parser)


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; read from standard input when absent")
    parser.add_argument("--chat", action="store_true", help="answer the prompt as a user's message")
    parser.add_argument("--system", help="system message, with --chat")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON, with its digest")
    group = parser.add_argument_group("sampling options (default: the checkpoint's)")
    for name, kind in SAMPLING_OPTIONS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS)
    group.add_argument("--stop", action="append", default=argparse.SUPPRESS, help="stop string; may be repeated")
    _add_engine_options(parser)


def _score_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", help="the text; read from standard input when absent")
    parser.add_argument("--json", action="store_true", help="print token ids and log-probs as JSON")
    _add_engine_options(parser)


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="whose Orders to prove (default: smollm2)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="whose kernels (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def read_config_file(path: str, known: set[str]) -> dict[str, Any]:
    """Options of a YAML file, dashes or underscores alike. Raises ValueError naming what is unknown."""
    import yaml

    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} must map option names to values, found {type(value).__name__}")
    options = {str(name).replace("-", "_"): item for name, item in value.items()}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"{path}: unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    for name in ("hf_overrides", "sampling_defaults"):
        if isinstance(options.get(name), dict):
            options[name] = json.dumps(options[name])
    return options


def resolve_options(
    options: argparse.Namespace, own: Mapping[str, str] = MappingProxyType({})
) -> tuple[EngineConfig, dict[str, Any]]:
    """(engine config, the options in `own` that were given); the command line wins over the file.

    `own` maps names to types as `check_type` reads them; the types of the engine's options are checked with them.
    """
    engine_names = {spec.name for spec in fields(EngineConfig)}
    given = {name: value for name, value in vars(options).items() if name in engine_names or name in own}
    if getattr(options, "model_argument", None) is not None:
        if given.get("model", options.model_argument) != options.model_argument:
            raise ValueError(f"two models are named: {options.model_argument} and {given['model']}")
        given["model"] = options.model_argument
    if options.config is not None:
        given = {**read_config_file(options.config, engine_names | set(own)), **given}
    for name in own.keys() & given.keys():
        check_type(name, given[name], own[name])
    config = EngineConfig.from_options({name: value for name, value in given.items() if name in engine_names})
    return config, {name: given[name] for name in own if name in given}


def run_serve(options: argparse.Namespace) -> int:
    """Serve until interrupted."""
    config, own = resolve_options(options, SERVE_OPTIONS)
    from isobit.server.run import serve

    serve(config, **own)
    return 0


def _text_or_stdin(text: str | None, what: str) -> str:
    if text is not None:
        return text
    if sys.stdin.isatty():
        raise ValueError(f"give a {what}, or pipe one in")
    return sys.stdin.read()


def run_generate(options: argparse.Namespace) -> int:
    """Print one sample after another, or everything as JSON."""
    config, _ = resolve_options(options)
    names = (*SAMPLING_OPTIONS, "stop")
    given = {name: getattr(options, name) for name in names if name in options}
    SamplingParams(**given)
    prompt = _text_or_stdin(options.prompt, "prompt")
    if options.system is not None and not options.chat:
        raise ValueError("--system needs --chat")
    from isobit.llm import LLM

    llm = LLM(**asdict(config))
    params = SamplingParams(**{**llm.default_values, **given})
    if options.chat:
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        [result] = llm.chat([*system, {"role": "user", "content": prompt}], params, use_tqdm=False)
    else:
        [result] = llm.generate(prompt, params, use_tqdm=False)
    print(json.dumps({**asdict(result), "bits_digest": result.bits_digest()}) if options.json else _as_text(result))
    errors = [output.error for output in result.outputs if output.error is not None]
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


def _as_text(result: RequestResult) -> str:
    if len(result.outputs) == 1:
        return result.outputs[0].text
    return "\n".join(f"[{output.index}] {output.text}" for output in result.outputs)


def run_score(options: argparse.Namespace) -> int:
    """Print log-prob and text of every token, then the sum."""
    config, _ = resolve_options(options)
    text = _text_or_stdin(options.text, "text")
    from isobit.detokenizer import token_label
    from isobit.llm import LLM

    llm = LLM(**asdict(config))
    token_ids = llm.tokenizer.encode(text)
    try:
        [logprobs] = llm.score([token_ids], use_tqdm=False)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"token_ids": token_ids, "logprobs": logprobs}))
        return 0
    for token, logprob in zip(token_ids, logprobs, strict=True):
        print(f"{'' if logprob is None else format(logprob, '.6f'):>12}  {token_label(llm.tokenizer, token)!r}")
    print(f"{sum(logprob for logprob in logprobs if logprob is not None):>12.6f}  sum")
    return 0


def run_plan(options: argparse.Namespace) -> int:
    """Print the resolved plan."""
    config, _ = resolve_options(options)
    from isobit.loading import device_facts
    from isobit.model_config import load_model_config
    from isobit.plan import resolve_plan

    model = load_model_config(config.model, config.parsed_overrides())
    print(resolve_plan(config, model, device_facts(config.device)).format())
    return 0


def run_orders(options: argparse.Namespace) -> int:
    """Print the Orders under the given dtypes."""
    config, _ = resolve_options(options)
    from isobit.loading import device_facts
    from isobit.model_config import load_model_config
    from isobit.order_table import format_orders
    from isobit.plan import resolve_plan

    model_config = load_model_config(config.model, config.parsed_overrides())
    print(format_orders(resolve_plan(config, model_config, device_facts(config.device)).orders))
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    """Print the table of kernels; exit code 1 if one is not admitted."""
    from isobit.doctor import run_doctor as run

    return run(options.model, as_json=options.json, device=options.device)
