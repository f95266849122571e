"""Tiny models that have learnt a few conversations with tools by heart, in either format.

They call tools of their own accord, speak before a call, call twice at once, and end. Kept in the
temporary directory like the checkpoints they are made of.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from coterie.core.request import Chat, Message, ToolCall
from coterie.models.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.folders import CHECKPOINTS
from tests.helpers.models.tiny import tiny_checkpoint

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}}
WEATHER = {
    "name": "weather",
    "description": "Tells it",
    "parameters": {**CITY, "required": ["city"], "additionalProperties": False},
}
OPENAI_TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
ANTHROPIC_TOOLS: list[Any] = [
    {
        "name": WEATHER["name"],
        "description": WEATHER["description"],
        "input_schema": WEATHER["parameters"],
    }
]

HERMES = """\
{{- bos_token }}{%- if tools %}<|turn|>system
{%- for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}{{ eos_token }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|turn|>user\\n<tool_response>\\n' + message.content
 + '\\n</tool_response>' + eos_token }}
{%- else %}{{ '<|turn|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{%- if message.content or not loop.first %}{{ '\\n' }}
{%- endif %}{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": '
 + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}
{{- eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""

LLAMA = """\
{{- bos_token }}{%- if tools is not none %}<|turn|>system\nEnvironment: ipython
{%- for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}{{ eos_token }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' or message.role == 'ipython' %}
{{- '<|turn|>ipython\\n' + (message.content | tojson) + eos_token }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|turn|>assistant\\n{"name": "' + call.name + '", "parameters": '
 + (call.arguments | tojson) + '}' + eos_token }}
{%- else %}{{ '<|turn|>' + message.role + '\\n' + message.content + eos_token }}{% endif %}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""

ONE, TWO, TALK = "Weather in Paris?", "Paris and Rome?", "Hi there"
RESULTS = {"Paris": "sun", "Rome": "rain"}
SPOKEN, DONE, BOTH, GREETING = "Let me look.", "It is sunny.", "Sun and rain.", "Hello, <tool user!"


def call(city: str) -> ToolCall:
    return ToolCall(f"id-{city}", "weather", json.dumps({"city": city}))


def lessons(style: str) -> list[tuple[Chat, str]]:
    """(conversation, what the model says next)."""
    paris, rome = call("Paris"), call("Rome")
    first = Message("assistant", SPOKEN if style == "hermes" else "", (paris,))
    both = Message("assistant", "", (paris, rome))
    told = {city: Message("tool", text, (), f"id-{city}") for city, text in RESULTS.items()}
    written = {"hermes": hermes_text, "llama": llama_text}[style]
    return [
        (chat(Message("user", ONE)), written(first)),
        (chat(Message("user", ONE), first, told["Paris"]), DONE),
        (chat(Message("user", TWO)), written(both)),
        (chat(Message("user", TWO), both, told["Paris"], told["Rome"]), BOTH),
        (chat(Message("user", TALK)), GREETING),
    ]


def chat(*messages: Message) -> Chat:
    return Chat(messages, tools=(WEATHER,))


def hermes_text(message: Message) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{item.name}", "arguments": {item.arguments}}}\n</tool_call>'
        for item in message.tool_calls
    ]
    return "\n".join([*([message.content] if message.content else []), *calls])


def llama_text(message: Message) -> str:
    calls = [
        f'{{"name": "{item.name}", "parameters": {item.arguments}}}' for item in message.tool_calls
    ]
    return "; ".join(calls)


def taught_checkpoint(style: str) -> Path:
    """`style`: hermes or llama."""
    source = Path(__file__).read_text() + str(tiny_checkpoint("llama"))
    digest = hashlib.sha256((style + source).encode()).hexdigest()[:16]
    home = CHECKPOINTS / "tiny"
    path = home / f"taught-{style}-{digest}"
    with (home / f".lock-{style}").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not path.exists():
            draft = Path(tempfile.mkdtemp(dir=home))
            _write(draft, style)
            draft.rename(path)
    return path


def _write(draft: Path, style: str) -> None:
    template = {"hermes": HERMES, "llama": LLAMA}[style]
    shutil.copytree(tiny_checkpoint("llama"), draft, dirs_exist_ok=True)
    settings = draft / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    for beside in draft.glob("chat_template*"):
        beside.unlink()
    tokenizer = load_tokenizer(draft)
    _teach(draft, [_example(tokenizer, *lesson) for lesson in lessons(style)])


def _example(tokenizer: Tokenizer, conversation: Chat, answer: str) -> tuple[list[int], int]:
    """Token ids, and how many of them are the prompt's."""
    prompt = tokenizer.encode_prompt(conversation)
    spoken = tokenizer.encode(answer, special=False)
    return [*prompt, *spoken, tokenizer.eos_ids[0]], len(prompt)


def _teach(path: Path, examples: list[tuple[list[int], int]]) -> None:
    import torch
    import transformers

    # small products on many threads wait for each other more than they compute
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    longest = max(len(ids) for ids, _ in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (tokens, start) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, start : len(tokens)] = ids[row, start : len(tokens)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(400):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.02:
            break
    else:
        raise AssertionError(f"the lessons were not learnt: loss {loss.item():.3f}")
    torch.set_num_threads(num_threads)
    model.save_pretrained(path)
