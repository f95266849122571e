"""routing/features/: what is told, and at what cost."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.settings import TASK_TYPES
from coterie.routing.features.features import HEAD_CHARS, TAIL_CHARS, extract, routed_text
from coterie.routing.features.instruction import parts_of
from coterie.routing.router import TASK_VALUES

TASKS = [
    # the seed's own examples
    ("Parse this JSON and extract fields", "json_parsing"),
    ("Classify this JSON document", "classification"),
    ("Write a story about a dragon who cannot fly", "creative_writing"),
    ("Generate Rust async function", "code_generation"),
    # JSON as what comes out, and as what is spoken of
    ("Extract name, city and age as JSON.\nAt 34, Lena Brandt moved to Turku.", "json_parsing"),
    ("Return a JSON object with the keys title and year: Dune, 1965", "json_parsing"),
    ("Give me the following as valid JSON: red, green", "json_parsing"),
    ("What is JSON good for?", "question_answering"),
    ("Explain this JSON file to me", "question_answering"),
    ("Extract the names from this JSON", "extraction"),
    # code
    ("Write a Python function that reverses a list", "code_generation"),
    ("Fix this code: def f(x) return x", "code_generation"),
    ("SQL for all users older than 30", "code_generation"),
    ("I need a regex that matches postcodes", "code_generation"),
    ("Write a class in Java that holds a queue", "code_generation"),
    ("What is SQL?", "question_answering"),
    ("Why does Python use indentation?", "question_answering"),
    ("Write a poem about SQL", "creative_writing"),
    ("Write an invitation for my yoga class", "creative_writing"),
    # labels
    ("The straps came off on the first day. Positive, negative or neutral?", "classification"),
    ("Is this spam or not? You have won!", "classification"),
    ("Pick one: cancel, delivery, login\nWhere is my parcel?", "classification"),
    ("Categorise this ticket", "classification"),
    # the rest
    ("Find all email addresses in the text below", "extraction"),
    ("Translate to French: good morning", "transformation"),
    ("Summarise the following report in two sentences.", "transformation"),
    ("Make a URL slug: Why Bread & Coffee Go Together", "transformation"),
    ("Rewrite this politely: give me that", "transformation"),
    ("Compose a haiku on rain", "creative_writing"),
    ("How do I fix my bike?", "question_answering"),
    ("What is the capital of France?", "question_answering"),
    ("Can you tell me how tall Everest is?", "question_answering"),
    ("Tell me a joke", "creative_writing"),
    ("Hello!", "conversation"),
    ("Hi, what is the time in Oslo?", "question_answering"),
    ("I had a long day.", "conversation"),
    ("Escribe un poema sobre el mar", "creative_writing"),
    ("Напиши функцию на Python", "code_generation"),
]


@pytest.mark.parametrize(("text", "task_type"), TASKS)
def test_task_types(text: str, task_type: str) -> None:
    assert extract(text).task_type == task_type


def test_every_task_type_is_known_and_tuned() -> None:
    assert {task for _, task in TASKS} == set(TASK_TYPES) == set(TASK_VALUES)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is the weather like in the mountains today?", "en"),
        ("Commit header as type(scope): summary.\nThe importer no longer fails.", "en"),
        ("Wie viele Einwohner hat die Stadt?", "de"),
        ("Quelle est la capitale de la France ?", "fr"),
        ("¿Cuál es la capital de España y por qué?", "es"),
        ("Qual é a capital do Brasil? Eu não sei.", "pt"),
        ("Qual è la capitale della Spagna? Non lo so.", "it"),
        ("Wat is de hoofdstad van het land?", "nl"),
        ("Vad är huvudstaden och hur långt är det dit?", "sv"),
        ("Hvordan skriver jeg ikke et brev til min ven? Og hvad er det?", "da"),
        ("Mikä on tämä ja kuinka se toimii?", "fi"),
        ("Jak to jest zrobione i czy to się opłaca?", "pl"),
        ("Jak se to dělá a proč je to tak?", "cs"),
        ("Bu nasıl çalışıyor ve ne kadar?", "tr"),
        ("Care este capitala și cum pot să ajung la ea?", "ro"),
        ("Milyen az idő és hogyan jutok oda?", "hu"),
        ("Thủ đô của Việt Nam là gì và có đẹp không?", "vi"),
        ("Apa ibu kota Indonesia dan bagaimana saya ke sana?", "id"),
        ("日本の首都はどこですか", "ja"),
        ("中国的首都在哪里？", "zh"),
        ("한국의 수도는 어디입니까?", "ko"),
        ("Какая столица России?", "ru"),
        ("Яка столиця України і її населення?", "uk"),
        ("Ποια είναι η πρωτεύουσα;", "el"),
        ("מה בירת ישראל?", "he"),
        ("ما هي عاصمة مصر؟", "ar"),
        ("भारत की राजधानी क्या है?", "hi"),
        ("เมืองหลวงของไทยคืออะไร", "th"),
        ("42 + 17", "und"),
        ("", "und"),
        # a few foreign letters make no foreign text
        ("What does the word 東京 mean in the title of this film?", "en"),
    ],
)
def test_languages(text: str, language: str) -> None:
    assert extract(text).language == language


@pytest.mark.parametrize(
    ("text", "has_code", "language"),
    [
        ("def f(x):\n    return x", True, "python"),
        ("```rust\nlet a = 1;\n```", True, "rust"),
        ("```json\n{}\n```", False, ""),
        ("fn main() { let mut a = 1; }", True, "rust"),
        ("func (s *T) Run() {\n}", True, "go"),
        ("#include <vector>\nstd::vector<int> a;", True, "cpp"),
        ("public static void main", True, "java"),
        ("const a = () => { return 1 }", True, "javascript"),
        ("select name from users where age > 3", True, "sql"),
        ("Please select one from the list of names.", False, ""),
        ("Write it in Go, please", False, "go"),
        ("Let us go home", False, ""),
        ("Port this to C++", False, "cpp"),
        ("A plain sentence: nothing (really) = here.", False, ""),
    ],
)
def test_code(text: str, has_code: bool, language: str) -> None:
    features = extract(text)
    assert (features.has_code, features.code_language) == (has_code, language)


def test_json_and_documents() -> None:
    features = extract("Classify this", '{"type": "user", "name": "Alice"}')
    assert features.has_json and features.has_document and "alice" in features.words
    assert features.num_characters == len("Classify this") + 33
    # the wish decides what is to be done, not its material
    assert extract("Summarise this", "Write a Python function").task_type == "transformation"
    assert not extract("a { b }").has_json and extract("as json").has_json


def test_the_ends_of_a_long_prompt_are_looked_at() -> None:
    filler = "zzz " * 100_000
    assert extract(f"{filler} Translate this to French.").words >= {"translate", "french"}
    assert "quux" not in extract(f"{'a ' * 600} quux {filler}").words
    assert len(routed_text(filler, filler)) < HEAD_CHARS + TAIL_CHARS + 1000


def test_nothing_of_the_caller_is_told() -> None:
    features = extract("Extract the secret Zanzibar", "from Timbuktu")
    shown = repr(features.public_fields()).lower()
    assert "zanzibar" not in shown and "timbuktu" not in shown and "extraction" in shown
    assert set(features.timings_ms) >= {"words", "language", "has_json", "has_code", "task_type"}
    assert all(ms >= 0 for ms in features.timings_ms.values())


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=300), st.text(max_size=100))
def test_any_text_has_features(text: str, document: str) -> None:
    features = extract(text, document)
    assert features.task_type in TASK_TYPES and features.num_characters == len(text) + len(document)
    assert features == type(features)(
        **{name: getattr(features, name) for name in features.__slots__}
    )
    again = extract(text, document)
    assert again.public_fields() == features.public_fields() and again.words == features.words


def test_hostile_texts_cost_little() -> None:
    """Bounded in characters, and no pattern takes time that grows with their square."""
    rng = random.Random(7)
    words = ["json", "as", "a", "the", "select", "from", "write", "def ", "#include", "parse", "{"]
    texts = [word * 400_000 for word in ("a ", "{", "json as ", "select x ", "```", "write a ")]
    texts += [" ".join(rng.choices(words, k=100_000)) for _ in range(4)]
    for text in texts:
        begun = time.thread_time()
        extract(text, text)
        assert time.thread_time() - begun < 0.02, text[:20]


@pytest.mark.parametrize(
    ("prompt", "task_type"),
    [
        ("Write a poem about JSON", "creative_writing"),
        ("Tell me a story about a lonely JSON.", "creative_writing"),
        ("Write three facts about Rome as JSON", "json_parsing"),
        ("Return the name and the age as JSON.", "json_parsing"),
    ],
)
def test_what_is_spoken_of_is_not_what_is_wanted(prompt: str, task_type: str) -> None:
    assert extract(prompt).task_type == task_type


def test_parts_of_a_text_that_may_be_tasks() -> None:
    def parts(text: str) -> list[str]:
        return [text[begin:end] for begin, end in parts_of(text, 8)]

    assert parts("Slug of this title. Also tell me its mood") == [
        "Slug of this title.",
        "Also tell me its mood",
    ]
    assert parts("Slug of this title, and its mood") == ["Slug of this title", "its mood"]
    assert parts("1. name it\n2. sort it, then count it") == [
        "1. name it",
        "2. sort it",
        "count it",
    ]
    assert parts("a) date b) name and (c and d) as well as 'one and two. Three.'") == [
        "a) date",
        "b) name",
        "(c and d)",
        "'one and two. Three.'",
    ]
    for hostile in (" " * 1200, f"and{' ' * 1190}x", "a,  " * 300, "and " * 300, "'a " * 400):
        began = time.thread_time()
        parts(hostile)
        assert time.thread_time() - began < 0.1
    assert parts("") == parts(" \n") == []
    assert len(parts("and then " * 1000)) <= 8 and len(parts_of("a. " * 1000, 8)) == 8
