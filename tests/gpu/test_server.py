"""SmolLM2 on an NVIDIA GPU behind a real server: what `tests/test_server_smollm2.py` asks of a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isobit import LLM
from isobit.checkpoint import embedded_checkpoint
from isobit.engine import LLMEngine
from tests.server_harness import Server, running_server
from tests.test_server_smollm2 import (  # noqa: F401
    test_alone_in_a_crowd_warm_and_chunked,
    test_echo_of_emoji_and_accents,
    test_english_is_likely,
    test_scoring_gives_the_bits_of_generating,
    test_the_answer_makes_sense_and_is_the_offline_one,
    test_what_the_server_says_about_itself,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def llm() -> LLM:
    try:
        embedded_checkpoint()
    except ValueError as error:
        pytest.skip(str(error))
    return LLM("smollm2", device="cuda", context_length=512, chunked_prefill_size=64, max_total_tokens=4096)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    engine = LLMEngine(llm.engine.config, llm.engine.loaded)
    with running_server(engine, llm.tokenizer) as running:
        yield running


def test_the_device_is_the_gpu(llm: LLM) -> None:
    assert llm.engine.plan.device_class == "sm90" and llm.engine.loaded.ops.library.device.type == "cuda"
