"""What comes out: text, streams, usage and finishes, with tokens forced by logit_bias (+100 always wins)."""

from collections.abc import Iterator

import openai
import pytest

from tests.service.fake_backend import Script
from tests.service.gateway_rig import Gateway, events, load_default_model, streamed_text

ST = {"5022": 100}
"""Forces " ST ST ST …"."""
HALF_A_CHARACTER = {"10813": 100}
"""Forces the bytes F0 9F, over and over."""
NEWLINE = {"198": 100}
EOS = {"2": 100}


@pytest.fixture(scope="module")
def running() -> Iterator[Gateway]:
    gateway = Gateway(load_default_model())
    yield gateway
    gateway.close()


@pytest.fixture
def gateway(running: Gateway) -> Gateway:
    running.reset()
    return running


def test_a_stop_string_that_straddles_tokens_is_never_shown(gateway: Gateway) -> None:
    body = {"logit_bias": ST, "stop": "T S", "return_token_ids": True}
    choice = gateway.complete(**body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" S", "stop", "T S")
    chunks = events(gateway.complete(**body, stream=True))
    assert streamed_text(chunks) == " S"
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", [])] == [5022, 5022]


def test_a_stop_string_cancels_the_generation_and_counts_the_token_that_completed_it(gateway: Gateway) -> None:
    usage = gateway.complete(logit_bias=ST, stop="T S", max_tokens=50).json()["usage"]
    assert usage["completion_tokens"] == 2
    assert gateway.backend.cancelled.get(timeout=5)
    assert gateway.backend.num_active == 0


def test_the_stop_that_completes_first_wins(gateway: Gateway) -> None:
    choice = gateway.complete(logit_bias=ST, stop=["ST ST", "T"]).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (" S", "T")


def test_a_stop_in_the_first_token_gives_an_empty_text(gateway: Gateway) -> None:
    response = gateway.complete(logit_bias=NEWLINE, stop="\n").json()
    assert (response["choices"][0]["text"], response["choices"][0]["finish_reason"]) == ("", "stop")
    assert response["usage"]["completion_tokens"] == 1
    chunks = events(gateway.complete(logit_bias=NEWLINE, stop="\n", stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [""]


def test_a_stop_is_not_looked_for_before_min_tokens(gateway: Gateway) -> None:
    choice = gateway.complete(logit_bias=ST, stop="ST", min_tokens=4, max_tokens=8).json()["choices"][0]
    assert choice["text"] == " ST ST ST "


def test_a_stop_is_shown_when_it_was_asked_for(gateway: Gateway) -> None:
    choice = gateway.complete(logit_bias=ST, stop="T S", include_stop_str_in_output=True).json()["choices"][0]
    assert choice["text"] == " ST S"


def test_what_was_held_back_for_a_stop_is_shown_when_the_length_ends_the_text(gateway: Gateway) -> None:
    choice = gateway.complete(logit_bias=ST, stop="ST STX", max_tokens=2).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (" ST ST", "length")


def test_half_a_character_is_held_back_and_replaced_only_at_the_end(gateway: Gateway) -> None:
    body = {"logit_bias": HALF_A_CHARACTER, "max_tokens": 1}
    assert gateway.complete(**body).json()["choices"][0]["text"] == "\ufffd"
    assert streamed_text(events(gateway.complete(**body, stream=True))) == "\ufffd"


@pytest.mark.parametrize("text", ["你好，世界", "🙂😀", "👨‍👩‍👧‍👦 fin", "naïve\u2028line\u0085break"])
@pytest.mark.parametrize("tokens_per_update", [1, 3])
def test_characters_are_never_split_in_a_stream(gateway: Gateway, text: str, tokens_per_update: int) -> None:
    token_ids = load_default_model().tokenizer.encode(text, add_special_tokens=False)
    gateway.backend.script = Script(token_ids=token_ids, tokens_per_update=tokens_per_update)
    response = gateway.chat(max_tokens=len(token_ids), stream=True)
    chunks = events(response)
    assert all("\ufffd" not in chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert streamed_text(chunks) == text
    assert len(response.text.splitlines()) == 2 * (len(chunks) + 1)
    assert gateway.chat(max_tokens=len(token_ids)).json()["choices"][0]["message"]["content"] == text


def test_eos_has_no_text_and_ends_with_stop(gateway: Gateway) -> None:
    response = gateway.complete(logit_bias=EOS, skip_special_tokens=False).json()
    assert (response["choices"][0]["text"], response["choices"][0]["finish_reason"]) == ("", "stop")
    assert response["choices"][0]["stop_reason"] is None
    assert response["usage"]["completion_tokens"] == 1


def test_ignore_eos_goes_on_to_the_length(gateway: Gateway) -> None:
    response = gateway.complete(logit_bias=EOS, ignore_eos=True, max_tokens=20).json()
    assert (response["choices"][0]["text"], response["choices"][0]["finish_reason"]) == ("", "length")
    assert response["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_usage_is_exact_and_the_same_in_a_stream(gateway: Gateway, num_tokens: int) -> None:
    gateway.backend.script = Script(num_cached_tokens=1)
    body = {"max_tokens": num_tokens, "ignore_eos": True}
    plain = gateway.complete(**body).json()["usage"]
    chunks = events(gateway.complete(**body, stream=True, stream_options={"include_usage": True}))
    assert plain["completion_tokens"] == num_tokens
    assert plain["prompt_tokens_details"] == {"cached_tokens": 1}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain
    assert all(chunk.get("usage") is None for chunk in chunks[:-1])


def test_without_include_usage_there_is_no_chunk_without_choices(gateway: Gateway) -> None:
    chunks = events(gateway.chat(max_tokens=3, ignore_eos=True, stream=True))
    assert all(chunk["choices"] for chunk in chunks)
    assert not any("usage" in chunk for chunk in chunks)


def test_continuous_usage_counts_up(gateway: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(gateway.complete(max_tokens=3, logit_bias=ST, stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3, 3]


def test_a_chat_stream_opens_with_the_role_and_ends_with_an_empty_delta(gateway: Gateway) -> None:
    chunks = events(gateway.chat(max_tokens=2, logit_bias=ST, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": " ST"}, {"content": " ST"}, {}]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1


def test_every_choice_of_n_ends_once(gateway: Gateway) -> None:
    chunks = events(gateway.complete(n=3, max_tokens=2, logit_bias=ST, stream=True))
    assert [streamed_text(chunks, index) for index in range(3)] == [" ST ST"] * 3
    seeds = {params.seed for _, params in gateway.backend.submitted}
    assert len(seeds) == 3


def test_several_prompts_make_choices_in_their_order_and_count_once_each(gateway: Gateway) -> None:
    response = gateway.complete(prompt=["Hello, my name is", "Hi"], n=2, max_tokens=1, logit_bias=ST).json()
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    assert response["usage"]["prompt_tokens"] == 5 + 1
    assert response["usage"]["completion_tokens"] == 4
    assert [len(prompt) for prompt, _ in gateway.backend.submitted] == [5, 5, 1, 1]


def test_token_ids_are_a_prompt(gateway: Gateway) -> None:
    gateway.complete(prompt=[[1, 2, 3], [4]], max_tokens=1)
    assert [prompt for prompt, _ in gateway.backend.submitted] == [[1, 2, 3], [4]]


def test_the_chat_template_is_applied_without_a_second_bos(gateway: Gateway) -> None:
    assert gateway.chat(max_tokens=1).json()["usage"]["prompt_tokens"] == 31


def test_an_error_after_the_first_token_is_an_event_and_ends_the_stream(gateway: Gateway) -> None:
    gateway.backend.script = Script(token_ids=[5022], fail_after=2)
    response = gateway.complete(max_tokens=9, stream=True)
    assert response.status_code == 200
    chunks = events(response)
    assert chunks[-1]["error"]["message"] == "no worker"
    assert all(choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"])


def test_an_error_before_the_first_token_is_an_http_error_also_for_a_stream(gateway: Gateway) -> None:
    gateway.backend.script = Script(fail_after=0)
    response = gateway.complete(max_tokens=9, stream=True)
    assert response.status_code == 503
    assert response.headers["content-type"].startswith("application/json")


def test_a_bug_in_a_stream_is_an_error_event_that_tells_nothing_of_the_inside(gateway: Gateway) -> None:
    gateway.backend.script = Script(token_ids=[5022], fail_after=2, error=KeyError("secret"))
    chunks = events(gateway.complete(max_tokens=9, stream=True))
    assert chunks[-1]["error"]["type"] == "internal_server_error"
    assert "secret" not in chunks[-1]["error"]["message"]


def test_the_official_client_streams_and_completes(gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    with client:
        answer = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, logit_bias=ST
        )
        assert answer.choices[0].message.content == " ST ST ST"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        stream = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=3,
            logit_bias=ST,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == " ST ST ST"
        assert chunks[-1].usage is not None
        assert [model.id for model in client.models.list()] == ["smollm2"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")


def test_echo_without_tokens_gives_the_prompt_back_and_needs_no_worker(gateway: Gateway) -> None:
    body = {"prompt": ["Hello, my name is", "naïve 🙂\n"], "n": 2, "echo": True, "max_tokens": 0, "stop": "name"}
    answer = gateway.complete(**body).json()
    wanted = ["Hello, my name is"] * 2 + ["naïve 🙂\n"] * 2
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    usage = answer["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    chunks = events(gateway.complete(**body, stream=True))
    assert [streamed_text(chunks, index) for index in range(4)] == wanted
    assert gateway.backend.submitted == []


def test_echo_without_tokens_of_token_ids_gives_their_text_and_no_new_ids(gateway: Gateway) -> None:
    body = {"prompt": [5022, 5022], "echo": True, "max_tokens": 0, "return_token_ids": True}
    (choice,) = gateway.complete(**body).json()["choices"]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == (" ST ST", [5022, 5022], [])


def test_an_output_of_no_tokens_leaves_the_gauges_at_rest(gateway: Gateway) -> None:
    for stream in (False, True):
        gateway.complete(echo=True, max_tokens=0, stream=stream)
    text = gateway.client.get("/metrics").text
    assert 'vllm:num_requests_waiting{model_name="smollm2"} 0.0' in text
    assert 'vllm:num_requests_running{model_name="smollm2"} 0.0' in text


def test_no_tokens_without_echo_are_refused(gateway: Gateway) -> None:
    for response in (gateway.complete(max_tokens=0), gateway.complete(max_tokens=0, echo=False)):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_tokens"
    assert gateway.complete(max_tokens=-1, echo=True).status_code == 400
    assert gateway.chat(max_tokens=0).status_code == 400
    assert gateway.complete(prompt="", echo=True, max_tokens=0).status_code == 400
