"""Every field of SamplingParams against bad values: the error names field and value; good values are kept exactly.

Covers the parameter part of the bad-input cases (110, 112, 113, 115, 117, 122, 128, 129). Limits that depend on a model
(vocabulary, context length, max_logprobs) are the engine's and are tested there.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from isobit.request import MAX_N, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams, derive_seed

NAN, INF = float("nan"), float("inf")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
INTEGERS = ("top_k", "min_tokens", "n", "max_tokens", "seed", "logprobs", "prompt_logprobs")
OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
LISTS = ("stop", "stop_token_ids", "logit_bias")
WRONG_TYPES: tuple[Any, ...] = ("7", "", True, [1], {}, object(), 1 + 2j, b"1")


def refused(field: str, value: Any, *also: str) -> None:
    """`value` raises a ValueError that names the field and shows the value (or what `also` asks for)."""
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(field), message
    for part in also or (repr(value),):
        assert part in message, message
    assert len(message) < 300, "the message repeats a huge value"


def test_every_field_is_covered() -> None:
    assert {spec.name for spec in fields(SamplingParams)} == {*NUMBERS, *INTEGERS, *FLAGS, *LISTS}


@pytest.mark.parametrize("value", [NAN, INF, -INF, -3, -2.5, 1e308, 2**64, None, *WRONG_TYPES], ids=repr)
@pytest.mark.parametrize("field", NUMBERS)
def test_bad_numbers(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize("value", [NAN, INF, -INF, -2, 1e308, 1.5, 1.0, 2**64, 2**63 + 1, *WRONG_TYPES], ids=repr)
@pytest.mark.parametrize("field", INTEGERS)
def test_bad_integers(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize("field", [name for name in INTEGERS if name not in OPTIONAL])
def test_none_is_no_integer(field: str) -> None:
    refused(field, None)


@pytest.mark.parametrize("field", OPTIONAL)
def test_none_where_it_means_unset(field: str) -> None:
    assert getattr(SamplingParams(**{field: None}), field) is None


@pytest.mark.parametrize("value", [None, 0, 1, "true", "false", 1.0, []], ids=repr)
@pytest.mark.parametrize("field", FLAGS)
def test_bad_flags(field: str, value: Any) -> None:
    """'false' is a true value in Python: a string must not switch anything on."""
    refused(field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1e-9), ("temperature", 1.1e6), ("top_p", 0), ("top_p", 0.0), ("top_p", 1.0000001),
        ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0), ("repetition_penalty", -1),
        ("repetition_penalty", 5e-324), ("frequency_penalty", 2.1), ("presence_penalty", -2.1),
        ("top_k", -2), ("n", 0), ("n", -1), ("n", MAX_N + 1), ("n", 5_000_000), ("min_tokens", -1), ("max_tokens", -1),
        ("seed", -1), ("seed", 2**63), ("seed", 2**64), ("logprobs", -1), ("logprobs", 10**10),
        ("prompt_logprobs", -1), ("prompt_logprobs", 10**10),
    ],
)  # fmt: skip
def test_just_outside_the_range(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0), ("temperature", 1e-38), ("temperature", 5e-324), ("temperature", 2), ("temperature", 1e6),
        ("top_p", 1), ("top_p", 1e-9), ("min_p", 0), ("min_p", 1), ("repetition_penalty", 0.5),
        ("repetition_penalty", 1), ("repetition_penalty", 2), ("repetition_penalty", 100), ("frequency_penalty", -2),
        ("frequency_penalty", 2), ("presence_penalty", 2.0), ("top_k", -1), ("top_k", 0), ("top_k", 1),
        ("top_k", 2**31 - 1), ("top_k", 2**40), ("top_k", 2**63), ("n", 1), ("n", MAX_N), ("min_tokens", 0),
        ("max_tokens", 0), ("max_tokens", 1), ("max_tokens", 2**31 - 1), ("max_tokens", 2**63), ("seed", 0),
        ("seed", 2**31), ("seed", 2**63 - 1), ("logprobs", 0), ("logprobs", 20), ("prompt_logprobs", 0),
    ],
)  # fmt: skip
def test_good_values_are_kept(field: str, value: Any) -> None:
    kept = getattr(SamplingParams(**{field: value}), field)
    assert kept == value and type(kept) is (float if field in NUMBERS else int)


def test_numbers_of_other_types() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(7), seed=np.uint64(9), top_p=Fraction(1, 2))  # type: ignore[arg-type]
    assert (params.temperature, params.top_k, params.seed, params.top_p) == (0.5, 7, 9, 0.5)
    assert [type(value) for value in (params.temperature, params.top_k, params.seed)] == [float, int, int]
    refused("top_k", np.float32(3.0))
    refused("ignore_eos", np.bool_(True))
    assert str(SamplingParams(temperature=-0.0).temperature) == "0.0"


@pytest.mark.parametrize("field", ["temperature", "top_k", "seed", "max_tokens"])
def test_values_too_large_to_print(field: str) -> None:
    """Python refuses to print an int of more than 4300 digits, and to make it a float."""
    refused(field, 10**400, "1000")
    refused(field, 10**5000, "too large to print")
    refused(field, "x" * 10_000_000, "'xxx", "...")


@pytest.mark.parametrize("value", [7, 1.5, True, {"a": 1}, b"stop", {"a"}, iter(["a"])], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_lists_must_be_lists(field: str, value: Any) -> None:
    refused(field, value, "must be a list")


@pytest.mark.parametrize("entry", [None, 1, 1.5, True, "", ["a"], b"a"], ids=repr)
def test_bad_stop_strings(entry: Any) -> None:
    refused("stop", [entry], repr(entry))
    refused("stop", ["fine", entry], repr(entry))


@pytest.mark.parametrize("entry", [None, "5", 1.5, 1.0, True, NAN, -1, 2**31, 2**64, [5], {}], ids=repr)
def test_bad_stop_token_ids(entry: Any) -> None:
    refused("stop_token_ids", [entry], repr(entry))
    refused("stop_token_ids", [3, entry], repr(entry))


def test_too_many_stops() -> None:
    assert len(SamplingParams(stop=["a"] * MAX_STOP_STRINGS).stop) == MAX_STOP_STRINGS
    refused("stop", ["a"] * (MAX_STOP_STRINGS + 1), str(MAX_STOP_STRINGS), str(MAX_STOP_STRINGS + 1))
    assert len(SamplingParams(stop_token_ids=[5] * MAX_STOP_TOKEN_IDS).stop_token_ids) == MAX_STOP_TOKEN_IDS
    refused("stop_token_ids", [5] * (MAX_STOP_TOKEN_IDS + 1), str(MAX_STOP_TOKEN_IDS + 1))


@pytest.mark.parametrize("value", [[], [[1, 2]], "5", 7, True, ((1, 2),)], ids=repr)
def test_logit_bias_must_be_a_mapping(value: Any) -> None:
    refused("logit_bias", value)


@pytest.mark.parametrize("key", [-1, 2**31, 10**12, "abc", "5", 1.5, None, True, (1,)], ids=repr)
def test_bad_logit_bias_tokens(key: Any) -> None:
    refused("logit_bias", {key: 1.0}, "token id", repr(key))


@pytest.mark.parametrize("bias", [101, -101, 100.001, NAN, INF, -INF, None, "1", True, [1], 2**64, 1e308], ids=repr)
def test_bad_logit_bias_values(bias: Any) -> None:
    refused("logit_bias", {3: 0.5, 17: bias}, "[17]", repr(bias))


def test_good_lists() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[0, 2**31 - 1], logit_bias={0: -100, 5: 100, 6: 0.5})
    assert params.stop == ("a", "b") and params.stop_token_ids == (0, 2**31 - 1)
    assert params.logit_bias == {0: -100.0, 5: 100.0, 6: 0.5}
    assert SamplingParams(stop="END").stop == ("END",)
    for field, empty in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
        assert getattr(SamplingParams(**{field: None}), field) == empty  # type: ignore[arg-type]


def test_the_caller_cannot_change_it_afterwards() -> None:
    stop, token_ids, bias = ["a"], [1], {3: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=token_ids, logit_bias=bias)
    stop.append("b")
    token_ids.append(2)
    bias[4] = NAN
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {3: 1.0})
    with pytest.raises(AttributeError):
        params.seed = 5  # type: ignore[misc]


def test_min_tokens_within_max_tokens() -> None:
    with pytest.raises(ValueError, match="min_tokens=5 is more than max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=5).max_tokens is None


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_children_differ_and_repeat() -> None:
    params = SamplingParams(seed=5, n=MAX_N, temperature=0.7, stop="x")
    children = [params.child(index) for index in range(MAX_N)]
    assert children[0].seed == 5 and len({child.seed for child in children}) == MAX_N
    assert all(child.n == 1 and child.temperature == 0.7 and child.stop == ("x",) for child in children)
    assert children == [params.child(index) for index in range(MAX_N)]
    assert all(0 <= derive_seed(seed, index) < 2**63 for seed in (0, 1, 2**63 - 1) for index in range(50))
    assert len({derive_seed(seed, index) for seed in range(200) for index in range(20)}) == 4000
    with pytest.raises(ValueError, match="seed must be set"):
        SamplingParams(n=2).child(1)


def test_copies_are_equal() -> None:
    params = SamplingParams(seed=1, stop=["a"], logit_bias={1: 2.0})
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params != SamplingParams(seed=2)
