"""Training data: titles and their URL slugs, with its own list of words, marks and accents."""

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
_LETTERS = {"ø": "o", "ß": "ss", "æ": "ae", "ł": "l"}


def examples(seed: int = 11) -> Iterator[Example]:
    draw = random.Random(seed)
    while True:
        title = _title(draw)
        yield Example(pick(draw, _FORMS).format(title), slug_of(title))


def slug_of(title: str) -> str:
    """Lower case, letters without accents, `&` as and, a hyphen for the rest; apostrophes are
    removed."""
    text = "".join(_LETTERS.get(letter, letter) for letter in title.lower())
    text = unicodedata.normalize("NFKD", text.replace("&", " and ").replace("'", ""))
    kept = "".join(letter for letter in text if not unicodedata.combining(letter))
    words = "".join(c if c.isascii() and c.isalnum() else " " for c in kept).split()
    return "-".join(words)


def _title(draw: random.Random) -> str:
    words: list[str] = []
    for _ in range(draw.randint(2, 8)):
        kind = draw.random()
        if kind < 0.55:
            word = pick(draw, _WORDS)
        elif kind < 0.72:
            word = pick(draw, _SMALL)
        elif kind < 0.9:
            word = made_up(draw)
        else:
            word = str(draw.choice((draw.randint(2, 99), draw.randint(1900, 2030))))
        words.append(word + ("'s" if draw.random() < 0.06 and word.isalpha() else ""))
    return _marked(draw, [_cased(draw, word) for word in words])


def _cased(draw: random.Random, word: str) -> str:
    chance = draw.random()
    return word if chance < 0.2 else word.upper() if chance < 0.26 else word[:1].upper() + word[1:]


def _marked(draw: random.Random, words: list[str]) -> str:
    text = words[0]
    for word in words[1:]:
        chance = draw.random()
        mark = ": " if chance < 0.07 else ", " if chance < 0.12 else " & " if chance < 0.17 else " "
        text += ("-" if 0.17 < chance < 0.2 else mark) + word
    return text + pick(draw, ("", "", "", "", "", "?", "!", "..."))
