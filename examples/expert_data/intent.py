"""Training data: messages to a shop and their intent, one of six listed labels."""

from __future__ import annotations

import random
from collections.abc import Iterator

from examples.expert_data.base import Example, pick, words

LABELS = ("cancel", "delivery", "login", "refund", "invoice", "product")
_THINGS = words(
    """
    lamp jacket blender headset router backpack tent bicycle printer sofa kettle drill camera
    monitor scarf guitar stroller mattress keyboard vacuum
    """
)
_PLANS = ("subscription", "membership", "plan", "order", "contract", "booking")
_FORMS = {
    "cancel": (
        "I want to cancel my {plan}.", "Please stop my {plan} from next month.",
        "End the {plan} for the {t}.", "I do not need the {plan} any more, close it.",
        "How can I get out of my {plan}?", "Take back my order of the {t} before you send it.",
        "Do not renew my {plan}.", "I changed my mind, no {t} please.",
        "Terminate the {plan} today.", "Call off the {t} I ordered.",
    ),
    "delivery": (
        "Where is my {t}?", "The {t} has not arrived yet.", "When will you ship the {t}?",
        "The driver left my {t} at the wrong house.", "Track my parcel with the {t}.",
        "The parcel is late by a week.", "Can the {t} come to my office instead?",
        "The courier did not ring.", "Which day does the {t} get here?",
        "My package shows no progress.",
    ),
    "login": (
        "I forgot my password.", "I cannot sign in to my account.", "My account is locked.",
        "The site says my user name is wrong.", "The reset link does not come.",
        "I never get the code to log in.", "Change the password of my account.",
        "I am thrown out each time I sign in.", "My old email is in the account, I cannot enter.",
        "The app does not accept my pin.",
    ),
    "refund": (
        "I want my money back for the {t}.", "The {t} came broken, please refund me.",
        "I sent the {t} back, when do I get paid?", "You owe me the price of the {t}.",
        "Please return the amount to my card.", "I was promised a refund for the {t}.",
        "The {t} is faulty and I ask for my money.", "Reimburse me for the {t}.",
        "I returned the {t} but see no payment.", "Give me back what I paid.",
    ),
    "invoice": (
        "Please send the invoice for the {t}.", "My bill shows the wrong address.",
        "I need a receipt for the {t}.", "Why does the bill list the {t} twice?",
        "The tax number is missing on the invoice.", "Can I have the bill as a PDF?",
        "Which invoice belongs to the {t}?", "The invoice names my old company.",
        "I need a copy of last month's bill.", "The sum on the receipt for the {t} looks odd.",
    ),
    "product": (
        "Does the {t} come in green?", "How heavy is the {t}?", "Is the {t} waterproof?",
        "What is the {t} made of?", "Do you sell a smaller {t}?", "Which {t} is best for kids?",
        "Does the {t} work with batteries?", "How long is the cable of the {t}?",
        "Is there a manual for the {t}?", "Will you have the {t} in stock again?",
    ),
}  # fmt: skip
_OPEN = ("", "", "", "Hi, ", "Hello! ", "Good morning. ", "Dear team, ", "Quick question: ")
_CLOSE = ("", "", "", " Thanks.", " Please help.", " Regards, Eva", " It is urgent.", " Thank you!")
_ASKS = (
    "Intent ({labels})?\n{text}",
    "{text}\nPick one: {labels}",
    "Label this message with {labels}: {text}",
    "Choose from {labels}. Message: {text}",
    'What is "{text}" about? Options: {labels}',
    "Read the message of a client and name its topic, out of {labels}.\n\n{text}",
    "{text}\n\nThe topic of this mail ({labels}) is",
)


def examples(seed: int = 16) -> Iterator[Example]:
    draw = random.Random(seed)
    while True:
        label = pick(draw, LABELS)
        text = pick(draw, _FORMS[label]).format(t=pick(draw, _THINGS), plan=pick(draw, _PLANS))
        text = pick(draw, _OPEN) + text + pick(draw, _CLOSE)
        among = ", ".join(draw.sample(LABELS, len(LABELS)))
        yield Example(pick(draw, _ASKS).format(text=text, labels=among), label)
