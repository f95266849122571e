"""The language of an instruction: by its script, or by common words, letters and endings.

ISO 639-1, or "und" if it cannot be decided. Uses tables, no model. Reads the whole given text: the
caller limits its length and removes quotations.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import chain

UNKNOWN = "und"

# scripts that are used by one language, or mainly by one
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
_HAN = re.compile(r"[\u4e00-\u9fff]")
# letters that distinguish languages of one script
_DISTINCTIVE_LETTERS = {
    "ru": (
        ("bg", re.compile(r"(?i)\b(?:съм|това|какво|ще|най|къде|моля|който)\b|ъ[бвгдзклмнпрстфх]")),
        ("uk", re.compile(r"(?i)[іїєґ]|\b(?:де|цей|ця|це|що|чому|як|мені|або|будь|вже)\b")),
    ),
    "ar": (("fa", re.compile(r"[پچژگیک]")),),
}  # fmt: skip
_SMALL_WORDS = {
    "en": "the of and to is in that for with this are what how a an it you i on be from as my "
    "have do can write make which was by or not no give your please me does out at if "
    "into there when explain list find using about should would could they we he she his "
    "her its has who i'm let's that's hello good ok first all one these those than then "
    "where why will were been more some any each other our their them us but so up down "
    "tell show turn get need want who's what's it's don't between many much most very "
    "only also just after before over under new convert create extract return translate "
    "summarize summarise classify sentence word comment says text message review table "
    "column name title date time today tomorrow thanks thank",
    "de": "der die das und ist nicht ein eine ich zu mit den von für auf wie was im des sich "
    "dem es auch sind wird bitte kann mir als aus einen einem einer schreibe schreib du "
    "wir ihr sie er mein meine dein hat habe haben war warum wo wer wann welche welcher "
    "welches dieser diese dieses diesen gib mach nenne erkläre über oder aber nach bei "
    "vom zum zur noch nur sehr mehr am um bis durch gegen ohne heute morgen gibt gut ja "
    "nein danke viele viel sein werden soll muss möchte könnte text fasse mal zwei drei "
    "vier fünf satz wort",
    "fr": "le la les des est et une un pour que qui dans je vous pas en du au aux ce cette ces "
    "sur avec quel quelle quels quelles comment sont il elle nous mon ma mes ton ta votre "
    "vos notre écris écrivez plus où quand pourquoi ou mais donc par ne se son sa ses "
    "leur y a été être avoir fait faire peux peut moi toi lui bien très tout tous s'il "
    "d'un d'une c'est qu'est donne donne-moi donnez combien aujourd'hui demain merci "
    "bonjour cet jusqu'à d l n s qu j c de",
    "es": "el la los las es y una un para que en del por con como qué cuál se su sus mi mis al "
    "lo cómo está están son más yo tú esto esta este estos estas escribe dónde cuándo "
    "quién hay muy pero o si no sí me te le les nos fue ser tiene tengo puedo puedes "
    "hacer dame dime cuántos cuántas cuánto hoy mañana gracias hola también sobre entre "
    "sin hasta desde de a explica convierte haz todo todos cada otro quiero estaba era "
    "dos tres cuatro cinco frase palabra",
    "pt": "o os as é e uma um para que em do da dos das no na nos nas por com como não se seu "
    "sua qual quais eu isso isto são mais está estão você vocês meu minha meus escreva "
    "quem onde quando porquê porque muito mas ou sem até foi ser ter tem tenho posso pode "
    "fazer faça dê-me me lhe hoje amanhã obrigado olá também sobre entre de a esta este "
    "essa esse ao à quantos quantas explique cada outro pelo pela quero estava era dois "
    "três quatro cinco frase palavra",
    "it": "il lo gli è e una un per che di del della dello dei delle degli nel nella con come "
    "non si sono mi questo questa questi quale quali cosa alla al allo più ho hai ha "
    "scrivi da dal dalla dove quando perché chi quanto quanti quante ma o anche molto io "
    "tu lui lei noi voi loro mio mia miei tuo tua suo sua sul sulla su in a ci ne se fa "
    "fare puoi posso dammi dimmi oggi domani grazie ciao essere stato ogni tra fra senza "
    "la le i c'è cos'è qual voglio vorrei era due tre quattro cinque frase parola",
    "nl": "de het een en is van in niet ik voor met op dat te zijn wat hoe aan er ook naar mijn "
    "deze dit die wordt kan je jij u we wij ze zij hij haar schrijf waarom wanneer waar "
    "wie welke welk om of maar bij uit over door tot tegen zonder nog al meer veel zeer "
    "heel heb heeft hebben was worden moet wil zou geef maak leg vertaal vandaag morgen "
    "dank bedankt hallo goed geen onze jouw alle elke als dan noem twee drie vier vijf "
    "zin woord tekst",
    "sv": "och är att det en ett som på för inte jag med av till hur vad har kan den skriv om "
    "min mitt mina din ditt du vi ni han hon de dem var varför när vem vilken vilket "
    "vilka eller men från ut in över under utan också mycket mer alla några något detta "
    "denna dessa ska skulle vill måste får ge gör idag imorgon tack hej god bra många sig "
    "sin så finns blir i",
    "da": "og er at det en et som på for ikke jeg med af til hvordan hvad har kan den skriv "
    "hvor hvornår hvorfor hvem hvilken hvilket hvilke eller men fra ud ind over under "
    "uden også meget mere alle nogle noget denne dette disse skal skulle vil må få giv "
    "gør i dag morgen tak nævn digt hej god godt mange sig sin så min mit mine din dit du "
    "vi han hun de dem blev blive findes mig dig",
    "no": "og er at det en et som på for ikke jeg med av til hvordan hva har kan den skriv hvor "
    "når hvorfor hvem hvilken hvilket hvilke eller men fra ut inn over under uten også "
    "mye mer alle noen noe denne dette disse skal skulle vil må få gi gjør i dag morgen "
    "takk hei god godt mange seg sin så min mitt mine din ditt du vi han hun de dem ble "
    "bli finnes meg deg",
    "fi": "ja on ei se että mutta tämä mikä kuinka miten minä sinä hän me te he ovat voi kun "
    "niin olen olet mitä kirjoita missä milloin miksi kuka kumpi tai myös vain hyvin "
    "paljon enemmän kaikki joka jos ennen jälkeen ilman kanssa minun sinun oli olla anna "
    "kerro selitä tänään huomenna kiitos hei hyvä monta tämän nämä niitä sitä minulle "
    "haluan luettele unohdin kaksi kolme neljä viisi lause sana",
    "pl": "kto gdzie i jest nie to na się że do z w jak co dla czy po są od mi napisz ten ta te "
    "tego tej który która które ale lub albo bez przez przed przy nad pod o u za ile ja "
    "ty on ona my wy oni mój moja moje twój jego jej ich był była było być ma mam masz "
    "może można proszę kiedy dlaczego jaki jaka jakie jaką dziś dzisiaj jutro dziękuję "
    "cześć bardzo też tylko już podaj wyjaśnij zamień dużo wiele tym tych",
    "cs": "a je se na že to v s jak co pro jsem není od ale jaké jaký jaká jsou napiš který "
    "která které kde po i z do k o u za při bez nebo když kdy proč kdo kolik já ty on ona "
    "my vy oni můj moje tvůj jeho její jejich byl byla bylo být mám máš má může prosím "
    "dnes zítra děkuji ahoj velmi také jen už tento tato toto vysvětli mi si ve ze mezi",
    "tr": "hangisi büyük ve bir bu şu için ne nasıl ile çok değil mi mı mu mü ben sen biz siz "
    "onlar var yok daha gibi yaz kadar nerede neden niçin kim kaç hangi ama veya ya da de "
    "en her bana sana onu benim senin bizim lütfen olarak olan oldu ver yap çevir açıkla "
    "bugün yarın teşekkürler merhaba iyi nedir midir sonra önce şey",
    "ro": "și este un o în de la cu pe nu ce cum pentru sunt că mai care din scrie al ale a ai "
    "am are au unde când cine cât câți câte sau dar prin până fără după înainte eu tu el "
    "ea noi voi ei mea meu mele tău sa său lor acest această aceste fi fost poate pot te "
    "rog să îmi azi astăzi mâine mulțumesc salut bun foarte doar explică într-o într-un "
    "dintre",
    "hu": "és a az egy nem hogy van mi ez hogyan mit is vagy meg kell írj írd volt milyen hol "
    "mikor miért ki kinek melyik mennyi hány de ha csak már még nagyon minden én te ő ti "
    "ők ezt azt ezek lehet tud tudok kérlek ma holnap köszönöm szia jó legyen között "
    "nélkül után előtt magyarázd el fel le be mondd nekem szerint",
    "vi": "và là của có không một cho được trong với này những tôi như thế nào viết hãy bạn các "
    "ở đến từ khi gì ai đâu bao nhiêu tại sao hay hoặc nhưng rất cũng đã sẽ đang về ra "
    "vào làm câu anh em ông bà hôm nay mai cảm ơn xin chào giải thích dịch sang tiếng",
    "id": "dan yang di ini itu untuk dengan tidak adalah dari apa bagaimana saya ke pada tulis "
    "tuliskan kamu anda kami kita mereka dia ada akan bisa dapat sudah belum juga atau "
    "tetapi tapi karena jika kapan siapa mana mengapa kenapa berapa lebih sangat semua "
    "setiap oleh tolong jelaskan buatkan buat hari besok terima kasih halo sebuah seorang "
    "dalam tentang",
}  # fmt: skip
_ORDER = tuple(_SMALL_WORDS)
# letters and endings of words, each with the languages that it votes for
_LETTERS = {
    "ß": "de", "ñ": "es", "¿": "es", "¡": "es", "ã": "pt vi", "õ": "pt vi", "œ": "fr",
    "ê": "fr pt vi", "è": "fr it vi", "ù": "fr it vi", "ò": "it vi", "ì": "it vi",
    "à": "fr it pt vi", "ç": "fr pt tr", "û": "fr", "î": "fr ro", "ï": "fr nl", "ë": "nl fr",
    "ô": "fr pt vi", "â": "fr pt ro vi", "å": "sv da no", "ø": "da no", "æ": "da no",
    "ä": "de sv fi", "ö": "de sv fi tr hu", "ü": "de tr hu", "ł": "pl", "ż": "pl", "ź": "pl",
    "ś": "pl", "ć": "pl", "ń": "pl", "ą": "pl", "ę": "pl", "ř": "cs", "ě": "cs", "ů": "cs",
    "ž": "cs", "č": "cs", "š": "cs", "ý": "cs vi", "ť": "cs", "ď": "cs", "ğ": "tr", "ı": "tr",
    "ş": "tr ro", "ș": "ro", "ț": "ro", "ă": "ro vi", "ő": "hu", "ű": "hu", "đ": "vi",
    "ơ": "vi", "ư": "vi", "é": "fr es pt hu cs vi", "á": "es pt hu cs vi",
    "í": "es pt hu cs vi", "ó": "es pt pl hu vi", "ú": "es pt hu cs vi",
}  # fmt: skip
_VIETNAMESE = re.compile(r"[ạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ]")
_ENDINGS = {
    "ción": "es", "ciones": "es", "ção": "pt", "ções": "pt", "zione": "it", "zioni": "it",
    "ung": "de", "lich": "de", "heit": "de", "keit": "de", "schen": "de", "isch": "de",
    "tion": "en fr", "ment": "en fr", "ing": "en", "ness": "en", "eau": "fr", "eux": "fr",
    "aire": "fr", "ez": "fr", "mente": "es pt it", "dad": "es", "dade": "pt", "inho": "pt",
    "ità": "it", "etto": "it", "ello": "it", "lijk": "nl", "heid": "nl", "ij": "nl",
    "tje": "nl", "oon": "nl", "aan": "nl", "eer": "nl", "ować": "pl", "anie": "pl",
    "enie": "pl", "ego": "pl", "ych": "pl", "cja": "pl", "rz": "pl", "het": "sv nl",
    "ning": "sv da no", "arna": "sv", "erna": "sv da no", "orna": "sv", "igt": "sv da",
    "ni": "fi", "ään": "fi", "een": "nl fi", "lar": "tr", "ler": "tr", "mak": "tr", "mek": "tr",
    "dır": "tr", "dir": "tr", "nin": "tr", "ini": "tr id", "ssa": "fi", "ssä": "fi",
    "lla": "fi", "llä": "fi", "sta": "fi", "stä": "fi", "inen": "fi", "kaa": "fi", "ban": "hu",
    "ben": "hu", "nak": "hu", "nek": "hu", "ság": "hu", "ség": "hu", "ova": "cs", "ost": "cs",
    "ului": "ro", "ilor": "ro", "eaza": "ro", "ează": "ro", "kan": "id", "nya": "id",
}  # fmt: skip
_MAX_KNOWN_WORDS = 50_000
_LETTER_VOTE, _ENDING_VOTE = 0.9, 0.4
# a word of one language counts more than a word of many
_LEAST_VOTE = 0.12
_VOTERS = {name: number for number, name in enumerate(_ORDER)}
_LONGEST_ENDING = max(map(len, _ENDINGS))
# a Latin text with a few foreign letters is still Latin
_MIN_SHARE = 0.3
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", re.UNICODE)
Votes = tuple[tuple[int, float], ...]


def _votes() -> dict[str, Votes]:
    """Word -> (index of a language, weight of the vote: higher if fewer languages have the
    word)."""
    having: dict[str, dict[int, None]] = {}
    for number, name in enumerate(_ORDER):
        for word in _SMALL_WORDS[name].split():
            having.setdefault(word, {})[number] = None
    return {
        word: tuple((number, 1.0 / len(numbers)) for number in numbers)
        for word, numbers in having.items()
    }


def _shared(marks: dict[str, str], vote: float) -> dict[str, Votes]:
    return {
        mark: tuple((_VOTERS[name], vote / len(names.split())) for name in names.split())
        for mark, names in marks.items()
    }


_WORD_VOTES = _votes()
_LETTER_VOTES = _shared(_LETTERS, _LETTER_VOTE)
_ENDING_VOTES = _shared(_ENDINGS, _ENDING_VOTE)


def detect(text: str, words: Collection[str] | None = None) -> str:
    """`words`: the words of the text in lower case, if they are already known."""
    if not text.isascii() and (found := _by_script(text)):
        return found
    lowered = text.lower()
    return _by_words(lowered, {*(words or ()), *_WORD.findall(lowered)})


def _by_script(text: str) -> str:
    num_letters = len(_LETTER.findall(text)) or 1
    for name, letter in _SCRIPTS:
        count = len(letter.findall(text))
        # a Japanese text is mostly Han with a few Japanese letters
        total = count + len(_HAN.findall(text)) if name == "ja" and count else count
        if total >= _MIN_SHARE * num_letters:
            for other, letters in _DISTINCTIVE_LETTERS.get(name, ()):
                if letters.search(text):
                    return other
            return name
    return ""


def _by_words(text: str, words: Collection[str]) -> str:
    votes = [0.0] * len(_ORDER)
    for number, weight in chain.from_iterable(map(_known_votes.__getitem__, words)):
        votes[number] += weight
    if not text.isascii():
        for letter in set(text):
            for number, weight in _LETTER_VOTES.get(letter, ()):
                votes[number] += weight
        votes[_VOTERS["vi"]] += min(4, len(_VIETNAMESE.findall(text)))
    most = max(votes)
    # for equal votes, the first language of the table wins
    return _ORDER[votes.index(most)] if most >= _LEAST_VOTE else UNKNOWN


class _KnownVotes(dict[str, Votes]):
    """The votes of words: the small words of all languages, and words that were seen before."""

    def __missing__(self, word: str) -> Votes:
        votes = _by_ending(word)
        if len(self) >= _MAX_KNOWN_WORDS:
            self.clear()
            self.update(_WORD_VOTES)
        self[word] = votes
        return votes


_known_votes = _KnownVotes(_WORD_VOTES)


def _by_ending(word: str) -> Votes:
    for size in range(min(_LONGEST_ENDING, len(word) - 2), 1, -1):
        votes = _ENDING_VOTES.get(word[-size:])
        if votes is not None:
            return votes
    return ()
