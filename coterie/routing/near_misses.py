"""Prompts that speak of an adapter's task and ask for something else, made from its own hints.

What every package is spared from writing: "What is X?", "Write a poem about X", "Fix my X tool",
for the words and phrases that its examples have in common. They are learnt as counterexamples.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

FRAMES = (
    "What is {}?",
    "What does {} mean?",
    "Explain {} to a beginner.",
    "What is the difference between {} and its alternatives?",
    "Why do people use {}?",
    "Who invented {}?",
    "What is the history of {}?",
    "How do I learn {}?",
    "How long should {} be?",
    "How many kinds of {} are there?",
    "Is {} important?",
    "Which tool is best for {}?",
    "Give me five tips for {}.",
    "Write a poem about {}.",
    "Write a short story about {}.",
    "Tell me a joke about {}.",
    "Write a blog post about {}.",
    "Find a rhyme for {}.",
    'Translate "{}" into French.',
    "Translate the words {} into German.",
    "What is another word for {}?",
    "Write a Python function for {}.",
    "Write a program that checks {}.",
    "Write a regex that matches {}.",
    "Fix the bug in my {} generator: it prints everything twice.",
    "My {} tool gives the wrong result. What could be the cause?",
    "Why does my {} function fail?",
    "Train a model for {}.",
    "Design an app for {}.",
    "Write unit tests for the {} module.",
    "Is this a good {}? Give reasons.",
    "Make up a funny {}.",
    "List ten examples of {}.",
    "Who is responsible for {} in a company?",
    "Delete the {} from yesterday.",
    "Compare these two {} and say which is better.",
    "How do I change the {} in the settings?",
)
# times each frame is filled
PER_FRAME = 2
# phrases of the examples, beside the keywords
MAX_PHRASES = 10
# examples that a phrase must be in
_LEAST_EXAMPLES = 3
_MAX_PHRASE_WORDS = 5
_TOKEN = re.compile(r"[^\W\d_][\w'-]*|[^\w\s]")
_SMALL_WORDS = (
    "the a an of for to in is this and or as it my i you with what which one on from by me please "
    "that are was not be only"
)
_SMALL = frozenset(_SMALL_WORDS.split())


def near_misses(
    keywords: Sequence[str], examples: Sequence[str], common: Counter[str]
) -> list[str]:
    """`common` says how often words occur in ordinary prompts. Empty where nothing is known."""
    topics = list(dict.fromkeys((*keywords, *phrases(examples, common))))
    if not topics:
        return []
    places = range(len(FRAMES) * PER_FRAME)
    return [FRAMES[place // PER_FRAME].format(topics[place % len(topics)]) for place in places]


def phrases(examples: Sequence[str], common: Counter[str]) -> list[str]:
    """What several examples say and ordinary prompts do not, the most telling first."""
    having: Counter[str] = Counter()
    for text in examples:
        having.update(_runs([token.lower() for token in _TOKEN.findall(text)]))
    worth = {}
    for phrase, count in having.items():
        said = phrase.replace(",", "").split()
        if count >= _LEAST_EXAMPLES and not {said[0], said[-1]} & _SMALL:
            usual = min(common[word] for word in said)
            worth[phrase] = count * len(said) ** 0.5 / (1 + usual / 5)
    return sorted(worth, key=lambda phrase: (-worth[phrase], phrase))[:MAX_PHRASES]


def word_counts(texts: Iterable[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update({token.lower() for token in _TOKEN.findall(text)})
    return counts


def _runs(tokens: list[str]) -> set[str]:
    found = set()
    for size in range(1, _MAX_PHRASE_WORDS + 1):
        for start in range(len(tokens) - size + 1):
            run = tokens[start : start + size]
            if run[0][0].isalnum() and run[-1][0].isalnum():
                found.add(" ".join(run).replace(" ,", ","))
    return found
