"""vLLM's `RemoteOpenAIServer`, started as Coterie."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import anthropic
import openai

from tests.foreign.server import ADMIN_KEY, Server

ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}


class RemoteOpenAIServer:
    DUMMY_API_KEY = ADMIN_KEY

    def __init__(self, model: str, vllm_serve_args: list[str], **options: Any) -> None:
        self._model = model
        self._server = Server(model, vllm_serve_args)
        try:
            self._load(vllm_serve_args)
        except BaseException:
            self._server.stop()
            raise

    def _load(self, given: list[str]) -> None:
        """Adapters of --lora-modules NAME=PATH, by vLLM's own route."""
        import requests

        for value in (
            given[given.index("--lora-modules") + 1 :] if "--lora-modules" in given else ()
        ):
            if value.startswith("--"):
                break
            if value.startswith("{"):
                module = json.loads(value)
                name, path = module["name"], module["path"]
            else:
                name, _, path = value.partition("=")
            reply = requests.post(
                self.url_for("v1/load_lora_adapter"),
                json={"lora_name": name, "lora_path": path},
                headers={"Authorization": f"Bearer {ADMIN_KEY}"},
            )
            reply.raise_for_status()

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def url_root(self) -> str:
        return self._server.url

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/{'/'.join(parts)}"

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(**self._options(options))
        # vLLM's responses need no model
        responses: Any = client.responses
        responses.create = partial(responses.create, model=self._model)
        responses.parse = partial(responses.parse, model=self._model)
        return client

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, **options)

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(
            base_url=self.url_root, api_key=self.DUMMY_API_KEY, **options
        )

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        common = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY}
        return {**common, "max_retries": 0, "timeout": 600, **options}
