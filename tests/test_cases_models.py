"""Logits and log-probs against transformers, and checkpoints as public bug reports describe them (sections C, Q, R).

Tiny checkpoints, float32, transformers over the same files as the reference. The tolerance is that of test_models.py:
rounding of two float32 forwards (measured worst here, position 8000 included: 3e-6 of the logits' scale), and one unit
in the last place of a frequency, which at position 8000 turns an angle by at most 8000 * 2^-24 = 5e-4. Each comparison
has a control that must be far outside it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit import LLM, SamplingParams
from isobit.batch import build_batch
from isobit.config import EngineConfig
from isobit.engine import LLMEngine
from isobit.loading import LoadedModel, load_model
from isobit.request import Request
from isobit.runner import Runner
from isobit.scheduler import ScheduledChunk
from isobit.tokenizer import load_tokenizer
from tests.harness import Arrival, all_logits, make_prompt, run_with
from tests.test_models import TOLERANCE, load, relative_error, transformers_logits
from tests.tiny import make_tiny, tiny_checkpoint

VOCAB = 503
POSITIONS = (0, 1, 100, 1000, 8000)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {}),
    "linear": ("llama_linear", {}),
    "llama3": ("llama3", {}),
    "yarn": ("llama_yarn", {}),
    "yarn short": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 512,
    }}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}),
}  # fmt: skip
PLAIN = '{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}'


def logits_at(loaded: LoadedModel, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Logits of some positions of one sequence, computed in one step: float32 [len(positions), V]."""
    size, cache = loaded.plan.page_size, loaded.new_kv_cache()
    request = Request("r", tuple(token_ids), SamplingParams(), max_tokens=0)
    request.pages = list(range(-(-len(token_ids) // size)))
    runner = Runner(loaded.ops, loaded.model, cache)
    with torch.inference_mode():
        hidden = runner.forward(build_batch([ScheduledChunk(request, 0, len(token_ids), True)], size))
        return torch.cat([piece for _, piece in runner.logits(hidden, positions)])


@pytest.mark.parametrize("rope", ROPES)
def test_case_146_logits_of_each_rope_type_up_to_position_8000(rope: str) -> None:
    kind, changes = ROPES[rope]
    folder = tiny_checkpoint(kind, **changes)
    token_ids = make_prompt(8001, VOCAB)
    sizes: dict[str, Any] = {"context_length": 8064, "max_total_tokens": 8192}
    ours = logits_at(load(folder, **sizes), token_ids, POSITIONS)
    theirs = transformers_logits(folder, token_ids)[list(POSITIONS)]
    for position, our, their in zip(POSITIONS, ours, theirs, strict=True):
        assert relative_error(our, their) < TOLERANCE, position
    if rope not in ("default", "dynamic"):
        plain = logits_at(load(folder, hf_overrides=PLAIN, **sizes), token_ids[:1001], POSITIONS[:4])
        errors = [relative_error(our, their) for our, their in zip(plain, theirs, strict=False)]
        assert min(errors[2:]) > 10 * TOLERANCE, "control: an ignored scaling shows from position 100 on"


def test_case_146_unknown_rope_types_are_refused_before_serving(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    rewrite(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ValueError, match="'spiral' is not supported"):
        LLM(model=str(folder))


def test_case_147_dynamic_rope_ends_at_the_trained_length() -> None:
    """Below it the logits are transformers' (case 146 above); beyond it they would depend on the length: refused."""
    folder = str(tiny_checkpoint("llama", max_position_embeddings=256, rope_parameters=DYNAMIC))
    with pytest.raises(ValueError, match=r"context_length=257 is above 256: .*dynamic"):
        LLM(model=folder, context_length=257)
    llm = LLM(model=folder)
    assert llm.engine.plan.context_length == 256, "the default is what can be kept"
    token_ids = make_prompt(256, VOCAB)
    assert relative_error(all_logits(llm.engine.loaded, [token_ids])[0], transformers_logits(folder, token_ids)) < 2e-4
    with pytest.raises(ValueError, match="257"):
        llm.generate([5] * 257, SamplingParams(max_tokens=0), use_tqdm=False)
    longer = transformers_logits(folder, make_prompt(400, VOCAB))[:256]
    assert relative_error(longer, transformers_logits(folder, token_ids)) > 1e-3, "control: more text moves old rows"


def rewrite(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; ... removes one."""
    raw = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def test_case_152_old_and_new_rope_keys_give_the_same_logits(tmp_path: Path) -> None:
    folder = make_tiny("llama3", tmp_path / "model")
    new = json.loads((folder / "config.json").read_text())["rope_parameters"]
    scaling = {key: value for key, value in new.items() if key not in ("rope_theta", "rope_type")}
    spellings: list[dict[str, Any]] = [
        {"rope_parameters": new},
        {"rope_parameters": ..., "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **scaling}},
        {"rope_parameters": ..., "rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **scaling}},
    ]
    token_ids, seen = make_prompt(300, VOCAB), []
    for spelling in spellings:
        rewrite(folder, **spelling)
        seen.append((all_logits(load(folder), [token_ids])[0].numpy().tobytes(), load(folder).fingerprint))
    assert len(set(seen)) == 1
    rewrite(folder, rope_scaling=...)
    assert all_logits(load(folder), [token_ids])[0].numpy().tobytes() != seen[0][0], "control: the scaling matters"
    rewrite(folder, rope_theta=...)
    with pytest.raises(ValueError, match="no rope_theta"):
        load(folder)


@pytest.mark.parametrize("kind", ["llama3", "qwen2"])
def test_case_140_a_tied_model_without_a_head_has_the_logits_of_transformers(kind: str) -> None:
    folder = tiny_checkpoint(kind)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    token_ids = make_prompt(200, VOCAB)
    theirs = transformers_logits(folder, token_ids)
    assert float(theirs.std()) > 0.1, "flat logits would prove nothing"
    assert relative_error(all_logits(load(folder), [token_ids])[0], theirs) < TOLERANCE


def test_case_139_tied_wins_over_a_head_in_the_file(tmp_path: Path) -> None:
    """Equal: silent. Different: a warning. Both: the logits of the tied model, by bytes."""
    folder = make_tiny("llama3", tmp_path / "model")
    token_ids = make_prompt(60, VOCAB)
    tied = all_logits(load(folder), [token_ids])[0].numpy().tobytes()
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, words in ((embedding.clone(), None), (embedding.flip(0).contiguous(), "lm_head.weight differs")):
        save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert all_logits(load(folder), [token_ids])[0].numpy().tobytes() == tied
        assert bool(caught) == bool(words) and all(str(words) in str(warning.message) for warning in caught)
    rewrite(folder, tie_word_embeddings=False)
    assert all_logits(load(folder), [token_ids])[0].numpy().tobytes() != tied, "control: this head is another"


def test_case_142_damaged_checkpoints_never_serve(tmp_path: Path) -> None:
    folder = make_tiny("mistral", tmp_path / "model", sharded=True)
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    for damage in (lambda: shard.write_bytes(content[:-64]), lambda: shard.unlink()):
        damage()
        with pytest.raises(ValueError, match=shard.name):
            LLM(model=str(folder))
    shard.write_bytes(content)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**table["weight_map"], "model.more": "absent.safetensors"}}))
    with pytest.raises(ValueError, match=r"absent\.safetensors"):
        LLM(model=str(folder))
    index.write_text(json.dumps(table))
    LLM(model=str(folder))  # control: whole again


def test_case_145_a_float16_checkpoint_that_overflows_float16(tmp_path: Path) -> None:
    """transformers in float16 gives NaN; here float32 is used, says so, and gives transformers' float32 logits."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "up_proj" in name:
            tensor.mul_(3e4)
        elif "down_proj" in name:
            tensor.div_(3e4)
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in halves.values())
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite(folder, dtype="float16")
    token_ids = make_prompt(30, VOCAB)
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).eval()
    with torch.inference_mode():
        assert not bool(torch.isfinite(half(torch.tensor([token_ids])).logits).all()), "control: float16 overflows"
    engine = LLMEngine(EngineConfig(model=str(folder)))
    info = engine.server_info()["plan"]
    assert info["dtype"] == "float32" and "float16" in info["reasons"]["dtype"]
    ours = all_logits(engine.loaded, [token_ids])[0]
    assert relative_error(ours, transformers_logits(folder, token_ids)) < TOLERANCE


def test_case_22_log_probs_against_transformers_whatever_the_settings() -> None:
    """The raw model's, to 1e-4 of transformers' log-softmax, and the same bits for every temperature, filter, seed."""
    folder = tiny_checkpoint("llama")
    config = EngineConfig(model=str(folder), dtype="float32", context_length=512)
    loaded = load_model(config)
    prompt = make_prompt(40, VOCAB)
    expected = torch.log_softmax(transformers_logits(folder, prompt)[-1].double(), 0)
    forced = int(expected.argsort(descending=True)[20])
    seen = set()
    for settings in (
        {"temperature": 0.0}, {"temperature": 0.3, "seed": 1}, {"temperature": 5.0, "seed": 2, "top_p": 0.5},
        {"top_k": 1, "seed": 3}, {"min_p": 0.9, "seed": 4}, {"repetition_penalty": 1.5, "seed": 5},
    ):  # fmt: skip
        params = SamplingParams(max_tokens=1, logprobs=0, logit_bias={forced: 100.0}, **settings)
        [entry] = run_with(loaded, config, [Arrival("r", prompt, params)]).results["r"].logprobs
        assert entry.token_id == forced
        seen.add(entry.logprob)
    assert len(seen) == 1 and abs(seen.pop() - float(expected[forced])) < 1e-4
    scaled = torch.log_softmax(transformers_logits(folder, prompt)[-1].double() / 5.0, 0)
    assert abs(float(scaled[forced] - expected[forced])) > 0.1, "control: the other meaning is far away"


ENGLISH = "the sum of parts is a number, and the order of addition is the order of rounding in each row of the batch; "


def test_case_23_prompt_log_probs_of_english_text_against_transformers() -> None:
    """The first token has none, the others are within 1e-3 of transformers', each read from the position before it.

    test_server_smollm2 has the same of a model that knows English, where the mean must be sane.
    """
    folder = tiny_checkpoint("llama")
    token_ids = load_tokenizer(folder).encode(ENGLISH * 2)[:50]
    assert len(token_ids) == 50
    [scores] = LLM(model=str(folder), context_length=128).score([token_ids], use_tqdm=False)
    expected = torch.log_softmax(transformers_logits(folder, tuple(token_ids)).double(), 1)
    assert scores[0] is None and len(scores) == 50
    following = torch.tensor(token_ids[1:])[:, None]
    ours = torch.tensor(scores[1:], dtype=torch.float64)[:, None]
    assert float((ours - expected[:-1].gather(1, following)).abs().max()) < 1e-3
    assert float((ours - expected[1:].gather(1, following)).abs().max()) > 1, "control: a token's own position"
