"""Drives a server through the OpenAI SDK, sync and async, and prints one line `ok NAME` for each promise that held.

usage: openai_client.py BASE_URL STRICT_BASE_URL
The second server refuses unknown model names. Each check runs against both kinds of client.
"""

import asyncio
import sys

import openai

OPT_IN = {"X-TRTLLM-return-metrics": "1"}
METRICS = ("server-timing", "x-trtllm-start-end-time", "x-trtllm-step-metrics", "x-trtllm-ctx-chunk-metrics")
MESSAGES = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": "Name three fruits."}]
PROMPT = "The three primary colours are"
GREEDY = {"model": "any", "temperature": 0, "max_tokens": 16}


class Sync:
    """The sync client behind the async client's shape."""

    def __init__(self, url):
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    async def call(self, method, **arguments):
        return method(**arguments)

    async def chunks(self, method, **arguments):
        with method(stream=True, **arguments) as stream:
            return list(stream)


class Async:
    def __init__(self, url):
        self.client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    async def call(self, method, **arguments):
        return await method(**arguments)

    async def chunks(self, method, **arguments):
        async with await method(stream=True, **arguments) as stream:
            return [chunk async for chunk in stream]


class Chat:
    """The chat route: where its text stands, whole and in pieces."""

    name = "chat"
    input = {"messages": MESSAGES}
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def resource(self, client):
        return client.chat.completions

    def text(self, choice):
        assert choice.message.role == "assistant"
        return choice.message.content

    def piece(self, choice):
        return choice.delta.content or ""


class Completions:
    name = "completions"
    input = {"prompt": PROMPT}
    whole_object, chunk_object = "text_completion", "text_completion"

    def resource(self, client):
        return client.completions

    def text(self, choice):
        return choice.text

    def piece(self, choice):
        return choice.text


def joined(route, chunks):
    """Each choice's text and reason, from a stream's chunks."""
    texts, reasons = {}, {}
    for chunk in chunks:
        assert chunk.object == route.chunk_object and chunk.id == chunks[0].id, chunk
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing follows the reason"
            texts[choice.index] = texts.get(choice.index, "") + route.piece(choice)
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    assert texts.keys() == reasons.keys()
    return texts, reasons


async def whole(driver, route, **more):
    return await driver.call(route.resource(driver.client).create, **{**GREEDY, **route.input, **more})


async def streamed(driver, route, **more):
    return await driver.chunks(route.resource(driver.client).create, **{**GREEDY, **route.input, **more})


async def check_whole_and_stream_agree(driver, route):
    answer = await whole(driver, route)
    assert answer.object == route.whole_object and answer.model == "any"
    (choice,) = answer.choices
    text = route.text(choice)
    assert text and choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.completion_tokens <= 16 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    for headers in (None, OPT_IN):
        chunks = await streamed(driver, route, extra_headers=headers)
        assert joined(route, chunks) == ({0: text}, {0: choice.finish_reason}), chunks
        assert all(chunk.choices and chunk.usage is None for chunk in chunks), "no chunk is not the answer's"


async def check_headers_follow_the_opt_in(driver, route):
    raw = route.resource(driver.client).with_raw_response.create
    for headers, shown in ((None, False), ({**OPT_IN, "X-TRTLLM-return-metrics": "0"}, False), (OPT_IN, True)):
        answer = await driver.call(raw, **{**GREEDY, **route.input, "extra_headers": headers})
        assert answer.http_response.status_code == 200
        assert [name in answer.headers for name in METRICS] == [shown] * len(METRICS), answer.headers
        assert not shown or answer.headers["server-timing"].startswith("server_queue;dur=")
        assert route.text(answer.parse().choices[0])


async def check_usage_chunk_comes_last_when_asked(driver, route):
    expected = (await whole(driver, route)).usage
    for headers in (None, OPT_IN):
        chunks = await streamed(driver, route, stream_options={"include_usage": True}, extra_headers=headers)
        *others, last = chunks
        assert last.choices == [] and last.usage.model_dump() == expected.model_dump(), last
        assert all(chunk.choices and chunk.usage is None for chunk in others)


async def check_choices(driver, route):
    # A seed makes sampled text repeat; its choices differ.
    sampled = {"n": 2, "temperature": 1.5, "seed": 7}
    answer = await whole(driver, route, **sampled)
    assert [choice.index for choice in answer.choices] == [0, 1]
    texts = {choice.index: route.text(choice) for choice in answer.choices}
    assert texts[0] != texts[1], texts
    assert joined(route, await streamed(driver, route, **sampled))[0] == texts
    assert route.text((await whole(driver, route, **{**sampled, "seed": 8})).choices[0]) != texts[0]


async def check_stop_strings(driver, route):
    full = route.text((await whole(driver, route)).choices[0])
    # Across a token's border: from the middle of one word to the middle of the next.
    space = full.index(" ", len(full) // 3)
    stop = full[space - 2 : space + 3]
    cut = full[: full.index(stop)]
    for stops in (stop, ["\u2603 never", stop]):
        answer = await whole(driver, route, stop=stops)
        assert (route.text(answer.choices[0]), answer.choices[0].finish_reason) == (cut, "stop"), answer
        texts, reasons = joined(route, await streamed(driver, route, stop=stops))
        assert (texts, reasons) == ({0: cut}, {0: "stop"}), texts


async def check_bad_requests_name_the_field(driver, route):
    # (field as the error names it, arguments)
    rows = [
        ("temperature", {"temperature": 9}),
        ("max_tokens", {"max_tokens": 0}),
        ("n", {"n": 0}),
        ("stop", {"stop": ""}),
        ("top_p", {"top_p": "high"}),
        ("top_k", {"extra_body": {"top_k": -2}}),
    ]
    for param, arguments in rows:
        for call in (whole, streamed):
            try:
                await call(driver, route, **arguments)
            except openai.BadRequestError as error:
                assert (error.status_code, error.param, error.type) == (400, param, "invalid_request_error"), error
                assert param in error.message
            else:
                raise AssertionError(f"{param} was accepted")


async def check_context_overflow_is_a_bad_request(driver, route):
    key, value = next(iter(route.input.items()))
    long = "word " * 9000
    grown = {key: long if isinstance(value, str) else [{"role": "user", "content": long}]}
    for call in (whole, streamed):
        try:
            await call(driver, route, **grown)
        except openai.BadRequestError as error:
            assert (error.code, error.param) == ("context_length_exceeded", key), error
        else:
            raise AssertionError("a prompt beyond the context was accepted")


async def check_models(driver, strict):
    models = await driver.call(driver.client.models.list)
    (model,) = models.data
    assert (await driver.call(driver.client.models.retrieve, model=model.id)).id == model.id
    for call in (
        lambda: driver.call(driver.client.models.retrieve, model="absent"),
        lambda: whole(strict, Chat(), model="absent"),
        lambda: streamed(strict, Completions(), model="absent"),
    ):
        try:
            await call()
        except openai.NotFoundError as error:
            assert (error.status_code, error.code) == (404, "model_not_found"), error
        else:
            raise AssertionError("an unknown model was found")
    assert (await whole(strict, Completions(), model=model.id)).model == model.id


async def check_a_stream_that_is_left_early(driver):
    """Breaks off after the first chunk; the client goes on with the next request."""
    arguments = {**GREEDY, **Chat.input, "max_tokens": 2000, "stream": True, "extra_body": {"ignore_eos": True}}
    stream = await driver.call(driver.client.chat.completions.create, **arguments)
    if isinstance(driver, Sync):
        next(iter(stream))
        stream.close()
    else:
        await anext(aiter(stream))
        await stream.close()
    assert (await whole(driver, Completions())).choices


async def check_many_at_once(driver):
    """The async client's own concurrency: sixteen streams over its pool."""
    expected = joined(Completions(), await streamed(driver, Completions()))
    answers = await asyncio.gather(*(streamed(driver, Completions(), extra_headers=OPT_IN) for _ in range(16)))
    assert all(joined(Completions(), chunks) == expected for chunks in answers)


ROUTE_CHECKS = (
    check_whole_and_stream_agree,
    check_headers_follow_the_opt_in,
    check_usage_chunk_comes_last_when_asked,
    check_choices,
    check_stop_strings,
    check_bad_requests_name_the_field,
    check_context_overflow_is_a_bad_request,
)


async def main(url, strict_url):
    for kind in (Sync, Async):
        driver, strict = kind(url), kind(strict_url)
        lead = kind.__name__.lower()
        for route in (Chat(), Completions()):
            for check in ROUTE_CHECKS:
                await check(driver, route)
                print("ok", lead, route.name, check.__name__, flush=True)
        await check_models(driver, strict)
        print("ok", lead, "check_models", flush=True)
        await check_a_stream_that_is_left_early(driver)
        print("ok", lead, "check_a_stream_that_is_left_early", flush=True)
    await check_many_at_once(Async(url))
    print("ok async check_many_at_once", flush=True)


asyncio.run(main(*sys.argv[1:]))
