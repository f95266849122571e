"""Facts about a prompt that are computed quickly: language, JSON, code, task type, length, intent.

The work is limited: of a long text only the beginning and the end are read. Each feature is timed.
Intent and task type depend only on the caller's instruction; a document is not searched for them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from time import perf_counter as now

from coterie.core.quick_init import quick_init
from coterie.routing.features.instruction import split_material
from coterie.routing.features.language import UNKNOWN, detect

# length read of the caller's text: an instruction is before its document or after it
HEAD_CHARS = 1_200
TAIL_CHARS = 400
DOCUMENT_CHARS = 800
# an instruction is short: the length in which it is searched for at each end
INSTRUCTION_HEAD_CHARS = 300
INSTRUCTION_TAIL_CHARS = 200
_WORD = re.compile(r"[^\W_][\w'+#-]*")
_JSON = re.compile(r"\{\s*\"[^\"\n]{0,80}\"\s*:|\[\s*\{|\{\s*\}")


@quick_init
@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """Features of one prompt. `words` and `text` come from the caller and never enter a trace."""

    task_type: str = "conversation"
    language: str = UNKNOWN
    has_json: bool = False
    has_code: bool = False
    # the language of its code, or the language it names; "" = none
    code_language: str = ""
    num_characters: int = 0
    intent: str = "other"
    has_document: bool = False
    words: frozenset[str] = frozenset()
    # the text that was read, in lower case
    text: str = ""
    timings_ms: Mapping[str, float] = field(default_factory=dict)

    def public_fields(self) -> dict[str, str | float | bool]:
        """Everything except the caller's text."""
        return {
            "task_type": self.task_type,
            "language": self.language,
            "intent": self.intent,
            "has_json": self.has_json,
            "has_code": self.has_code,
            "code_language": self.code_language,
            "has_document": self.has_document,
            "num_characters": self.num_characters,
        }


def routed_text(instruction: str, document: str = "") -> str:
    """The text for finding adapters: the instruction, and the beginning of its document."""
    text = _ends(instruction)
    return f"{text}\n{document[:DOCUMENT_CHARS]}" if document else text


def extract(instruction: str, document: str = "") -> PromptFeatures:
    began = now()
    text = _ends(instruction)
    lowered = text.lower()
    words = _WORD.findall(lowered)
    whole = routed_text(instruction, document)
    lowered_whole = whole.lower() if document else lowered
    instruction_words = frozenset(words)
    all_words = frozenset(_WORD.findall(lowered_whole)) if document else instruction_words
    words_at = now()
    # quotations may be in any language
    language = detect(split_material(text)[0])
    if language == UNKNOWN:
        language = detect(text)
    language_at = now()
    has_json = "json" in all_words or _JSON.search(whole) is not None
    json_at = now()
    has_code, code_language = code_in(whole, lowered_whole)
    short_text = _ends(lowered, INSTRUCTION_HEAD_CHARS, INSTRUCTION_TAIL_CHARS)
    code_language = code_language or language_named(words, short_text)
    code_at = now()
    intent = intent_of(words)
    intent_at = now()
    task_type = task_type_of(short_text, intent, instruction_words, has_code or bool(code_language))
    task_at = now()
    return PromptFeatures(
        task_type=task_type,
        language=language,
        has_json=has_json,
        has_code=has_code,
        code_language=code_language,
        num_characters=len(instruction) + len(document),
        intent=intent,
        has_document=bool(document),
        words=all_words,
        text=lowered_whole,
        timings_ms={
            "words": round((words_at - began) * 1e3, 4),
            "language": round((language_at - words_at) * 1e3, 4),
            "has_json": round((json_at - language_at) * 1e3, 4),
            "has_code": round((code_at - json_at) * 1e3, 4),
            "intent": round((intent_at - code_at) * 1e3, 4),
            "task_type": round((task_at - intent_at) * 1e3, 4),
        },
    )


def _ends(text: str, head: int = HEAD_CHARS, tail: int = TAIL_CHARS) -> str:
    if len(text) <= head + tail:
        return text
    return f"{text[:head]}\n{text[-tail:]}"


# words that name a programming language -> its name here; tree-sitter's names where they exist
_NAMED = {
    "python": "python", "py": "python", "python3": "python", "pandas": "python", "numpy": "python",
    "django": "python", "pytest": "python", "javascript": "javascript", "js": "javascript",
    "node": "javascript", "nodejs": "javascript", "node.js": "javascript", "react": "javascript",
    "typescript": "typescript", "ts": "typescript", "sql": "sql", "postgres": "sql",
    "postgresql": "sql", "mysql": "sql", "sqlite": "sql", "rust": "rust", "golang": "go",
    "java": "java", "kotlin": "kotlin", "swift": "swift", "c++": "cpp", "cpp": "cpp",
    "c#": "c_sharp", "csharp": "c_sharp", "ruby": "ruby", "rails": "ruby", "php": "php",
    "bash": "bash", "shell": "bash", "zsh": "bash", "html": "html", "css": "css",
    "haskell": "haskell", "scala": "scala", "perl": "perl", "lua": "lua", "regex": "regex",
    "yaml": "yaml", "dockerfile": "dockerfile", "cypher": "cypher", "powershell": "powershell",
}  # fmt: skip
LANGUAGES = frozenset(_NAMED.values())
# short or common words that name a language only together with other words
_NAMED_IN_CONTEXT = re.compile(
    r"\b(?:in|using|with|a|an)\s+(go|c|r)\b(?=\s*(?:[,.:;?!)]|$|program|func|code|script))"
)
_FENCE = re.compile(r"```[ \t]*([\w+#.-]{0,20})")
# (language, words that its pattern needs, a pattern that only its code matches)
_CODE_PATTERNS = (
    ("python", ("def ", "class ", "import "),
     re.compile(r"^[ \t]*(?:def \w+\(|class \w+[^\n]*:|import \w+$|from [\w.]+ import )", re.M)),
    ("rust", ("fn ", "let mut ", "impl"),
     re.compile(r"\bfn \w+\s*[<(]|\blet mut \w+|\bimpl(?:<[^>\n]*>)? \w+[^\n]*\{")),
    ("go", ("func ", "package "),
     re.compile(r"^func (?:\(\w+ \*?\w+\) )?\w+\(|^package \w+$", re.M)),
    ("cpp", ("#include", "std::"), re.compile(r"^[ \t]*#include\s*<\w+>|std::\w+", re.M)),
    ("c", ("#include", "int main("),
     re.compile(r"^[ \t]*#include\s*[<\"]\w+\.h[>\"]|\bint main\(", re.M)),
    ("java", ("public ",),
     re.compile(r"\bpublic (?:static |final )*(?:class|void|int|String) \w+")),
    ("typescript", ("interface ", ": string", ": number", ": boolean"),
     re.compile(r"\binterface \w+ \{|:\s*(?:string|number|boolean)\s*[;,)=]")),
    ("javascript", ("function ", "function(", "const ", "let ", "var ", "=>"),
     re.compile(r"\bfunction \w*\(|\bfunction\(|\b(?:const|let|var) \w+\s*=|=>\s*[{(]")),
    ("html", ("</", "<!"),
     re.compile(r"</(?:div|html|body|p|span|a|table|ul|h1)>|<!DOCTYPE", re.I)),
    ("bash", ("#!/bin/",), re.compile(r"^#!/bin/(?:ba)?sh", re.M)),
)  # fmt: skip
# searched in the text in lower case, because people write SQL in both cases
_SQL = re.compile(
    r"\bselect\s[^;]{1,200}?\sfrom\s+\w+\s*(?:;|$|where|join|group|order|limit|inner|left)"
    r"|\binsert into \w+\s*(?:\(|values|select)|\bcreate table \w+\s*\(|\bupdate \w+ set \w+\s*="
)
_SQL_WORDS = ("select", "insert", "create table", "update")
_PLAIN_FENCES = ("text", "txt", "json", "md", "markdown", "csv")


def code_in(text: str, lowered: str) -> tuple[bool, str]:
    """(whether there is code, its language or "")."""
    fence = _FENCE.search(text) if "```" in text else None
    if fence is not None:
        name = fence.group(1).lower()
        return name not in _PLAIN_FENCES, "" if name in _PLAIN_FENCES else _NAMED.get(name, name)
    # loops, because `any` takes several times as long
    for name, needed, pattern in _CODE_PATTERNS:
        for word in needed:
            if word in text:
                if pattern.search(text) is not None:
                    return True, name
                break
    for word in _SQL_WORDS:
        if word in lowered:
            return (True, "sql") if _SQL.search(lowered) is not None else (False, "")
    return False, ""


def language_named(words: Collection[str], text: str) -> str:
    """The first programming language that a text names."""
    for word in words:
        if word in _NAMED:
            return _NAMED[word]
    match = _NAMED_IN_CONTEXT.search(text)
    return "" if match is None else match.group(1)


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# the first of these words in an instruction gives its intent
_VERBS = {
    "extract": "extract pull parse find identify locate grab scrape extrahiere extrais extrae",
    "convert": "convert turn transform reformat normalise normalize rewrite rephrase paraphrase "
    "reword change format express shorten simplify correct proofread slugify make fix improve "
    "replace remove polish edit",
    "translate": "translate übersetze traduis traduisez traduce traduza traduci переведи vertaal",
    "summarise": "summarise summarize tldr condense recap abridge résume resume riassumi",
    "classify": "classify categorise categorize label tag sort rate decide detect judge grade",
    "code": "implement refactor debug code program",
    "write": "write compose draft create generate invent imagine brainstorm continue design "
    "schreibe schreib écris écrivez escribe escreva scrivi напиши skriv schrijf napisz",
    "calculate": "calculate compute solve add multiply subtract divide count sum",
    "explain": "explain describe define compare discuss outline erkläre explique explica",
    "ask": "what what's why how who who's whom whose when where which are was were do does did "
    "should will has have list give show tell wie was warum wer wo wann comment pourquoi où qué "
    "cómo quién dónde cuál что как почему",
    "chat": "hello hi hey thanks thank goodbye bye hallo bonjour hola ciao привет",
}
_INTENTS = {verb: intent for intent, verbs in _VERBS.items() for verb in verbs.split()}
# an instruction states its purpose within this many words
_MAX_LEADING = 40
_ASKING = ("ask", "chat")
# a question that contains verbs of these intents does not request them
_OVERRIDDEN_BY_QUESTION = ("write", "code", "convert", "calculate")

_WANTS_JSON = re.compile(
    r"\b(?:as|in|into|to|return|returns|output|produce|give me|valid|only|pure|respond with|"
    r"reply with|answer with|write|generate|create|make)\s+(?:(?:a|an|the|one|only|valid|strict|"
    r"plain|single|nested|compact|flat|raw)\s+){0,4}json\b"
    r"|\bjson\s+(?:object|array|list|format|output|only|please|with (?:the )?(?:keys|fields))\b"
    r"|\bparse\b[^\n]{0,40}\bjson\b|\bjson\s*[:?.]?\s*$|^\s*json\s*:"
)
_ABOUT_JSON = re.compile(
    r"\bfrom\s+(?:this |the |a |that )?json\b|\bjson (?:schema|file) (?:is|do)"
    # "a poem about JSON", but not "facts about Rome as JSON"
    r"|\b(?:about|on|of|called|titled|praising)\s+(?:(?!as\b|in\b|into\b|to\b)[\w']+\s+){0,3}json\b"
)
# nouns that mean code by themselves, and nouns that mean code if a programming language is named
_CODE = _set(
    "function functions sql regex regexp snippet code query queries algorithm dockerfile makefile "
    "endpoint subroutine struct one-liner selector funktion fonction función função funzione "
    "функцию requête consulta"
)
_PERHAPS_CODE = _set(
    "class program script method component macro iterator closure decorator trait module tests "
    "test interface loop library parser server bot app programm programme programa"
)
_MAKES = re.compile(
    r"\b(?:write|implement|generate|create|make|build|code|fix|debug|refactor|complete|need|give|"
    r"show|want|provide|develop|port|translate|convert|optimi[sz]e|add|turn|schreibe|écris|escribe|"
    r"escreva|scrivi|напиши)\b"
    r"|\b(?:sql|regex|regexp|query|select) (?:query|statement|for|to|that|which)\b"
    r"|^\s*(?:sql|regex)\b|\b(?:as|in|into|to) (?:an? )?(?:sql|regex)\b|\bsql\s*[:?.]?\s*$"
)
_EXPLAINS = re.compile(
    r"^\s*(?:please |can you |could you )?(?:explain|what(?:'s| is| are| does| was)|why|who|"
    r"describe|define|compare)\b"
)
_STORIES = _set(
    "story stories poem poems haiku sonnet limerick song lyrics novel essay fairy tale joke jokes "
    "dialogue screenplay monologue blog speech letter verse ballad slogan tagline poema poème "
    "gedicht poesia geschichte histoire"
)
_LABELS = re.compile(
    r"\b(?:positive|negative|neutral|spam|true|false|yes|no|urgent)\b,? (?:or|/) \w"
    r"|\b(?:positive|negative|spam|urgent)\b, \w+"
    r"|\b(?:sentiment|which (?:category|class|label|of these)|pick one|choose one|one of)\b"
    r"|\b(?:category|intent|label|topic|sentiment)\s*[:?]"
)
_LABEL_WORDS = _set(
    "positive negative neutral spam true false yes urgent sentiment category class label pick "
    "choose one intent topic"
)
_BY_INTENT = {
    "extract": "extraction",
    "convert": "transformation",
    "translate": "transformation",
    "summarise": "transformation",
    "classify": "classification",
    "code": "code_generation",
    "write": "creative_writing",
    "calculate": "question_answering",
    "explain": "question_answering",
    "ask": "question_answering",
    "chat": "conversation",
}


def intent_of(words: Sequence[str]) -> str:
    """From the words of an instruction, in order; "other" if no word decides."""
    question_intent = ""
    for word in words[:_MAX_LEADING]:
        intent = _INTENTS.get(word)
        if intent is None:
            continue
        if intent in _ASKING:
            # a question replaces a greeting
            question_intent = intent if question_intent in ("", "chat") else question_intent
        elif not (question_intent == "ask" and intent in _OVERRIDDEN_BY_QUESTION):
            return intent
    return question_intent or "other"


def task_type_of(lowered: str, intent: str, words: Set[str], has_code: bool) -> str:
    """One of `TASK_TYPES`. `lowered` is the instruction in lower case; `has_code` says whether it
    names a programming language or contains code."""
    if _EXPLAINS.search(lowered) is None:
        task_type = _product(lowered, words, has_code)
        if task_type:
            return task_type
        if not words.isdisjoint(_LABEL_WORDS) and _LABELS.search(lowered) is not None:
            return "classification"
    if intent == "other":
        return "question_answering" if "?" in lowered else "conversation"
    return _BY_INTENT[intent]


def _product(lowered: str, words: Set[str], has_code: bool) -> str:
    """The task type by the requested output: JSON, code or a story."""
    if "json" in words and _WANTS_JSON.search(lowered) and not _ABOUT_JSON.search(lowered):
        return "json_parsing"
    coded = not words.isdisjoint(_CODE) or (has_code and not words.isdisjoint(_PERHAPS_CODE))
    if coded and _MAKES.search(lowered) is not None and words.isdisjoint(_STORIES):
        return "code_generation"
    if not words.isdisjoint(_STORIES) and not words.isdisjoint(_WRITING):
        return "creative_writing"
    return ""


_WRITING = frozenset((*_VERBS["write"].split(), "tell", "give", "make", "need", "want"))
