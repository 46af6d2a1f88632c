"""The command line: its options are frozen here, and a mistake is one line that helps, never a traceback."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

from isobit.cli import ALIASES, SERVE_OPTIONS, build_parser, main, option_names, read_config_file, resolve_options
from isobit.config import EngineConfig
from isobit.kernels.cpu import build
from tests.fake_engine import FakeEngine, fake_tokenizer
from tests.tiny import tiny_checkpoint

ENGINE = [
    "--activation-dtype", "--chat-template", "--chunked-prefill-size", "--config", "--context-length", "--cpu-library",
    "--device", "--disable-radix-cache", "--dtype", "--help", "--hf-overrides", "--kv-cache-dtype", "--load-format",
    "--max-logprobs", "--max-model-len", "--max-num-batched-tokens", "--max-num-seqs", "--max-queued-requests",
    "--max-running-requests", "--max-total-tokens", "--model", "--model-path", "--no-enable-prefix-caching",
    "--num-threads", "--random-seed", "--served-model-name", "--threads",
]  # fmt: skip
OWN = {
    "serve": ["--generation-config", "--host", "--port", "--sampling-defaults"],
    "generate": ["--chat", "--frequency-penalty", "--json", "--logprobs", "--max-tokens", "--min-p", "--min-tokens",
                 "--n", "--presence-penalty", "--repetition-penalty", "--seed", "--stop", "--system", "--temperature",
                 "--top-k", "--top-p"],
    "score": ["--json"], "plan": [], "orders": [],
}  # fmt: skip


def test_options_are_frozen() -> None:
    _, commands = build_parser()
    assert list(commands) == ["serve", "generate", "score", "plan", "orders", "doctor"]
    for name, own in OWN.items():
        assert option_names(commands[name]) == sorted([*ENGINE, *own]), name
    assert option_names(commands["doctor"]) == ["--device", "--help", "--json", "--model"]


def test_every_engine_option_is_on_the_command_line() -> None:
    names = {f"--{spec.name.replace('_', '-')}" for spec in fields(EngineConfig)}
    assert names == set(ENGINE) - {"--config", "--help"} - {alias for group in ALIASES.values() for alias in group}


def resolved(*arguments: str) -> EngineConfig:
    parser, _ = build_parser()
    return resolve_options(parser.parse_args(arguments), SERVE_OPTIONS)[0]


def test_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("max-running-requests: 3\nchunked_prefill_size: 17\nport: 0\nhf-overrides: {rope_theta: 5.0}\n")
    config = resolved("serve", "some/model", "--config", str(path), "--max-num-seqs", "5", "--disable-radix-cache")
    assert (config.max_running_requests, config.chunked_prefill_size) == (5, 17)
    assert config.disable_radix_cache and config.model == "some/model" and config.max_logprobs == 64
    assert config.parsed_overrides() == {"rope_theta": 5.0}
    parser, _ = build_parser()
    own = resolve_options(parser.parse_args(["serve", "--config", str(path)]), SERVE_OPTIONS)[1]
    assert own == {"port": 0}
    assert resolved("plan", "--model-path", "x").model == "x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("surprise: 1", "unknown option surprise; known: activation_dtype"),
        ("max_running_requests: many", "max_running_requests='many'"),
        ("max_running_requests: 1.5", "max_running_requests=1.5"),
        ("dtype: float8", "float8.*float32"),
        ("- a", "list"),
        ("a: [", "not YAML"),
        ("port: 1", "unknown option port"),
    ],
)
def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    assert main(["plan", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error) and error.startswith("error: ") and error.count("\n") == 1


def test_an_empty_file_is_fine(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert read_config_file(str(tmp_path / "empty.yaml"), set()) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--surprise"], "unknown option --surprise; known: .*--port"),
        (["serve", "--max-runing-requests", "4"], "known: .*--max-running-requests"),
        (["serve", "--port", "x"], "invalid int"),
        (["serve", "--port", "70000"], "70000.*65535"),
        (["serve", "--host", "300.1.2.3", "--port", "0"], "cannot listen"),
        (["serve", "a", "--model", "b"], "two models"),
        (["serve", "--dtype", "int3"], "float32"),
        (["serve", "--sampling-defaults", "{"], "not JSON"),
        (["serve", "no/such/model", "--port", "0"], "no/such/model.*does not exist"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--temperature", "nan"], "temperature"),
        (["generate", "x", "--system", "y"], "--chat"),
        (["generate", "x", "--max-running-requests", "0"], "max_running_requests=0"),
        (["generate", "x", "--model", "no/such/model"], "does not exist"),
        (["plan", "--config", "/no/such/file.yaml"], "No such file"),
        (["orders", "--model", "no/such/model"], "does not exist"),
        (["doctor", "--model", "no/such/model"], "does not exist"),
        (["dance"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    try:
        code: Any = main(arguments)
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert re.search(words, error), error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("port: abc", "^port='abc': a whole number"),
        ("port: true", "^port=True: a whole number"),
        ("host: 5", "^host=5: a text"),
        ("generation_config: 7", "^generation_config=7: a text"),
        ("sampling_defaults: [1]", r"^sampling_defaults=\[1\]: a text"),
        ("num_threads: 1.5", "^num_threads=1.5: a whole number"),
    ],
)
def test_types_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(line)
    assert main(["serve", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error.removeprefix("error: ")) and error.count("\n") == 1, error


def test_no_compiler_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_is_whole", lambda library: False)
    model = str(tiny_checkpoint("llama"))
    capsys.readouterr()  # making the checkpoint shows a bar
    assert main(["generate", "x", "--model", model]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: CC='no-such-compiler' names no program") and error.count("\n") == 1, error


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobit.llm.LLMEngine", lambda config: FakeEngine())
    monkeypatch.setattr("isobit.llm.load_tokenizer", lambda model, chat_template: fake_tokenizer())


def test_generate(fake_llm: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "the sum", "--max-tokens", "5", "--seed", "1"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json", "--logprobs", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["outputs"][0]["text"] + "\n" == text and len(result["bits_digest"]) == 64
    assert main([*arguments, "--n", "2"]) == 0
    assert capsys.readouterr().out.startswith("[0] ")
    assert main([*arguments, "--chat", "--system", "add"]) == 0
    assert capsys.readouterr().out != text


def test_score(fake_llm: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "the sum of parts", "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert scored["logprobs"][0] is None and len(scored["logprobs"]) == len(scored["token_ids"])
    assert main(["score", "the sum of parts"]) == 0
    assert "'<|bos|>'" in capsys.readouterr().out
    assert main(["score", "the sum \udcff"]) == 2  # a byte of the command line that is no UTF-8
    assert "lone surrogate" in capsys.readouterr().err


def test_a_model_that_gives_nan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.poison(fake_tokenizer().encode("bad"))
    monkeypatch.setattr("isobit.llm.LLMEngine", lambda config: engine)
    monkeypatch.setattr("isobit.llm.load_tokenizer", lambda model, chat_template: fake_tokenizer())
    for command in ("score", "generate"):
        assert main([command, "bad"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and "NaN" in error and error.count("\n") == 1, error


def test_prompt_from_standard_input(
    fake_llm: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Piped:
        def isatty(self) -> bool:
            return False

        def read(self) -> str:
            return "the sum"

    assert main(["generate", "the sum", "--max-tokens", "5", "--seed", "1"]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", Piped())
    assert main(["generate", "--max-tokens", "5", "--seed", "1"]) == 0
    assert capsys.readouterr().out == expected


def test_plan_and_orders(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_checkpoint("llama"))
    assert main(["plan", "--model", model, "--context-length", "128"]) == 0
    assert re.search(r"context_length +128 +as asked", capsys.readouterr().out)
    assert main(["orders", "--model", model, "--dtype", "bfloat16"]) == 0
    assert "pairing='odd-even'" in capsys.readouterr().out


def test_serve_on_a_chosen_port_until_interrupted() -> None:
    """The real command over a tiny checkpoint: it prints where it listens, answers at once, and ends on a signal."""
    command = [sys.executable, "-m", "isobit", "serve", str(tiny_checkpoint("llama")), "--port", "0",
               "--context-length", "128", "--served-model-name", "tiny"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("serving tiny at "):
                    break
            assert lines and " at http://127.0.0.1:" in lines[-1], (lines, process.stderr.read())
            body = {"prompt": [5, 6, 7], "max_tokens": 3, "seed": 1}
            url = lines[-1].split(" at ")[1].strip()
            answer = httpx.post(url + "/v1/completions", json=body, timeout=60).json()
            assert answer["usage"]["completion_tokens"] == 3 and answer["model"] == "tiny"
            assert any(line.startswith("fingerprint isobit-") for line in lines)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) in (0, 130, -signal.SIGINT)
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_help_needs_no_torch() -> None:
    code = "import sys; from isobit.cli import build_parser; build_parser(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("option", "value", "needed"),
    [
        ("disable_radix_cache", "false", "true or false"),  # a text is true in Python, whatever it says
        ("num_threads", "2", "a whole number"),
        ("num_threads", True, "a whole number"),
        ("max_logprobs", None, "a whole number"),
        ("random_seed", 1.5, "a whole number"),
        ("hf_overrides", {"rope_theta": 5.0}, "a text"),
        ("model", None, "a text"),
    ],
)
def test_options_of_another_type_are_refused(option: str, value: object, needed: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}=.*: {needed}"):
        EngineConfig.from_options({option: value})


def test_a_model_may_be_given_as_a_path() -> None:
    assert EngineConfig(model=Path("a/b")).model == "a/b"  # type: ignore[arg-type]
