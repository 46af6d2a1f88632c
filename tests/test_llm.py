"""The offline API: kinds of prompts, lists, n, scores, seeds; one bad item runs nothing; the names `isobit` exports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isobit
from isobit import LLM, SamplingParams
from isobit.output import RequestResult
from tests.fake_engine import VOCAB, FakeEngine, fake_tokenizer
from tests.server_harness import running_server
from tests.tiny import make_tiny

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)


def make(**options: Any) -> LLM:
    return LLM.from_engine(FakeEngine(**options), fake_tokenizer())


def bits(results: list[RequestResult]) -> list[str]:
    return [result.bits_digest() for result in results]


def test_kinds_of_prompts_are_one() -> None:
    llm = make()
    ids = llm.tokenizer.encode("the sum of parts")
    forms: list[Any] = ["the sum of parts", ids, tuple(ids), {"prompt": "the sum of parts"}, {"prompt_token_ids": ids}]
    digests = [bits(llm.generate(form, GREEDY, use_tqdm=False)) for form in forms]
    assert all(digest == digests[0] and len(digest) == 1 for digest in digests)
    assert bits(llm.generate(forms, GREEDY, use_tqdm=False)) == digests[0] * len(forms)
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_order_and_company_do_not_matter() -> None:
    prompts = [f"prompt {index} of the batch" for index in range(12)]
    params = [SamplingParams(max_tokens=3 + index % 5, seed=index, logprobs=1) for index in range(12)]
    alone = [bits(make().generate(prompt, one, use_tqdm=False))[0] for prompt, one in zip(prompts, params, strict=True)]
    llm = make(max_queued_requests=5)
    assert bits(llm.generate(prompts, params, use_tqdm=False)) == alone
    assert bits(make().generate(prompts[::-1], params[::-1], use_tqdm=False)) == alone[::-1]
    assert llm.engine.stats().max_step_requests == 5  # they did run together, and never above the queue's limit
    assert len(set(alone)) == 12


def test_results() -> None:
    llm = make()
    params = SamplingParams(max_tokens=5, n=3, seed=7, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    [result] = llm.generate("the order", params, use_tqdm=False)
    assert result.prompt == "the order" and result.prompt_token_ids == tuple(llm.tokenizer.encode("the order"))
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    for output in result.outputs:
        assert len(output.token_ids) == 5 and output.finish_reason == "length" and output.stop_reason is None
        assert output.logprobs is not None and [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        assert "".join(output.token_texts) == output.text
        one = SamplingParams(max_tokens=5, seed=output.seed, logprobs=1, ignore_eos=True)
        assert llm.generate("the order", one, use_tqdm=False)[0].outputs[0].token_ids == output.token_ids
    assert len({output.token_ids for output in result.outputs}) == 3 and result.outputs[0].seed == 7


def test_the_digest_sees_one_bit() -> None:
    [result] = make().generate("the order", GREEDY, use_tqdm=False)
    first = result.outputs[0]
    assert first.logprobs is not None
    entry = first.logprobs[2]
    nudged = type(entry)(entry.token_id, float(np.nextafter(np.float32(entry.logprob), np.float32(0))), entry.top)
    logprobs = (*first.logprobs[:2], nudged, *first.logprobs[3:])
    changed = type(result)(**{**vars(result), "outputs": (type(first)(**{**vars(first), "logprobs": logprobs}),)})
    assert changed.bits_digest() != result.bits_digest()


def test_unseeded_requests_get_seeds() -> None:
    params = SamplingParams(max_tokens=8)
    llm = make()
    results = llm.generate(["same prompt"] * 20, params, use_tqdm=False)
    assert len({result.outputs[0].text for result in results}) >= 15
    replayed = SamplingParams(max_tokens=8, seed=results[3].outputs[0].seed)
    assert llm.generate("same prompt", replayed, use_tqdm=False)[0].outputs[0].text == results[3].outputs[0].text
    seeds = [make(random_seed=5).generate("x", params, use_tqdm=False)[0].outputs[0].seed for _ in range(2)]
    assert seeds[0] == seeds[1]


def test_score_is_what_generation_said() -> None:
    llm = make()
    params = SamplingParams(max_tokens=20, seed=1, logprobs=0, ignore_eos=True)
    [result] = llm.generate("the sum", params, use_tqdm=False)
    output = result.outputs[0]
    assert output.logprobs is not None
    [scores] = llm.score([[*result.prompt_token_ids, *output.token_ids]], use_tqdm=False)
    assert scores[0] is None and len(scores) == len(result.prompt_token_ids) + 20
    assert scores[-20:] == [entry.logprob for entry in output.logprobs]
    assert llm.score("the sum", use_tqdm=False)[0] == scores[: len(result.prompt_token_ids)]
    llm.engine.poison(llm.tokenizer.encode("bad"))
    with pytest.raises(RuntimeError, match="NaN"):
        llm.score(["the sum", "bad"], use_tqdm=False)


def test_a_broken_item_says_so_and_leaves_the_others() -> None:
    llm = make()
    alone = bits(llm.generate("good", GREEDY, use_tqdm=False))
    llm.engine.poison(llm.tokenizer.encode("bad"))
    good, bad = llm.generate(["good", "bad"], GREEDY, use_tqdm=False)
    assert bits([good]) == alone
    assert bad.outputs[0].finish_reason == "error" and "NaN" in str(bad.outputs[0].error)


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (["fine", [VOCAB]], GREEDY, "prompt 1.*480"),
        (["fine", []], GREEDY, "prompt 1.*no tokens"),
        (["fine", [1] * 256], GREEDY, "prompt 1.*256"),
        (["fine", 5.5], GREEDY, "prompt 1"),
        (["fine", ["a"]], GREEDY, "prompt 1"),
        (["fine", [None]], GREEDY, "prompt 1"),
        (["fine", {"prompt": "x", "extra": 1}], GREEDY, "prompt 1"),
        (["fine", "\ud800"], GREEDY, "prompt 1"),
        (5, GREEDY, "prompts must be"),
        (["fine", "x"], [GREEDY], "1 sampling_params for 2"),
        (["fine", "x"], [GREEDY, SamplingParams(logit_bias={VOCAB: 1})], "prompt 1"),
        ("fine", SamplingParams(logprobs=65), "max_logprobs"),
    ],
)
def test_one_bad_item_runs_nothing(prompts: Any, params: Any, words: str) -> None:
    llm = make()
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.stats().num_steps == 0 and not llm.engine.has_unfinished()


def test_an_interrupted_list_leaves_nothing_behind() -> None:
    llm = make()
    llm.engine.fail_steps = 1
    with pytest.raises(RuntimeError, match="made-up"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished()
    assert bits(llm.generate("a", GREEDY, use_tqdm=False)) == bits(make().generate("a", GREEDY, use_tqdm=False))


def test_chat_is_the_server_s_chat() -> None:
    llm = make()
    messages = [{"role": "user", "content": "the sum of parts"}]
    params = SamplingParams(max_tokens=8, seed=3)
    [one] = llm.chat(messages, params, use_tqdm=False)
    both = llm.chat([messages, messages], params, use_tqdm=False)
    assert bits(both) == bits([one]) * 2
    with running_server(FakeEngine(), fake_tokenizer()) as server:
        answer = server.chat("the sum of parts", max_tokens=8, seed=3, return_token_ids=True)
    assert tuple(answer["prompt_token_ids"]) == one.prompt_token_ids
    assert answer["choices"][0]["message"]["content"] == one.outputs[0].text
    with pytest.raises(ValueError, match=r"conversation 1.*alternate"):
        llm.chat([messages, messages * 2], params, use_tqdm=False)


def test_checkpoint_defaults_apply_without_params() -> None:
    llm = make(defaults=(("temperature", 0.5), ("top_k", 1), ("max_length", 20)))
    assert llm.default_sampling_params == SamplingParams(temperature=0.5, top_k=1)
    greedy = llm.generate("x", SamplingParams(temperature=0.0), use_tqdm=False)[0].outputs[0].token_ids
    assert llm.generate("x", use_tqdm=False)[0].outputs[0].token_ids == greedy


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    make().generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err
    make().generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_unknown_options_and_models() -> None:
    with pytest.raises(ValueError, match=r"surprise.*known.*context_length"):
        LLM(model="smollm2", surprise=1)
    with pytest.raises(ValueError, match="does not exist"):
        LLM(model="no/such/folder")


def test_exports() -> None:
    assert isobit.__all__ == [
        "LLM", "CompletionOutput", "EngineConfig", "RequestResult", "SamplingParams", "TokenLogprob", "__version__",
    ]  # fmt: skip
    assert all(getattr(isobit, name) is not None for name in isobit.__all__)
    assert set(isobit.__all__) <= set(dir(isobit))
    with pytest.raises(AttributeError, match="SamplingParams"):
        isobit.nothing  # noqa: B018
    code = "import sys, isobit; isobit.SamplingParams; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_bad_config_is_told_as_one(tmp_path: Path) -> None:
    """Not as a tokenizer that cannot be loaded, which reads the same config.json."""
    folder = make_tiny("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config["rope_theta"], config["rope_scaling"] = 10000.0, {"rope_type": "longrope", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="longrope"):
        LLM(str(folder))
