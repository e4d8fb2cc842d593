"""The class of a model by its capabilities, as its owner has written them into llama-swap's configuration.

llama-swap only passes them on, so they are evidence where they leave one class: what gives only audio speaks, what
gives only images paints, what takes only audio and gives text transcribes, and a reranker stands with the embeddings.
Text to text is a chat model, also where it sees images or gives more beside text. A model that hears *and* reads may
be either a chat model or a transcriber, so that its name decides.
"""

from __future__ import annotations

from typing import Literal

from proxy.llama_swap.model import Capabilities

_TEXT, _AUDIO, _IMAGE = (frozenset({way}) for way in ("text", "audio", "image"))


def capability_class(capabilities: Capabilities) -> Literal["llm", "tts", "embed", "stt", "image"] | None:
    """The class that the capabilities leave, or None where they leave more than one."""
    inputs, outputs = capabilities.inputs, capabilities.outputs
    if capabilities.reranker or capabilities.tools:
        return "embed" if capabilities.reranker else "llm"
    if outputs in {_AUDIO, _IMAGE}:
        return "tts" if outputs == _AUDIO else "image"
    if "text" not in outputs or not inputs:
        return None
    if inputs == _AUDIO and outputs == _TEXT:
        return "stt"
    return None if "audio" in inputs and outputs == _TEXT else "llm"
