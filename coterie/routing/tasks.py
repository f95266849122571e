"""What a caller wants done: an intent by the verbs of the instruction, and one of `TASK_TYPES`.

Patterns over the caller's own words; the document beside them is material, not a wish.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# the first of these words in an instruction tells what is wanted
_VERBS = {
    "extract": "extract pull parse find identify locate grab scrape",
    "convert": "convert turn transform reformat normalise normalize rewrite rephrase paraphrase "
    "reword change format express shorten simplify correct proofread slugify",
    "translate": "translate",
    "summarise": "summarise summarize tldr condense recap abridge",
    "classify": "classify categorise categorize label tag sort rate decide detect judge",
    "code": "implement refactor debug code program",
    "write": "write compose draft create generate invent imagine tell brainstorm continue",
    "calculate": "calculate compute solve add multiply count sum",
    "explain": "explain describe define compare discuss outline",
    "ask": "what why how who whom whose when where which is are was were do does did can could "
    "should would will has have list name give show",
    "chat": "hello hi hey thanks thank goodbye bye",
}
_INTENTS = {verb: intent for intent, verbs in _VERBS.items() for verb in verbs.split()}
# words that ask for nothing themselves
_POLITE = frozenset(("could", "can", "would", "is"))
_MAX_LEADING = 40

_WANTS_JSON = re.compile(
    r"\b(?:as|in|into|to|return|returns|output|produce|give me|valid|only|pure|respond with|"
    r"reply with|answer with|write|generate|create|make)\s+(?:a |an |the |one |only |valid |"
    r"strict |plain |single |nested |compact |flat )*json\b"
    r"|\bjson\s+(?:object|array|list|format|output|only|please|with (?:the )?(?:keys|fields))\b"
    r"|\bparse\b.{0,40}\bjson\b|\bjson\b\s*[:?.]?\s*$"
)
_ABOUT_JSON = re.compile(
    r"\bfrom\s+(?:this |the |a )?json\b|\b(?:what|explain|why)\b.{0,30}\bjson\b"
)
_WANTS_CODE = re.compile(
    r"\b(?:write|implement|generate|create|make|build|code|fix|debug|refactor|complete|need|"
    r"give me|show me|want|provide|develop|port|translate|convert|optimise|optimize|add)\b.{0,60}?"
    r"\b(?:functions?|scripts?|class(?:es)?|programs?|quer(?:y|ies)|sql|regex|regexp|methods?|"
    r"code|snippets?|components?|algorithms?|unit tests?|macros?|makefile|dockerfile|one-liner|"
    r"endpoints?|subroutine|closure|decorator|iterator|struct|trait|stored procedure)\b"
    r"|\b(?:sql|select) (?:query|statement|for|to|that)\b|\bquery (?:for|to|that|the)\b"
    r"|\b(?:regex|regexp|regular expression) (?:for|to|that)\b|^\s*(?:sql|regex)\s*:"
)
_EXPLAINS = re.compile(
    r"^\s*(?:please |can you |could you )?(?:explain|what(?:'s| is| are| does)|why|who|describe|"
    r"define|compare)\b"
)
_CREATIVE = re.compile(
    r"\b(?:story|stories|poem|haiku|sonnet|limerick|song|lyrics|novel|essay|fairy ?tale|tale|joke|"
    r"dialogue|screenplay|monologue|blog post|speech|letter|verse|ballad|slogan|tagline)\b"
)
_LABELS = re.compile(
    r"\b(?:positive|negative|spam|true|yes|urgent)\b\W{0,3}(?:, |or |/)\s*\S"
    r"|\b(?:sentiment|which (?:category|class|label|of these)|pick one|choose one|one of)\b"
    r"|\b(?:category|intent|label|topic)\s*[:?]"
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
    """Of an instruction's words in order; "other" where none of them tells."""
    asked = ""
    for word in words[:_MAX_LEADING]:
        intent = _INTENTS.get(word)
        if intent is None or word in _POLITE:
            continue
        # "what", "is" and the like yield to a verb of doing behind them
        if intent in ("ask", "chat"):
            asked = asked or intent
        elif not (asked == "ask" and intent in ("write", "code")):
            return intent
    return asked or "other"


def task_type_of(lowered: str, intent: str) -> str:
    """One of `TASK_TYPES`. `lowered` is the instruction in lower case."""
    explains = _EXPLAINS.search(lowered) is not None
    if not explains:
        if "json" in lowered and _WANTS_JSON.search(lowered) and not _ABOUT_JSON.search(lowered):
            return "json_parsing"
        if _WANTS_CODE.search(lowered) is not None:
            return "creative_writing" if _CREATIVE.search(lowered) else "code_generation"
    if _LABELS.search(lowered) is not None and not explains:
        return "classification"
    if intent in ("write", "other", "ask") and _CREATIVE.search(lowered) and not explains:
        return "creative_writing"
    if intent == "other":
        return "question_answering" if "?" in lowered else "conversation"
    return _BY_INTENT[intent]
