"""A model that says what a script says: its weights are the script, the worker loads it as a Llama.

Coding agents need a model that calls their tools; one that is small enough for a test cannot. Here
the next token depends on the last one alone: what attention and MLP find is multiplied by zero. The
script is cut into pieces that are tokens of the model's own, no piece occurs twice, and the head
answers each piece with the one that follows it. The chat template ends a prompt with a mark for the
number of tool results so far, and each mark is followed by its answer of the script.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.models.tiny import BOS, CORPUS, EOS, PAD, TURN, tiny_checkpoint

POSITIONS = 131_072
# text of these pages makes the tokenizer's vocabulary: prompts of agents are English and JSON
PAGES = Path(__file__).resolve().parents[3] / "docs"
VOCAB = 6000
HIDDEN = 128
# characters of a piece; more where a shorter one occurred before
PIECE = 4
# the lead, in logits, of the right token over one whose direction has nothing to do with it
LEAD = 120.0
UNTOOLED = "<|untooled|>"

TEMPLATE = """\
{{- bos_token }}{%- if tools %}{{ '<|turn|>system\\n<tools>\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '</tools>' + eos_token }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|turn|>user\\n<tool_response>\\n' + message.content
 + '\\n</tool_response>' + eos_token }}
{%- else %}{{ '<|turn|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' + call.function.name
 + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}
{{- eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}
{%- if tools %}
{%- set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}
{{- '<|answer_' ~ ([results, LAST] | min) ~ '|>' }}
{%- else %}{{ '<|untooled|>' }}{% endif %}{% endif %}"""


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """Text, then perhaps a call of `tool` with texts as arguments, in the order of its schema.
    `fixed`: how the only argument begins and ends, where the tool's own grammar leaves no choice
    there."""

    text: str
    tool: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    fixed: tuple[str, str] = ("", "")

    def pieces(self, taken: set[str]) -> list[str]:
        """What the model says, in pieces none of which is in `taken`; adds them to it.

        A grammar that allows one continuation alone writes it in tokens of its own choice. So each
        piece begins in text, where a grammar leaves a choice: the words around arguments are glued
        to the text before and behind them.
        """
        found: list[str] = []
        glue = ""
        for free, behind in self._parts():
            start = 0
            while start < len(free):
                end = min(start + PIECE, len(free))
                while glue + free[start:end] in taken and end < len(free):
                    end += 1
                found.append(glue + free[start:end])
                start, glue = end, ""
                if end < len(free):
                    taken.add(found[-1])
            glue = found.pop() + behind
        found.append(glue)
        # the last characters may have occurred: then they belong to the piece before them
        while found[-1] in taken:
            taken.discard(found[-2])
            found[-2:] = [found[-2] + found[-1]]
        taken.add(found[-1])
        return found

    def _parts(self) -> Iterator[tuple[str, str]]:
        """(free text, the fixed words behind it)."""
        if self.tool is None:
            yield self.text, ""
            return
        names = list(self.arguments)
        begin = f'\n<tool_call>\n{{"name": "{self.tool}", "arguments": {{"{names[0]}": "'
        first, last = (_in_json(text) for text in self.fixed)
        yield self.text, begin + first
        for name, following in zip(names, [*names[1:], None], strict=True):
            end = '"}}\n</tool_call>' if following is None else f'", "{following}": "'
            text = _in_json(self.arguments[name])
            assert text.startswith(first) and text.endswith(last)
            yield text[len(first) : len(text) - len(last)], last + end


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def scripted_checkpoint(path: Path, answers: Sequence[ScriptedAnswer], untooled: str) -> Path:
    """`answers[n]` is said after n results of tools, the last one also after more; `untooled` where
    a request brings no tools. `path` is made."""
    marks = [f"<|answer_{number}|>" for number in range(len(answers))] + [UNTOOLED]
    taken: set[str] = set()
    pieces = [one.pieces(taken) for one in [*answers, ScriptedAnswer(untooled)]]
    ids = _write_tokenizer(path, marks, taken, last=len(answers) - 1)
    said = {
        ids[mark]: [ids[_byte_level(piece)] for piece in spoken]
        for mark, spoken in zip(marks, pieces, strict=True)
    }
    _write_weights(path, said, vocab=max(ids.values()) + 1, eos=ids[EOS])
    return path


def _byte_level(text: str) -> str:
    """As a byte-level vocabulary writes it: one printable character for each byte."""
    from tokenizers import pre_tokenizers

    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in whole.pre_tokenize_str(text))


def _write_tokenizer(
    path: Path, marks: Sequence[str], pieces: Iterable[str], last: int
) -> dict[str, int]:
    """Ids by token. Pieces are entries without a merge: the model says them, no prompt has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [BOS, EOS, PAD, TURN, *marks]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = [page.read_text() for page in sorted(PAGES.glob("*.md"))]
    tokenizer.train_from_iterator([*CORPUS, *pages], trainer)
    path.mkdir(parents=True)
    facts = json.loads(tokenizer.to_str())
    vocab = facts["model"]["vocab"]
    # a piece that is a token of the text as well would be said by whoever quotes it: it is not
    # looked at in a prompt, whose last token is a mark
    for piece in sorted(map(_byte_level, pieces)):
        vocab.setdefault(piece, len(vocab))
    (path / "tokenizer.json").write_text(json.dumps(facts, ensure_ascii=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": TEMPLATE.replace("LAST", str(last)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": POSITIONS,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return dict(vocab)


def _write_weights(path: Path, said: dict[int, list[int]], vocab: int, eos: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = tiny_checkpoint(
        "llama",
        vocab_size=vocab,
        hidden_size=HIDDEN,
        max_position_embeddings=POSITIONS,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    for file in ("config.json", "generation_config.json"):
        shutil.copy(source / file, path / file)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.norm.weight"].fill_(1.0)
    embedded, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embedded.zero_()
    head.zero_()
    generator = torch.Generator().manual_seed(0)
    for mark, spoken in said.items():
        for token, follower in zip([mark, *spoken], [*spoken, eos], strict=True):
            direction = torch.randint(2, (HIDDEN,), generator=generator) * 2.0 - 1.0
            embedded[token] = direction
            head[follower] += direction * (LEAD / HIDDEN)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
