"""Chat templates as models have them, and what of one conversation each trains, by hand.

Written out as the models' own files render; `{% generation %}` variants beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHATML", "CONVERSATION", "MARKED", "TEMPLATES", "Known"]

CONVERSATION = [
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four. "},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven,\nI think."},
]


@dataclass(frozen=True)
class Known:
    """A template, the pieces of the conversation's text that it trains, and tokens it names."""

    source: str
    trained: tuple[str, ...]
    eos: str = "</s>"
    bos: str = "<s>"


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEMPLATES = {
    "chatml": Known(CHATML, ("Four. <|im_end|>", "Seven,\nI think.<|im_end|>"), "<|im_end|>"),
    "chatml marked": Known(MARKED, ("Four. <|im_end|>", "Seven,\nI think.<|im_end|>")),
    "llama 3": Known(
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
        " + message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
        "{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("Four.<|eot_id|>", "Seven,\nI think.<|eot_id|>"),
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "qwen 2.5": Known(
        "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\nYou are Qwen.<|im_end|>"
        "\n' }}{%- endif %}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' "
        "+ message.content + '<|im_end|>' + '\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
        ("Four. <|im_end|>", "Seven,\nI think.<|im_end|>"),
        "<|im_end|>",
    ),
    # The last turn has a place to think, the earlier ones do not: rendered otherwise as the last.
    "qwen 3": Known(
        "{%- for message in messages %}{%- if message.role == 'assistant' and loop.last %}"
        "{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + message.content + '<|im_end|>\n' }}"
        "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
        ("Four. <|im_end|>", "<think>\n\n</think>\n\nSeven,\nI think.<|im_end|>"),
        "<|im_end|>",
    ),
    "mistral": Known(
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
        "{% endif %}{% endfor %}",
        (" Four. </s>", " Seven,\nI think.</s>"),
    ),
    "gemma": Known(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
        "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + "
        "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("Four.<end_of_turn>", "Seven,\nI think.<end_of_turn>"),
        "</s>",
        "<bos>",
    ),
    # Ends the whole text with a token of its own, so that a turn is another text as the last one.
    "phi 3": Known(
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + "
        "'<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
        "{% else %}{{ eos_token }}{% endif %}",
        ("Four. <|end|>", "Seven,\nI think.<|end|>\n<|endoftext|>"),
        "<|endoftext|>",
    ),
    "zephyr": Known(
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '<|user|>\n' + message['content'] + eos_token }}"
        "{% elif message['role'] == 'assistant' %}"
        "{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{{ '\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
        "{% endfor %}",
        ("Four. </s>", "Seven,\nI think.</s>"),
    ),
    # No prompt of the assistant: it has to write its own name, and learns to.
    "no prompt": Known(
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '</s>' }}"
        "{% endfor %}",
        ("assistant: Four. </s>", "assistant: Seven,\nI think.</s>"),
    ),
}
