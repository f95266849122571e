"""Which language a text is in: by its script, else by the small words that it has many of.

ISO 639-1, or "und" where nothing tells. Two tables, no model. Looks at what it is given and no
further: the caller bounds the text.
"""

from __future__ import annotations

import re
from collections.abc import Set

UNKNOWN = "und"

# scripts that one language, or one language in the main, is written in
_SCRIPTS = (
    ("ja", re.compile(r"[\u3040-\u30ff]")),
    ("ko", re.compile(r"[\uac00-\ud7af\u1100-\u11ff]")),
    ("zh", re.compile(r"[\u4e00-\u9fff]")),
    ("el", re.compile(r"[\u0370-\u03ff]")),
    ("he", re.compile(r"[\u0590-\u05ff]")),
    ("hi", re.compile(r"[\u0900-\u097f]")),
    ("th", re.compile(r"[\u0e00-\u0e7f]")),
    ("ar", re.compile(r"[\u0600-\u06ff]")),
    ("ru", re.compile(r"[\u0400-\u04ff]")),
)
_LETTER = re.compile(r"[^\W\d_]")
# letters that tell languages of one script apart
_TELLING = {
    "ru": (("uk", re.compile(r"[іїєґІЇЄҐ]")), ("bg", re.compile(r"\b(?:съм|това|какво|ще)\b"))),
    "ar": (("fa", re.compile(r"[پچژگی]")),),
}
_SMALL_WORDS = {
    "en": "the of and to is in that for with this are what how a an it you i on be from as my have "
    "do can write make which was by or not no give your please me does out at if into there when "
    "explain list find using about should would could they we he she his her its has who i'm "
    "let's that's hello good ok first all one",
    "de": "der die das und ist nicht ein eine ich zu mit den von für auf wie was im des sich dem "
    "es auch sind wird bitte kann mir als aus einen schreibe",
    "fr": "le la les des est et une un pour que qui dans je vous pas en du au ce sur avec quel "
    "quelle comment sont il elle nous mon écris plus",
    "es": "el la los las es y una un para que en del por con como qué cuál se su mi al lo cómo "
    "está son más yo esto escribe dónde",
    "pt": "o os as é e uma um para que em do da no na por com como não se seu qual eu isso são "
    "mais está você meu dos escreva",
    "it": "il lo gli è e una un per che di del della nel con come non si sono mi questo quale cosa "
    "dei alla più ho scrivi da",
    "nl": "de het een en is van in niet ik voor met op dat te zijn wat hoe aan er ook naar mijn "
    "deze wordt kan je schrijf",
    "sv": "och är att det en ett som på för inte jag med av till hur vad har kan den skriv om min",
    "da": "og er at det en et som på for ikke jeg med af til hvordan hvad har kan den skriv hvor",
    "no": "og er at det en et som på for ikke jeg med av til hvordan hva har kan den skriv hvor",
    "fi": "ja on ei se että mutta tämä mikä kuinka miten minä ovat voi kun niin olen mitä kirjoita",
    "pl": "kto gdzie i jest nie to na się że do z w jak co dla czy po są od mi napisz ten który",
    "cs": "a je se na že to v s jak co pro jsem není od ale jaké jsou napiš který kde po",
    "tr": "hangisi büyük ve bir bu için ne nasıl ile çok değil mi ben var daha gibi yaz kadar",
    "ro": "și este un o în de la cu pe nu ce cum pentru sunt că mai care din scrie al",
    "hu": "és a az egy nem hogy van mi ez hogyan mit is vagy meg kell írj volt milyen",
    "vi": "và là của có không một cho được trong với này những tôi như thế nào viết hãy bạn",
    "id": "dan yang di ini itu untuk dengan tidak adalah dari apa bagaimana saya ke pada tulis",
}
_ORDER = tuple(_SMALL_WORDS)


def _votes() -> dict[str, tuple[tuple[int, float], ...]]:
    """Word -> (language's number, how much the word says: the fewer have it, the more)."""
    having: dict[str, list[int]] = {}
    for number, name in enumerate(_ORDER):
        for word in _SMALL_WORDS[name].split():
            having.setdefault(word, []).append(number)
    return {
        word: tuple((number, 1.0 / len(numbers)) for number in numbers)
        for word, numbers in having.items()
    }


_VOTES = _votes()
# a Latin text with a few foreign letters is still one
_MIN_SHARE = 0.3


def detect(text: str, words: Set[str]) -> str:
    """`words` are the text's own, in lower case."""
    if not text.isascii() and (found := _by_script(text)):
        return found
    return _by_words(words)


def _by_script(text: str) -> str:
    letters = len(_LETTER.findall(text)) or 1
    for name, letter in _SCRIPTS:
        if len(letter.findall(text)) >= _MIN_SHARE * letters:
            for other, telling in _TELLING.get(name, ()):
                if telling.search(text):
                    return other
            return name
    return ""


def _by_words(words: Set[str]) -> str:
    votes = [0.0] * len(_ORDER)
    for word in _VOTES.keys() & words:
        for number, weight in _VOTES[word]:
            votes[number] += weight
    most = max(votes)
    # equal votes go to the language that the table has first
    return _ORDER[votes.index(most)] if most else UNKNOWN
