"""The purpose of a prompt: an intent by the verbs of the instruction, and one of `TASK_TYPES`.

Uses words and patterns of the caller's instruction only; a document is not searched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set


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
