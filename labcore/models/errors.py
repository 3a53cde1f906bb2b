"""Errors of resolving, downloading and loading a model."""


class ModelError(RuntimeError):
    """A model could not be found, downloaded or read. The message is one line and says what to do."""


class UnsupportedModel(ValueError):
    """The model's architecture can't be served from a paged KV cache. The message names its type and the reason."""

    @classmethod
    def because(cls, model_type: str, reason: str) -> "UnsupportedModel":
        """The error for `model_type`; `reason` continues the sentence "it …"."""
        return cls(
            f"model type {model_type!r} can't be served from a paged KV cache: it {reason} — "
            "choose a plain decoder, such as one of the Llama, Qwen, Mistral, Gemma, Phi or GPT-2 families."
        )
