"""Fields that would change the answer and that nobody honours yet: refused, never ignored.

Every other unknown field is harmless here (hints, labels, accounting) and is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phloem.core.errors import BadRequest

__all__ = ["refuse_unsupported", "unsupported_names"]

# name -> the values that ask for nothing; () where every value asks for something
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "structural_tag": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "grammar": (),
    "prompt_logprobs": (),
    "return_prompt_logprobs": (False,),
    "logprob_start_len": (-1,),
    "token_ids_logprob": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "truncate_prompt_tokens": (),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "include_stop_str_in_output": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "continue_final_message": (False,),
    "thinking_token_budget": (),
    "modalities": (["text"],),
    "audio": (),
    "image_data": ([],),
    "audio_data": ([],),
    "video_data": ([],),
    "web_search_options": (),
    "prompt_embeds": (),
    "input_embeds": (),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "session_params": ({},),
    "lora_path": (),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
}


def unsupported_names() -> tuple[str, ...]:
    """All of them, except the `guided_` family."""
    return tuple(_NEUTRAL)


def _same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral


def refuse_unsupported(fields: Mapping[str, Any], prefix: str = "") -> None:
    """Raise BadRequest for the first field that asks for what is not supported yet."""
    for name, value in fields.items():
        neutral = _NEUTRAL.get(name, () if name.startswith("guided_") else None)
        if name == "guided_decoding_backend":  # chooses how, not what
            continue
        if neutral is None or any(_same(value, known) for known in neutral):
            continue
        only = f" (only {' or '.join(map(repr, neutral))} is)" if neutral else ""
        raise BadRequest(
            f"{prefix}{name} is not supported yet{only}",
            param=f"{prefix}{name}",
            code="unsupported_parameter",
        )
