"""Chat templates that are in use, each with a conversation and what a person would say is learned of it, written out by hand.

Those of TRL are read from its installed package. The others are written here after the formats that their authors publish. Each
special token is one of the published tokenizer; the words around them are plain text there, too.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which rope?"},
    {"role": "assistant", "content": "The red one."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Pull it in\nslowly."},
]
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "depth", "arguments": {"at": "bow"}}}
CALLS = [
    {"role": "user", "content": "How deep?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "tool_call_id": "a1b2c3d4e"},
    {"role": "assistant", "content": "Four fathoms."},
]
REASONED = [
    TALK[1],
    {**TALK[2], "reasoning_content": "Red ropes hold."},
    TALK[3],
    {**TALK[4], "reasoning_content": "Haste breaks ropes."},
]

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
LLAMA_2 = """{%- if messages[0].role == 'system' %}
    {%- set turns, head = messages[1:], '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}
{%- else %}
    {%- set turns, head = messages, '' %}
{%- endif %}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' + ((head if loop.first else '') + message.content).strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""
MISTRAL_V3 = """{%- if messages[0].role == 'system' %}
    {%- set turns, head = messages[1:], messages[0].content + '\\n\\n' %}
{%- else %}
    {%- set turns, head = messages, '' %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (head if loop.last else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
MISTRAL_V7 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT] ' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""
SMOLLM3 = """{%- set said = messages[0].content if messages[0].role == 'system' else '' %}
{%- set mode = '/no_think' if '/no_think' in said else '/think' %}
{{- '<|im_start|>system\\n## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\nToday Date: ' + strftime_now('%d %B %Y') }}
{{- '\\nReasoning Mode: ' + mode + '\\n\\n## Custom Instructions\\n\\n' + said.replace('/no_think', '').rstrip() }}
{{- '\\n\\n<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n' if mode == '/no_think' else '') }}
        {{- message.content.lstrip('\\n') + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n' if mode == '/no_think' else '') }}
{%- endif %}"""


class Case(NamedTuple):
    """A conversation in a template, and what is learned of it."""

    template: str
    """Its text, or the name of one of TRL's."""
    specials: str
    """The special tokens that it writes, between spaces; the last one ends a document."""
    learned: list[str]
    """In order: each answer and its end of turn, and the EOS of the document where the template writes none."""
    messages: list[dict[str, Any]] = TALK
    unwritten: list[list[str]] = [[], []]
    """Per answer, its fields that the template leaves out."""

    def text(self) -> str:
        if "{" in self.template:
            return self.template
        spec = find_spec("trl")
        assert spec is not None and spec.origin is not None
        return (Path(spec.origin).parent / "chat_templates" / f"{self.template}.jinja").read_text("utf-8")


CHATML, HEADERS = "<|im_start|> <|im_end|>", "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
COHERE = "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|END_OF_TURN_TOKEN|>"
INST = "<s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] </s>"
HARMONY = "<|start|> <|channel|> <|message|> <|end|> <|call|> <|return|>"
GLM = "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|>"
DEEPSEEK = "<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>"
PHI = "<s> <|system|> <|user|> <|assistant|> <|end|> <|endoftext|>"
IM_ENDS = ["The red one.<|im_end|>", "Pull it in\nslowly.<|im_end|>"]
EOT_ENDS = ["The red one.<|eot_id|>", "Pull it in\nslowly.<|eot_id|>"]
OF_CALL = '<tool_call>\n{"name": "depth", "arguments": {"at": "bow"}}\n</tool_call><|im_end|>'
CASES = {
    "llama 3": Case("llama3", HEADERS, EOT_ENDS),
    "llama 3, marked": Case("llama3_training", HEADERS, EOT_ENDS),
    "llama 3.1": Case("llama3_1", HEADERS, EOT_ENDS),
    "llama 3.1, calls": Case(
        "llama3_1",
        HEADERS,
        ['{"name": "depth", "parameters": {"at": "bow"}}<|eot_id|>', "Four fathoms.<|eot_id|>"],
        CALLS,
    ),
    "gemma": Case(
        "gemma",
        "<bos> <start_of_turn> <end_of_turn> <eos>",
        ["The red one.<end_of_turn>", "Pull it in\nslowly.<end_of_turn>", "<eos>"],
        TALK[1:],
    ),
    "gemma 3": Case(
        "gemma3",
        "<bos> <start_of_turn> <end_of_turn> <eos>",
        ["The red one.<end_of_turn>", "Pull it in\nslowly.<end_of_turn>", "<eos>"],
    ),
    "phi 3": Case("phi3", PHI, ["The red one.<|end|>", "Pull it in\nslowly.<|end|>", "<|endoftext|>"]),
    "qwen 2.5": Case("qwen2_5", CHATML, IM_ENDS),
    "qwen 2.5, calls": Case("qwen2_5", CHATML, [OF_CALL, "Four fathoms.<|im_end|>"], CALLS),
    "qwen 3": Case("qwen3", CHATML, [IM_ENDS[0], "<think>\n\n</think>\n\n" + IM_ENDS[1]]),
    "qwen 3, marked": Case(
        "qwen3_training", CHATML, ["<think>\n\n</think>\n\n" + IM_ENDS[0], "<think>\n\n</think>\n\n" + IM_ENDS[1]]
    ),
    "qwen 3, reasoning": Case(
        "qwen3",
        CHATML,
        [IM_ENDS[0], "<think>\nHaste breaks ropes.\n</think>\n\n" + IM_ENDS[1]],
        REASONED,
        [["reasoning_content"], []],
    ),
    "qwen 3, calls": Case("qwen3", CHATML, [OF_CALL, "<think>\n\n</think>\n\nFour fathoms.<|im_end|>"], CALLS),
    "cohere": Case("cohere", COHERE, ["The red one.<|END_OF_TURN_TOKEN|>", "Pull it in\nslowly.<|END_OF_TURN_TOKEN|>"]),
    "lfm 2": Case("lfm2", "<|startoftext|> <|im_start|> <|im_end|>", IM_ENDS),
    "deepseek v3, marked": Case(
        "deepseekv3_training",
        DEEPSEEK,
        ["The red one.<｜end▁of▁sentence｜>", "Pull it in\nslowly.<｜end▁of▁sentence｜>"],
    ),
    "glm 4": Case(
        "glm4moe",
        GLM,
        ["\n<think></think>\nThe red one.", "\n<think></think>\nPull it in\nslowly.<|endoftext|>"],
    ),
    "gpt-oss": Case(
        "gptoss",
        HARMONY,
        ["<|channel|>final<|message|>The red one.<|end|>", "<|channel|>final<|message|>Pull it in\nslowly.<|return|>"],
    ),
    "zephyr": Case(ZEPHYR, "<s> </s>", ["The red one.</s>", "Pull it in\nslowly.</s>"]),
    "llama 2": Case(LLAMA_2, "<s> </s>", [" The red one. </s>", " Pull it in\nslowly. </s>"]),
    "mistral v0.3": Case(MISTRAL_V3, INST, [" The red one.</s>", " Pull it in\nslowly.</s>"], TALK[1:]),
    "mistral v0.3, calls": Case(
        MISTRAL_V3,
        INST,
        [
            '[TOOL_CALLS] [{"name": "depth", "arguments": {"at": "bow"}, "id": "a1b2c3d4e"}]</s>',
            " Four fathoms.</s>",
        ],
        CALLS,
    ),
    "mistral v7": Case(MISTRAL_V7, INST, [" The red one.</s>", " Pull it in\nslowly.</s>"]),
    "smollm 3": Case(SMOLLM3, CHATML, IM_ENDS),
    "smollm 3, without thought": Case(
        SMOLLM3, CHATML, IM_ENDS, [{"role": "system", "content": "/no_think"}, *TALK[1:]]
    ),
}
