"""``qwen-metal serve``: mlx_lm's server on accelerated models, with its own arguments."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import sys
import threading
import warnings
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Iterator, Optional

import mlx.core as mx
from huggingface_hub.constants import HF_HUB_CACHE
from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache

from .. import loader, routes
from .common import UserError, add_model_options, announce, check_fits, checkpoint, loading
from .output import one_line, routes_line, say


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        description="mlx_lm's server on accelerated models; all of its own options (--host, --port, "
        "--temp, --max-tokens, --kv-bits, ...) are passed on.",
        epilog="Every option of mlx_lm.server: python -m mlx_lm server --help",
    )
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    # Wrong options and models are found before mlx-lm sets limits, logs or listens.
    path = checkpoint(args.model)
    options = server_arguments(["--model", str(path), *args.rest])
    check_fits(path, options.max_tokens, args.force)
    announce(path)
    provider = Provider(options, args)
    generator = Generator(provider, LRUPromptCache(options.prompt_cache_size))
    try:
        provider.wait()
        if mx.distributed.init().rank() != 0:
            generator.join()
            return 0
        _listen(options, generator)
    finally:
        generator.stop_and_join()
    say(routes_line(routes()))
    return 130  # only Ctrl-C ends the loop


def _listen(options: argparse.Namespace, generator: Any) -> None:
    """Answer requests until Ctrl-C."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mlx_lm.server is not recommended")
        say("mlx_lm's server has basic security checks only: not for production")
        try:
            server._run_http_server(
                options.host, options.port, generator, server_class=Server, handler_class=Handler
            )
        except OSError as error:
            raise UserError(
                f"cannot listen on {options.host}:{options.port} ({error.strerror or error}); "
                "choose another --host or --port"
            ) from None


def server_arguments(argv: list[str]) -> argparse.Namespace:
    """mlx_lm.server's reading of ``argv``.

    Its parser lives inside its ``main``, so ``main`` runs, with the function
    that it ends in held back; nothing else looks that function up.
    """
    kept, argv_before, found, errors = server.run, sys.argv, [], io.StringIO()
    server.run = lambda host, port, provider: found.append(provider.cli_args)
    sys.argv = ["qwen-metal serve", *argv]
    try:
        with contextlib.redirect_stderr(errors):
            server.main()
    except SystemExit:
        message = errors.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"{message}; see python -m mlx_lm server --help") from None
    except (KeyError, ArithmeticError) as error:  # its parser of sizes
        raise UserError(f"a size of {argv} is no number of bytes ({error!r})") from None
    finally:
        server.run, sys.argv = kept, argv_before
        for handler in logging.getLogger().handlers:
            if getattr(handler, "stream", None) is errors:
                handler.setStream(sys.stderr)
    _check_ranges(found[0])
    return found[0]


#: Options of mlx_lm.server that it takes as they come: least and most.
RANGES = {
    "port": (0, 65535),
    "max_tokens": (1, None),
    "temp": (0, None),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "decode_concurrency": (1, None),
    "prompt_concurrency": (1, None),
    "prefill_step_size": (1, None),
    "prompt_cache_size": (1, None),
}


def _check_ranges(options: argparse.Namespace) -> None:
    """Raise a UserError for an option with which no request could be served."""
    for name, (least, most) in RANGES.items():
        value = getattr(options, name)
        if not (least <= value and (most is None or value <= most)):
            wanted = f"{least} or more" if most is None else f"{least} to {most}"
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} {value} is out of range, {wanted} is needed")


class Provider(server.ModelProvider):
    """mlx_lm's loader of models, each accelerated as ``qwen_metal.load`` does it."""

    def __init__(self, options: argparse.Namespace, args: argparse.Namespace):
        super().__init__(options)
        self.policy, self.strict, self.force = args.policy, args.strict, args.force
        self._loaded, self._failure = threading.Event(), None
        # A client may also ask for the model by the name that --model was given.
        for names in (self._model_map, self._adapter_map, self._draft_model_map):
            names[args.model] = names["default_model"]

    def load_default(self) -> None:
        """Load the first model; what goes wrong is raised by ``wait``."""
        try:
            super().load_default()
            say(f"warm-up {routes_line(loader.warmup(self.model))}")
        except Exception as error:
            self._failure = error
        finally:
            self._loaded.set()

    def wait(self) -> None:
        """Return when the first model is ready; raise what kept it from that."""
        self._loaded.wait()
        if self._failure is not None:
            raise self._failure

    def _load(
        self, model_path: str, adapter_path: Optional[str] = None, draft_model_path: Optional[str] = None
    ) -> None:
        # Checked first, because mlx-lm lets go of the served model before it looks at the new one.
        path = checkpoint(model_path)
        check_fits(path, self.cli_args.max_tokens, self.force)
        with loading(model_path):
            super()._load(model_path, adapter_path, draft_model_path)
            try:
                loader.accelerate(self.model, self.policy, self.strict)
            except ValueError:
                self.reset()
                raise
            with contextlib.suppress(ValueError):  # a draft of another family stays stock
                if self.draft_model is not None:
                    loader.accelerate(self.draft_model, self.policy)


class Generator(server.ResponseGenerator):
    """mlx_lm's generation thread, with stop words found in the text."""

    def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> tuple:
        context, responses = super().generate(request, generation_args, progress_callback)
        return context, _until(responses, generation_args.stop_words, context)

    def _generate(self) -> None:
        try:
            super()._generate()
        finally:
            # A CPU stream is a thread, and one that is left over aborts the process at its exit.
            mx.clear_streams()


class Server(ThreadingHTTPServer):
    """Says where it listens, which ``--port 0`` leaves to the system."""

    def server_activate(self) -> None:
        super().server_activate()
        host, port = self.server_address[:2]
        print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)


class Handler(server.APIHandler):
    """mlx_lm's handler, with an answer to requests that would end its generation thread."""

    def do_POST(self) -> None:
        try:
            if int(self.headers.get("Content-Length") or 0) < 0:
                return self._refuse("Content-Length is negative")
        except ValueError:
            pass  # mlx-lm answers that
        try:
            super().do_POST()
        except UnicodeDecodeError:
            self._refuse("the request body is not UTF-8")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            logging.info("the client left; its request was dropped")

    def handle_completion(self, request: Any, stop_words: Any) -> None:
        """Answer one checked request."""
        if why := _unusable(request, stop_words) or self._unusable_settings():
            return self._refuse(why)
        super().handle_completion(request, stop_words)

    def _unusable_settings(self) -> Optional[str]:
        """Why the request's settings cannot be served, or None."""
        if self.seed is not None and not 0 <= self.seed < 2**64:
            return "seed must be a whole number from 0 to 2^64 - 1"
        if self.logit_bias:
            # MLX does not check an index; one past the vocabulary ends the process.
            tokenizer = self.response_generator.model_provider.tokenizer
            if tokenizer is None:
                return "no model is loaded at this moment"
            if not set(self.logit_bias) <= set(tokenizer.get_vocab().values()):
                return "logit_bias names a token that is not in the vocabulary"
        if self.stream_options is not None:
            if not isinstance(self.stream_options, dict):
                return "stream_options must be an object"
            self.stream_options.setdefault("include_usage", False)
        return None

    def handle_models_request(self) -> None:
        """List the served model, also where no Hugging Face cache folder exists yet."""
        Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
        super().handle_models_request()

    def _refuse(self, why: str) -> None:
        self._set_completion_headers(400)
        self.end_headers()
        self.wfile.write(json.dumps({"error": one_line(why)}).encode())


def _until(responses: Iterator[Any], words: list[str], context: Any) -> Iterator[Any]:
    """Responses up to the first stop word, which the handler then strips from the text.

    mlx-lm compares tokens: it goes on past a word that the model cut into
    tokens in another way (" end" for "end"), with the word taken out.
    """
    longest, tail = max(map(len, words), default=1), ""
    for response in responses:
        text = tail + response.text
        ends = [text.index(word) + len(word) for word in words if word in text]
        if ends and response.finish_reason != "stop":
            kept = response.text[: min(ends) - len(tail)]
            # No reason to finish, and no more responses: the handler calls that "stop".
            yield dataclasses.replace(response, text=kept, finish_reason=None)
            context.stop()
            return
        yield response
        tail = text[-(longest - 1) :] if longest > 1 else ""


def _unusable(request: Any, stop_words: Any) -> Optional[str]:
    """Why a parsed request cannot be served, or None."""
    words = stop_words if isinstance(stop_words, list) else [stop_words]
    if not all(isinstance(word, str) and word for word in words):
        return "stop must be a string or a list of strings, none of them empty"
    if request.request_type == "text":
        if not isinstance(request.prompt, str) or not request.prompt:
            return "prompt must be a string that is not empty"
    elif not isinstance(request.messages, list) or not request.messages:
        return "messages must be a list that is not empty"
    return None
