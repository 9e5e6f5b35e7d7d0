"""``serve``, driven by the openai client: mlx_lm's server on models that are really ours."""

import argparse
import json
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest
from cli.running import popen_command, stop

from qwen_metal import Policy, cli, is_accelerated, routes
from qwen_metal.commands import serve

PROMPT = "The function returns"


class Served:
    """A running server and a client of it."""

    def __init__(self, child, url, log):
        self.child, self.url, self.log = child, url, log
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=100)

    def complete(self, prompt=PROMPT, **options):
        """The text of one completion at temperature 0."""
        settings = {"model": "default_model", "max_tokens": 8, "temperature": 0, **options}
        return self.client.completions.create(prompt=prompt, **settings).choices[0].text

    def post(self, body, path="/completions"):
        """Status and text of a raw request."""
        request = urllib.request.Request(self.url + path, body)
        try:
            with urllib.request.urlopen(request, timeout=100) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def served(quick, tmp_path_factory):
    """One server for this file's tests."""
    log = tmp_path_factory.mktemp("serve") / "log"
    with open(log, "w") as stream:
        child = popen_command("serve", "--model", quick, "--port", 0, stderr=stream)
    try:
        line = child.stdout.readline()
        assert line.startswith("listening on "), log.read_text()
        yield Served(child, line.split()[-1], log)
    finally:
        stop(child)


def test_streaming_equals_not_streaming(served):
    whole = served.complete()
    chunks = served.client.completions.create(
        model="default_model", prompt=PROMPT, max_tokens=8, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert len(pieces) > 2 and "".join(pieces) == whole and whole.strip()


def test_chat_streaming_equals_not_streaming(served):
    options = dict(model="default_model", max_tokens=8, temperature=0)
    options["messages"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    whole = served.client.chat.completions.create(**options).choices[0].message.content
    chunks = served.client.chat.completions.create(**options, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole and whole.strip()


def test_the_name_given_to_model_works(served, quick):
    assert served.complete(model=str(quick)) == served.complete()


@pytest.mark.parametrize("stream", (False, True))
def test_stop_words(served, stream):
    """A word, a part of one and a phrase over several tokens, wherever the tokens begin and end."""
    whole = served.complete(max_tokens=16)
    words = whole.split()
    for stop_word in (words[2], " " + words[2], words[2][1:], whole[5:15]):
        answer = served.client.completions.create(
            model="default_model",
            prompt=PROMPT,
            max_tokens=16,
            temperature=0,
            stop=[stop_word, "never written"],
            stream=stream,
        )
        chunks = list(answer) if stream else [answer]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert text == whole[: whole.index(stop_word)], stop_word
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_two_requests_at_once(served):
    prompts = [PROMPT, "Each row of the table holds a name, a value and"]
    alone = [served.complete(prompt, max_tokens=12) for prompt in prompts]
    together = [None, None]

    def ask(index):
        together[index] = served.complete(prompts[index], max_tokens=12)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert together == alone


def test_client_that_leaves_mid_stream(served):
    chunks = served.client.completions.create(
        model="default_model", prompt=PROMPT, max_tokens=5000, temperature=1.5, stream=True
    )
    next(iter(chunks))
    chunks.close()
    assert served.complete()
    deadline = time.monotonic() + 60
    while "the client left" not in served.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "the client left" in served.log.read_text()
    assert "Traceback" not in served.log.read_text()


@pytest.mark.parametrize(
    "body, words",
    [
        (b'{"prompt": "a", ', "Invalid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[]", "dictionary"),
        (b"{}", "prompt"),
        (b'{"prompt": ""}', "prompt must be a string"),
        (b'{"prompt": ["a", "b"]}', "prompt must be a string"),
        (b'{"prompt": "a", "max_tokens": -3}', "max_tokens"),
        (b'{"prompt": "a", "stop": 5}', "stop must be"),
        (b'{"prompt": "a", "stop": [1]}', "stop must be"),
        (b'{"prompt": "a", "stop": [""]}', "stop must be"),
        (b'{"prompt": "a", "seed": -1}', "seed"),
        (b'{"prompt": "a", "stream": true, "stream_options": 5}', "stream_options"),
        (b'{"prompt": "a", "logit_bias": {"99999999": 1}}', "logit_bias"),
        (b'{"prompt": "a", "logit_bias": {"-99999999": 1}}', "logit_bias"),
    ],
)
def test_bad_request(served, body, words):
    """400 and alive; several of these end mlx_lm's own generation thread, or its process."""
    status, text = served.post(body)
    assert status == 400 and words in json.loads(text)["error"]
    assert served.complete(max_tokens=1)


def test_bad_chat_request(served):
    status, text = served.post(b'{"messages": []}', "/chat/completions")
    assert status == 400 and "messages" in text and served.complete(max_tokens=1)


def test_negative_content_length(served):
    host, port = served.url.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=100) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n")
        assert b" 400 " in connection.recv(1000)
    assert served.complete(max_tokens=1)


def test_stream_options_without_usage(served):
    body = b'{"prompt": "a", "max_tokens": 2, "stream": true, "stream_options": {}}'
    status, text = served.post(body)
    assert status == 200 and text.strip().endswith("data: [DONE]")


def test_model_that_is_not_there_leaves_the_served_one(served):
    status, text = served.post(b'{"prompt": "a", "model": "/no/such/model"}')
    assert status == 404 and "no such model folder" in text
    loads = served.log.read_text().count("warm-up")
    assert served.complete(max_tokens=1)
    assert served.log.read_text().count("warm-up") == loads


def test_models_are_listed(served, quick):
    assert str(quick.resolve()) in [model.id for model in served.client.models.list()]


def test_port_in_use(served, process, quick):
    port = served.url.split("/")[2].split(":")[1]
    child = process("serve", "--model", quick, "--port", port)
    out, err = child.communicate(timeout=100)
    assert child.returncode == cli.BAD_INPUT and out == ""
    complaint = [line for line in err.splitlines() if "error" in line]
    assert len(complaint) == 1 and "choose another --host or --port" in complaint[0]
    assert "Traceback" not in err


def test_ctrl_c_ends_it_and_our_routes_were_counted(served):
    """Last in this file. Counts come from our code alone; the warm-up's are kept apart."""
    served.complete()
    warm = re.search(r"warm-up routes: .* of ([\d,]+) calls", served.log.read_text())
    assert warm and int(warm[1].replace(",", "")) > 0
    served.child.send_signal(signal.SIGINT)
    assert served.child.wait(100) == cli.INTERRUPTED
    log = served.log.read_text()
    total = re.search(r"qwen-metal: routes: .* of ([\d,]+) calls fast;(.*)", log)
    assert total and int(total[1].replace(",", "")) > 1000
    assert "moe_decode" in total[2] and "gated_delta_step" in total[2]
    assert "Traceback" not in log


@pytest.fixture
def provider(quick):
    """Our loader of models, outside any server."""
    options = serve.server_arguments(["--model", str(quick)])
    return serve.Provider(options, argparse.Namespace(model="name", policy=Policy(), strict=False, force=False))


def test_every_loaded_model_is_accelerated(provider, quick):
    for name in ("default_model", str(quick), "name"):
        model, _ = provider.load(name, None, "default_model")
        assert is_accelerated(model)


def test_refused_model_leaves_the_loaded_one(provider, tmp_path):
    model, _ = provider.load("default_model", None, "default_model")
    with pytest.raises(serve.UserError, match="no such model folder"):
        provider.load("/no/such/model")
    assert provider.model is model


def test_first_load_that_fails_is_raised(provider, monkeypatch):
    monkeypatch.setattr(serve, "checkpoint", lambda name: (_ for _ in ()).throw(serve.UserError("why")))
    provider.load_default()
    with pytest.raises(serve.UserError, match="why"):
        provider.wait()


def test_warm_up_is_not_counted(provider):
    routes(reset=True)
    provider.load_default()
    provider.wait()
    assert routes() == {}


def test_arguments_are_mlx_lms():
    options = serve.server_arguments(["--host", "::1", "--port", "0", "--kv-bits", "8", "--temp", "0.5"])
    assert (options.host, options.port, options.kv_bits, options.temp) == ("::1", 0, 8, 0.5)
