"""The two ways in which getting a model can fail."""


class ModelError(RuntimeError):
    """A model could not be fetched, found or read. The message is one line and says what to do."""


class UnsupportedModel(ValueError):
    """The model is there, but it can't be served from a paged KV cache. The message names its type and the reason."""

    @classmethod
    def because(cls, model_type: str, reason: str) -> "UnsupportedModel":
        """The error for a model of `model_type`, `reason` continuing the sentence "it ..."."""
        return cls(
            f"model type {model_type!r} can't be served from a paged KV cache: it {reason} — "
            "choose a plain decoder, such as one of the Llama, Qwen, Mistral, Gemma, Phi or GPT-2 families."
        )
