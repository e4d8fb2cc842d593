"""The Python SDKs of OpenAI and Anthropic."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import anthropic
import openai
from clients.calls import Call, Client, Outcome
from clients.streams import answer_text, request, text_of


class _Sdk(Client):
    async def _call(self, call: Call, outcome: Outcome, idle: float) -> None:
        made = await self._create(call.api, request(call.api, call.model, stream=call.stream) | {"timeout": idle})
        if not call.stream:
            outcome.pieces.append(answer_text(call.api, made.model_dump()))
            return
        async for event in made:
            outcome.pieces.append(text_of(call.api, event.model_dump()))

    @abstractmethod
    async def _create(self, api: str, arguments: dict[str, Any]) -> Any: ...


class OpenAIPython(_Sdk):
    """openai, asynchronous."""

    name = "openai-python"
    apis = fails_on = ("chat", "completions", "responses")

    async def __aenter__(self) -> Self:
        client = openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0)
        self._client = await self._stack.enter_async_context(client)
        return self

    async def _create(self, api: str, arguments: dict[str, Any]) -> Any:
        create: dict[str, Any] = {
            "chat": self._client.chat.completions.create,
            "completions": self._client.completions.create,
            "responses": self._client.responses.create,
        }
        return await create[api](**arguments)


class AnthropicPython(_Sdk):
    """anthropic, asynchronous."""

    name = "anthropic-python"
    apis = fails_on = ("messages",)

    async def __aenter__(self) -> Self:
        client = anthropic.AsyncAnthropic(base_url=self._url, api_key="none", max_retries=0)
        self._client = await self._stack.enter_async_context(client)
        return self

    async def _create(self, api: str, arguments: dict[str, Any]) -> Any:
        return await self._client.messages.create(**arguments)
