"""Logits against transformers in float32, for every family and rope type, at every position; and full-logits relations.

Correctness has a tolerance: both sides add the same float32 products in another order, so they differ by rounding
only. A wrong scaling, bias or norm moves logits by orders of magnitude more (the self-test below plants one).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isobit.config import EngineConfig
from isobit.demo import transformers_model
from isobit.loading import LoadedModel, load_model
from isobit.tokenizer import load_tokenizer
from tests.harness import all_logits, make_prompt
from tests.tiny import KINDS, make_tiny

# Rounding of two float32 forwards: about sqrt(terms) * 2^-24 relative per sum, a few sums deep. Measured worst over
# the families: 1e-5 of the logits' scale; 2e-4 leaves a factor of twenty and is far below any real fault (> 1e-2).
TOLERANCE = 2e-4


def load(model: str | Path, **options: object) -> LoadedModel:
    return load_model(EngineConfig(model=str(model), dtype="float32", **options))  # type: ignore[arg-type]


def transformers_logits(model: str | Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0]
    return logits


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the scale of the logits."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_tiny(request.param, tmp_path / "model")


def test_logits_are_those_of_transformers(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    token_ids = make_prompt(300, loaded.model_config.vocab_size)
    ours = all_logits(loaded, [token_ids])[0]
    theirs = transformers_logits(checkpoint, token_ids)
    assert float(theirs.std()) > 0.1, "flat logits would prove nothing"
    assert relative_error(ours, theirs) < TOLERANCE


def test_the_tolerance_notices_a_wrong_rope(tmp_path: Path) -> None:
    folder = make_tiny("llama3", tmp_path / "model")
    wrong = load(folder, hf_overrides='{"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}')
    token_ids = make_prompt(300, wrong.model_config.vocab_size)
    assert relative_error(all_logits(wrong, [token_ids])[0], transformers_logits(folder, token_ids)) > 10 * TOLERANCE


def test_full_logits_do_not_move_with_company_or_page_layout(checkpoint: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(EngineConfig(model=str(checkpoint), dtype=dtype, max_total_tokens=8192, context_length=512))
        vocab_size = loaded.model_config.vocab_size
        lengths = (1, 8, 9, 64, 65, 129, 257)
        sequences = [make_prompt(length, vocab_size, salt=index) for index, length in enumerate(lengths)]
        together = all_logits(loaded, sequences)
        permuted = all_logits(loaded, sequences[::-1], page_order=-1)[::-1]
        for sequence, joint, other in zip(sequences, together, permuted, strict=True):
            alone = all_logits(loaded, [sequence])[0]
            assert alone.numpy().tobytes() == joint.numpy().tobytes() == other.numpy().tobytes(), len(sequence)


def test_control_unconstrained_kernels_move_with_company(checkpoint: Path) -> None:
    """The same comparison on torch's own kernels must fail, or the relation above would prove nothing."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32).eval()
    sequence = make_prompt(65, reference.config.vocab_size)
    with torch.inference_mode():
        alone = reference(torch.tensor([sequence])).logits[0]
        step_by_step = torch.cat([reference(torch.tensor([sequence[: end + 1]])).logits[0, -1:] for end in range(65)])
    assert relative_error(alone, step_by_step) < TOLERANCE
    assert alone.numpy().tobytes() != step_by_step.numpy().tobytes()


def test_fingerprint_covers_what_the_weights_do_not_say(tmp_path: Path) -> None:
    """Same tensors, another rope or epsilon: other logits, so another fingerprint."""
    folder = make_tiny("llama", tmp_path / "model")
    overrides = ("{}", '{"rms_norm_eps": 0.01}', '{"rope_theta": 12345.0}')
    loaded = [load(folder, hf_overrides=text) for text in overrides]
    token_ids = make_prompt(40, loaded[0].model_config.vocab_size)
    assert len({all_logits(model, [token_ids])[0].numpy().tobytes() for model in loaded}) == 3
    assert len({model.weights_digest for model in loaded}) == 1
    assert len({model.fingerprint for model in loaded}) == 3
    assert load(folder).fingerprint == loaded[0].fingerprint


def test_smollm2_has_the_logits_of_transformers() -> None:
    """The embedded model on English text. How its GGUF file is read is compared in test_weights.py."""
    reference = transformers_model("smollm2", torch.float32)
    token_ids = load_tokenizer("smollm2").encode("The old lighthouse keeper climbed the stairs every evening. " * 12)
    with torch.inference_mode():
        theirs: torch.Tensor = reference(torch.tensor([token_ids])).logits[0]
    [ours] = all_logits(load("smollm2", context_length=256), [token_ids])
    assert float(theirs.std()) > 0.1, "flat logits would prove nothing"
    assert relative_error(ours, theirs) < TOLERANCE
