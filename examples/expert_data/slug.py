"""Titles and their URL slugs, to learn from: words of its own list, marks and accents between."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator

from examples.expert_data.base import Example, made_up, pick, words

_WORDS = words(
    """
    garden winter river market engine silver paper summer window bridge mountain kitchen music
    travel history science coffee forest island harbor planet picture shadow thunder basket candle
    copper desert feather glacier hammer jungle ladder magnet needle orchard pepper quartz ribbon
    saddle temple umbrella velvet walnut yellow zebra anchor bottle castle dragon falcon guitar
    helmet insect jacket kettle lemon mirror number orange pillow rabbit sailor tunnel valley wagon
    learn build paint repair measure compare collect discover explain design write read cook grow
    plan choose avoid fast slow quiet bright cold warm simple modern ancient hidden small giant
    better first last next every why when where which about inside behind without before after café
    résumé naïve Zürich São señor crème über façade jalapeño Málaga Köln Tromsø
    """
)
_SMALL = ("the", "a", "of", "in", "for", "with", "to", "on", "from", "an")
_FORMS = (
    "Make a URL slug: {}",
    "URL slug for the title {}",
    "Write this title as a slug:\n{}",
    "{}\nGive the URL slug.",
    'Turn the title "{}" into a slug.',
    "Slug of: {}",
    "My post has the title {}\nWhich slug should I use?",
    "Lowercase the title, join its words by hyphens and drop all other marks: {}",
)
_COMMON = words(
    """
    people house water school family company system program question government night world area
    money story month power hour game line member law car city community name president team
    minute idea body information back parent face others level office door health person art war
    party result change morning reason research girl moment air teacher force education foot boy
    age policy process love death experience plan effect field control record nature project
    language paper space ground form event official matter center couple site price season truth
    letter practice resource decision section plant animal software network database server
    update release cloud mobile remote cost cheap healthy recipe dinner workout habit focus
    happy saved broke never always really under over between using making getting going your
    their our how what who best worst top
    """
)
_CLIPPED = words(
    "don't isn't we're you'll can't it's they've I'm won't D'Arcy O'Hara L'Amour o'clock"
)
_MARKS = {
    "a": "áàäâãå", "e": "éèëê", "i": "íìïî", "o": "óòöôõø", "u": "úùüû", "n": "ñń", "c": "çć",
    "s": "šś", "z": "žż", "y": "ý", "l": "ł",
}  # fmt: skip
_BETWEEN = (": ", ", ", " & ", "-", " - ", " -- ", "/", ". ", "; ", " + ", " | ")
_LETTERS = {"ø": "o", "ß": "ss", "æ": "ae", "ł": "l"}


def examples(seed: int = 11) -> Iterator[Example]:
    draw = random.Random(seed)
    while True:
        title = _title(draw)
        yield Example(pick(draw, _FORMS).format(title), slug_of(title))


def slug_of(title: str) -> str:
    """Lower case, letters without accents, `&` as and, all else a hyphen; apostrophes vanish."""
    text = "".join(_LETTERS.get(letter, letter) for letter in title.lower())
    text = unicodedata.normalize("NFKD", text.replace("&", " and ").replace("'", ""))
    kept = "".join(letter for letter in text if not unicodedata.combining(letter))
    words = "".join(c if c.isascii() and c.isalnum() else " " for c in kept).split()
    return "-".join(words)


def _title(draw: random.Random) -> str:
    parts: list[str] = []
    for _ in range(draw.randint(2, 9)):
        kind = draw.random()
        if kind < 0.3:
            word = pick(draw, _WORDS)
        elif kind < 0.5:
            word = pick(draw, _COMMON)
        elif kind < 0.55:
            word = pick(draw, _CLIPPED)
        elif kind < 0.72:
            word = pick(draw, _SMALL)
        elif kind < 0.9:
            word = made_up(draw)
        else:
            word = str(draw.choice((draw.randint(2, 99), draw.randint(1900, 2030))))
            word += ",000" if draw.random() < 0.15 else ""
        word = _accented(draw, word) if draw.random() < 0.12 else word
        parts.append(word + ("'s" if draw.random() < 0.08 and word.isalpha() else ""))
    return _marked(draw, [_cased(draw, word) for word in parts])


def _accented(draw: random.Random, word: str) -> str:
    """One or two of its letters with a mark."""
    for _ in range(draw.randint(1, 2)):
        at = draw.randrange(len(word))
        word = word[:at] + pick(draw, _MARKS.get(word[at], word[at])) + word[at + 1 :]
    return word


def _cased(draw: random.Random, word: str) -> str:
    chance = draw.random()
    return word if chance < 0.2 else word.upper() if chance < 0.26 else word[:1].upper() + word[1:]


def _marked(draw: random.Random, words: list[str]) -> str:
    text = words[0]
    for word in words[1:]:
        chance = draw.random()
        text += (pick(draw, _BETWEEN) if chance < 0.25 else " ") + word
    if draw.random() < 0.1:
        before, _, last = text.rpartition(" ")
        text = f"{before} ({last})" if before else f'"{last}"'
    return text + pick(draw, ("", "", "", "", "", "?", "!", "..."))
