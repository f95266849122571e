"""The chat page in a real browser: talking, what goes wrong, hostile text, phones, the keyboard."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import NewPage
from tests.helpers.folders import temporary_folder
from tests.helpers.models.tiny import thinking_checkpoint, tiny_checkpoint
from tests.helpers.serving.server_process import Served, own_home

KEY, LIMITED = "key-of-one", "key-with-a-limit"
SETTINGS = """
[server]
api_key_file = "{home}/keys.txt"
[engine]
kv_bytes = "32MB"
threads = 1
[[specialists]]
name = "plain"
model = "{plain}"
context = 4096
[[specialists]]
name = "thinker"
model = "{thinker}"
context = 256
[[tenants]]
name = "limited"
requests_per_minute = 1
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
        },
    },
}
HOSTILE = """\
<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>

[press](javascript:window.hacked=1) [press](JaVaScRiPt:window.hacked=1) <javascript:window.hacked=1>
![look](https://elsewhere.example/pixel.png) [data](data:text/html,<script>window.hacked=1</script>)

# <svg onload=window.hacked=1>

| <b>a</b> | [x](vbscript:window.hacked=1) |
|---|---|
| `<i>c</i>` | https://elsewhere.example/a"onmouseover="window.hacked=1 |

```html
<script>window.hacked=1</script>
```
"""
# the elements that reach beyond the screen
WIDEST = """[...document.querySelectorAll('body *')]
  .filter((node) => node.getClientRects().length && !node.closest('pre, .wide, .unseen, .skip'))
  .filter((node) => node.getBoundingClientRect().right > innerWidth + 0.5)
  .map((node) => node.outerHTML.slice(0, 200)).slice(0, 5)"""


@pytest.fixture(scope="module")
def chat_server() -> Iterator[Served]:
    """Callers need a key; one model talks, one thinks and never ends its thought."""
    home = own_home(temporary_folder("coterie-home-"))
    keys = home / "keys.txt"
    keys.write_text(f"{KEY}\n{LIMITED} tenant=limited\n")
    keys.chmod(0o600)
    plain = tiny_checkpoint("llama", max_position_embeddings=8192)
    thinker = thinking_checkpoint(home / "thinker")
    (home / "coterie.toml").write_text(SETTINGS.format(home=home, plain=plain, thinker=thinker))
    served = Served("--config", str(home / "coterie.toml"), COTERIE_HOME=str(home))
    yield served
    served.stop()
    shutil.rmtree(home)


def chat_page(new_page: NewPage, served: Served, key: str = KEY, **options: Any) -> Page:
    page = new_page(served, key=key, path="/", **options)
    expect(page.locator("#model option", has_text="plain")).to_be_attached()
    return page


def give_key(page: Page, key: str) -> None:
    page.locator("#api-key").fill(key)
    page.locator("#keys-dialog").get_by_role("button", name="Use").click()


def steer(page: Page, **fields: Any) -> None:
    """Sends `fields` with every question too; answers do not end by themselves."""
    page.unroute_all()
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data=json.dumps({"ignore_eos": True, **route.request.post_data_json, **fields})
        ),
    )


def speak(page: Page, text: str) -> None:
    """Has the model answer exactly this text."""
    pattern = re.sub(r"[\\.^$|?*+()\[\]{}]", r"\\\g<0>", text)
    steer(page, guided_regex=pattern, ignore_eos=False)


def say(page: Page, text: str) -> dict[str, Any]:
    """Writes a message, and returns the body that the page sent."""
    page.get_by_label("Message", exact=True).fill(text)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_label("Message", exact=True).press("Enter")
    body: dict[str, Any] = sent.value.post_data_json
    return body


def answers(page: Page) -> Locator:
    return page.locator(".said.assistant")


def answered(page: Page, number: int) -> str:
    """Waits for the end of the last of `number` answers; its text."""
    expect(answers(page)).to_have_count(number)
    last = answers(page).last
    expect(last).not_to_have_attribute("aria-busy", "true", timeout=60_000)
    expect(last.locator(".problem")).to_be_empty()
    expect(last.locator(".facts summary")).to_contain_text("tokens")
    return str(last.locator(".text").inner_text())


def choose(page: Page, **settings: str) -> None:
    page.get_by_role("button", name=re.compile("^Settings")).click()
    for name, value in settings.items():
        page.locator(f"#set-{name}").fill(value)
    page.locator("#settings-dialog").get_by_role("button", name="Use").click()


def roles(body: dict[str, Any]) -> list[str]:
    return [message["role"] for message in body["messages"]]


def serious(page: Page, axe: str) -> list[Any]:
    # in the debugger's world, where the page's policy does not hold
    page.evaluate(axe)
    found = page.evaluate("axe.run().then((results) => results.violations)")
    return [
        (item["id"], [node["html"] for node in item["nodes"]][:3])
        for item in found
        if item["impact"] in ("serious", "critical")
    ]


def test_a_conversation_of_ten_turns(chat_server: Served, new_page: NewPage) -> None:
    for address in (f"{chat_server.url}/\n", f"{chat_server.url}/dashboard\n"):
        assert address in chat_server.out()
    page = new_page(chat_server, path="/")
    steer(page)
    expect(page.locator("#notice")).to_contain_text("asks for an API key")
    page.get_by_role("button", name="Give a key").click()
    give_key(page, "key-of-nobody")
    expect(page.locator("#notice")).to_contain_text("The API key was not accepted")
    # 1: a wrong key, then the right one: the question is asked again by itself
    choose(page, max_tokens="6")
    say(page, "one")
    expect(page.locator("#keys-dialog")).to_be_visible()
    expect(page.locator(".problem")).to_contain_text("The API key was not accepted")
    give_key(page, KEY)
    answered(page, 1)
    expect(page.locator("#notice")).to_be_hidden()
    # 2: with settings
    page.get_by_label("Model or expert").select_option("plain")
    choose(page, system="Be brief.", seed="7", temperature="0.5", top_p="0.9")
    sent = say(page, "two")
    assert roles(sent) == ["system", "user", "assistant", "user"]
    given = {name: sent[name] for name in ("model", "max_tokens", "seed", "temperature", "top_p")}
    assert given == {
        "model": "plain", "max_tokens": 6, "seed": 7, "temperature": 0.5, "top_p": 0.9,
    }  # fmt: skip
    answered(page, 2)
    expect(answers(page).last).to_contain_text("cut at the token limit")
    # 3 and 4: stopped with the button, and with the keyboard
    choose(page, max_tokens="")
    say(page, "three")
    expect(answers(page).last.locator(".text")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(answers(page).last).to_contain_text("stopped")
    say(page, "four")
    expect(answers(page).last.locator(".text")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(answers(page).last).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    # 5: what was said until then counts
    choose(page, max_tokens="6")
    assert roles(say(page, "five"))[1:] == ["user", "assistant"] * 4 + ["user"]
    answered(page, 5)
    # 6: edited, and what came after it is dropped
    page.locator(".said.user").nth(4).get_by_role("button", name="Edit").click()
    page.get_by_label("Your message").fill("five, but better")
    page.get_by_role("button", name="Send again").click()
    answered(page, 5)
    expect(page.locator(".said.user .text").last).to_have_text("five, but better")
    text = answers(page).locator(".text").all_inner_texts()
    # 7: after a reload all is there, with its receipts
    page.reload()
    expect(answers(page)).to_have_count(5)
    assert answers(page).locator(".text").all_inner_texts() == text
    steer(page)
    page.locator(".facts summary").last.click()
    expect(page.locator(".receipt")).to_contain_text("answered by")
    sent = say(page, "seven")
    assert sent["seed"] == 7 and len(roles(sent)) == 12
    first = answered(page, 6)
    # 8: once more; the same seed gives the same words
    answers(page).last.get_by_role("button", name="Try again").click()
    assert answered(page, 6) == first
    # 9: the worker is killed in the middle of an answer, which is what it would have been
    choose(page, max_tokens="500")
    sent = say(page, "nine")
    expect(answers(page).last.locator(".text")).not_to_be_empty()
    assert chat_server.kill_workers() == 2
    got = answered(page, 7)
    body = {**sent, "stream": False, "ignore_eos": True}
    reply = chat_server.post("/v1/chat/completions", body, authorization=f"Bearer {KEY}")
    stored = "localStorage.getItem('coterie.conversation.' + location.hash.slice(1))"
    kept = json.loads(page.evaluate(stored))["messages"][-1]["content"]
    assert got and kept == reply.json["choices"][0]["message"]["content"]
    # 10
    choose(page, max_tokens="6")
    say(page, "ten")
    answered(page, 8)
    assert KEY not in page.evaluate(
        "JSON.stringify([localStorage, document.cookie, location.href])"
    )


def test_hostile_text_stays_text(chat_server: Served, new_page: NewPage, axe: str) -> None:
    page = chat_page(new_page, chat_server, width=390, height=844, color_scheme="dark")
    page.get_by_label("Model or expert").select_option("plain")
    speak(page, HOSTILE)
    say(page, HOSTILE)
    shown = answered(page, 1)
    for text in (
        '<img src=x onerror="window.hacked=1">', "[press](javascript:window.hacked=1)",
        "[press](JaVaScRiPt:window.hacked=1)", "<svg onload=window.hacked=1>", "<b>a</b>",
        "[x](vbscript:window.hacked=1)", "<script>window.hacked=1</script>",
        "[data](data:text/html,<script>window.hacked=1</script>)",
    ):  # fmt: skip
        assert text in shown, text
    assert HOSTILE.strip() in page.locator(".said.user .text").inner_text()
    links = page.locator(".markdown a").evaluate_all(
        "(all) => all.map((node) => [node.protocol, node.rel, node.target, node.textContent])"
    )
    assert links == [
        ["https:", "noopener noreferrer nofollow", "_blank", "look"],
        ["https:", "noopener noreferrer nofollow", "_blank", "https://elsewhere.example/a"],
    ]
    assert page.locator("main img, main script, main iframe, .markdown svg").count() == 0
    attributes = page.locator(".markdown *").evaluate_all(
        "(all) => all.flatMap((node) => node.getAttributeNames())"
    )
    assert set(attributes) <= {
        "class", "href", "rel", "target", "title", "tabindex", "role", "aria-label", "scope",
        "type",
    }  # fmt: skip
    assert page.evaluate("window.hacked") is None
    # what the policy is for: even a script that got in would not run
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'),"
        " {textContent: 'window.hacked = 2'}))"
    )
    assert page.evaluate("window.hacked") is None
    assert not page.evaluate(WIDEST), page.evaluate(WIDEST)
    assert not serious(page, axe)


# markdown -> its elements; a link is written as LINK, and frames around code and tables left out
CASES = [
    (
        "a **b** *c* ~~d~~ `e*f`",
        "<p>a <strong>b</strong> <em>c</em> <del>d</del> <code>e*f</code></p>",
    ),
    (
        "***both*** snake_case_name 2 * 3 * 4",
        "<p><strong><em>both</em></strong> snake_case_name 2 * 3 * 4</p>",
    ),
    ("**open and *shut* and `code", "<p>**open and <em>shut</em> and `code</p>"),
    (r"\*no\* \[no](https://a.b)", "<p>*no* [no](LINK)</p>"),
    (
        "# One #\n## Two\nText\n===\n#no",
        "<h3>One</h3><h4>Two</h4><h3>Text</h3><p>#no</p>",
    ),
    (
        "- a\n- b\n  - c\n\n    d\n- e",
        "<ul><li>a</li><li>b<ul><li>c<p>d</p></li></ul></li><li>e</li></ul>",
    ),
    ("3. x\n4. y\n   more", '<ol start="3"><li>x</li><li>y\nmore</li></ol>'),
    (
        "1986. A year\nand 1987. Another",
        '<ol start="1986"><li>A year\nand 1987. Another</li></ol>',
    ),
    (
        "> a\n> > b\n\n---",
        "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><hr>",
    ),
    (
        "| a | b |\n|---|--:|\n| `x|y` | 1 \\| 2 |\nend",
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr>"
        "<td><code>x|y</code></td><td>1 | 2</td></tr></tbody></table><p>end</p>",
    ),
    (
        "```py\na < b\n\n  c\n```\nafter",
        "<pre><code>a &lt; b\n\n  c</code></pre><p>after</p>",
    ),
    ("````\n```\n````", "<pre><code>```</code></pre>"),
    ("~~~\nopen", "<pre><code>open</code></pre>"),
    ("    x = 1\n\n      y\nz", "<pre><code>x = 1\n\n  y</code></pre><p>z</p>"),
    ('[a *b*](https://x.y/z_(1) "t") (see http://x.y/z_(1)).', "<p>LINK (see LINK).</p>"),
    (
        "[a](ftp://x.y) [b](//x.y) [c](/v1/models) <https://x.y>",
        "<p>[a](ftp://x.y) [b](//x.y) [c](/v1/models) LINK</p>",
    ),
    ("a\n    b", "<p>a\n    b</p>"),
]
SHAPE = """async (text) => {
  const { markdown } = await import('/chat/markdown.js');
  const node = markdown(text);
  for (const link of node.querySelectorAll('a')) link.replaceWith('LINK');
  for (const head of node.querySelectorAll('.code-head')) head.remove();
  for (const frame of node.querySelectorAll('.code, .wide')) frame.replaceWith(...frame.childNodes);
  for (const one of node.querySelectorAll('*'))
    for (const name of one.getAttributeNames()) if (name !== 'start') one.removeAttribute(name);
  return node.innerHTML;
}"""


def test_markdown(chat_server: Served, new_page: NewPage) -> None:
    page = chat_page(new_page, chat_server)
    for text, wanted in CASES:
        assert page.evaluate(SHAPE, text) == wanted, text


@pytest.mark.full
def test_markdown_that_grows_is_what_it_is_at_once(chat_server: Served, new_page: NewPage) -> None:
    page = chat_page(new_page, chat_server)
    text = HOSTILE + "\n\n".join(text for text, _ in CASES)
    differs = page.evaluate(
        """async (text) => {
          const { MarkdownView, markdown } = await import('/chat/markdown.js');
          const node = document.createElement('div');
          const view = new MarkdownView(node);
          for (let size = 1; size <= text.length; size += 1) {
            const part = text.slice(0, size);
            view.show(part);
            if (node.innerHTML !== markdown(part).innerHTML) return size;
          }
          return 0;
        }""",
        text,
    )
    assert differs == 0, text[:differs]


@pytest.mark.full
@pytest.mark.parametrize(
    "unit",
    ["*a _b ", "[", "[a](", "![x]((", "`a ``b ", "> ", "- ", "1. ", "| a ", "<h", "https://a.b/(",
     "~~", "\\", "&#x", "a|b\n-|-\n", "```x`\n", " \n", "#", "\t- a\n", "* * ", "__a**"],
)  # fmt: skip
def test_no_text_takes_long_to_draw(chat_server: Served, new_page: NewPage, unit: str) -> None:
    """Twice the text takes about twice the time."""
    page = chat_page(new_page, chat_server)
    script = """async ([unit, size]) => {
      const { markdown } = await import('/chat/markdown.js');
      const begun = performance.now();
      markdown(unit.repeat(size / unit.length));
      return performance.now() - begun;
    }"""
    page.evaluate(script, [unit, 10_000])
    once = min(page.evaluate(script, [unit, 20_000]) for _ in range(3))
    longer = min(page.evaluate(script, [unit, 80_000]) for _ in range(3))
    # a square would be sixteen times; small times are not measured well
    assert longer < 10 * max(once, 20), (once, longer)


@pytest.mark.full
def test_conversations_are_kept_apart(chat_server: Served, new_page: NewPage) -> None:
    page = chat_page(new_page, chat_server)
    steer(page, max_tokens=3, model="plain")
    say(page, "about ships")
    answered(page, 1)
    page.get_by_role("button", name="New conversation").click()
    expect(answers(page)).to_have_count(0)
    sent = say(page, "about trees\nof all kinds")
    assert roles(sent) == ["user"]
    answered(page, 1)
    titles = page.locator("#conversations .pick")
    expect(titles).to_have_text(["about trees", "about ships"])
    titles.last.click()
    expect(page.locator("h1")).to_have_text("about ships")
    expect(page.locator(".said.user .text")).to_have_text("about ships")
    page.get_by_text("More", exact=True).click()
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Title").fill("<b>boats</b>")
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["about trees", "<b>boats</b>"])
    # another tab of this browser sees it, and follows what is said here
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("h1")).to_have_text("<b>boats</b>")
    expect(other.locator("#notice")).to_contain_text("asks for an API key")
    say(page, "and more")
    said = answered(page, 2)
    expect(answers(other)).to_have_count(2)
    expect(answers(other).last.locator(".text")).to_have_text(said)
    page.go_back()
    expect(page.locator("h1")).to_have_text("about trees")
    page.get_by_text("More", exact=True).click()
    page.get_by_role("button", name="Delete…", exact=True).click()
    page.locator("#question-dialog").get_by_role("button", name="Cancel").click()
    expect(titles).to_have_count(2)
    page.get_by_text("More", exact=True).click()
    page.get_by_role("button", name="Delete…", exact=True).click()
    page.locator("#question-yes").click()
    expect(titles).to_have_text(["<b>boats</b>"])
    expect(other.locator("#conversations .pick")).to_have_count(1)
    page.get_by_role("button", name="Delete all").click()
    page.locator("#question-yes").click()
    expect(titles).to_have_count(0)
    left = page.evaluate(
        "Object.keys(localStorage).filter((name) => name.includes('conversation'))"
    )
    assert left == []
    expect(other.locator("#conversations .pick")).to_have_count(0)


@pytest.mark.full
def test_an_answer_that_arrives_when_another_conversation_is_shown(
    chat_server: Served, new_page: NewPage
) -> None:
    page = chat_page(new_page, chat_server)
    steer(page, max_tokens=400, model="plain")
    say(page, "long")
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    steer(page, max_tokens=2, model="plain")
    say(page, "short")
    answered(page, 1)
    page.get_by_role("button", name="long", exact=True).click()
    answered(page, 1)
    expect(page.locator(".said.user .text")).to_have_text("long")


@pytest.mark.full
def test_a_reload_in_the_middle_keeps_what_had_arrived(
    chat_server: Served, new_page: NewPage
) -> None:
    page = chat_page(new_page, chat_server)
    steer(page, model="plain")
    say(page, "a long story")
    expect(answers(page).last.locator(".text")).not_to_be_empty()
    page.reload()
    expect(answers(page)).to_have_count(1)
    expect(answers(page).last).to_contain_text("stopped")
    expect(answers(page).last.locator(".text")).not_to_be_empty()


@pytest.mark.full
def test_reasoning_is_folded(chat_server: Served, new_page: NewPage) -> None:
    page = chat_page(new_page, chat_server)
    page.get_by_label("Model or expert").select_option("thinker")
    choose(page, max_tokens="12")
    say(page, "think")
    answered(page, 1)
    thought = page.locator(".thought")
    expect(thought.locator("summary")).to_contain_text("Reasoning, ")
    expect(thought.locator(".thought-text")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator(".thought-text")).not_to_be_empty()
    # a thought alone is no answer: it is not sent again
    assert roles(say(page, "more")) == ["user"]


@pytest.mark.full
def test_calls_of_tools_are_shown_and_answered(chat_server: Served, new_page: NewPage) -> None:
    page = chat_page(new_page, chat_server)
    page.get_by_label("Model or expert").select_option("plain")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools, as OpenAI").fill("{")
    page.locator("#settings-dialog").get_by_role("button", name="Use").click()
    expect(page.locator("#settings-fault")).to_contain_text("Tools must be JSON")
    page.get_by_label("Tools, as OpenAI").fill(json.dumps([WEATHER]))
    page.locator("#settings-dialog").get_by_role("button", name="Use").click()
    steer(page, tool_choice="required", ignore_eos=False)
    assert say(page, "Weather in Paris?")["tools"] == [WEATHER]
    expect(page.locator(".call")).to_contain_text("Call of weather")
    expect(page.locator(".call pre")).to_contain_text('"city"')
    page.get_by_label("Result of weather").fill("sunny")
    steer(page, max_tokens=4, tool_choice="none")
    with page.expect_request("**/v1/chat/completions") as request:
        page.get_by_role("button", name="Send results").click()
    sent = request.value.post_data_json["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[2]["content"] == "sunny" and sent[2]["tool_call_id"]
    assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"]
    answered(page, 2)
    expect(page.locator(".call").first).to_contain_text("sunny")


@pytest.mark.full
def test_a_conversation_is_exported(chat_server: Served, new_page: NewPage, tmp_path: Path) -> None:
    page = chat_page(new_page, chat_server)
    page.get_by_label("Model or expert").select_option("plain")
    choose(page, system="Be brief.", max_tokens="8")
    say(page, "About ships & trees")
    answered(page, 1)
    files = {}
    for kind in ("JSON", "Markdown"):
        page.get_by_text("More", exact=True).click()
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Export as {kind}").click()
        files[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[kind])
    assert files["JSON"].name == "about-ships-trees.json"
    kept = json.loads(files["JSON"].read_text())
    question, answer = kept["messages"]
    assert question["content"] == "About ships & trees" and kept["settings"]["max_tokens"] == "8"
    assert answer["facts"]["completion_tokens"] == 8 and answer["receipt"]
    text = files["Markdown"].read_text()
    assert text.startswith("# About ships & trees\n\n## System prompt\n\nBe brief.\n\n## You\n\n")
    assert "## plain\n" in text and answer["content"] in text
    assert KEY not in files["JSON"].read_text() + text


@pytest.mark.full
def test_a_refusal_says_when_to_come_again(chat_server: Served, new_page: NewPage) -> None:
    page = chat_page(new_page, chat_server, key=LIMITED)
    steer(page, max_tokens=2, model="plain")
    say(page, "one")
    answered(page, 1)
    say(page, "two")
    problem = page.locator(".problem").last
    expect(problem.get_by_role("alert")).to_contain_text("requests")
    expect(problem).to_contain_text(re.compile(r"The server asks to wait \d+ s"))
    expect(problem.get_by_role("button", name="Try again")).to_be_visible()
    # the question that got no answer is not sent with the next one
    assert roles(say(page, "three")) == ["user", "assistant", "user"]


@pytest.mark.full
def test_a_conversation_longer_than_the_context(
    chat_server: Served, new_page: NewPage, axe: str
) -> None:
    page = chat_page(new_page, chat_server)
    page.get_by_label("Model or expert").select_option("thinker")
    steer(page, max_tokens=4, chat_template_kwargs={"enable_thinking": False})
    leave = page.get_by_role("button", name="Leave out older messages")
    for _ in range(12):
        say(page, "many words " * 8)
        expect(page.locator(".said[aria-busy]")).to_have_count(0, timeout=30_000)
        if leave.is_visible():
            break
    with page.expect_request("**/v1/chat/completions") as request:
        leave.click()
    shown = page.locator(".said.user").count()
    sent = request.value.post_data_json
    assert roles(sent).count("user") < shown and roles(sent)[0] == "user"
    marks = page.get_by_text("Not sent any more")
    expect(marks.first).to_be_visible()
    expect(marks.last).to_be_hidden()
    expect(page.locator(".said[aria-busy]")).to_have_count(0, timeout=30_000)
    assert not serious(page, axe)
    # one message alone may be too long
    page.get_by_role("button", name="New conversation").click()
    say(page, "many words " * 200)
    expect(page.locator(".problem")).to_contain_text("maximum context length")
    leave.click()
    expect(page.locator(".problem")).to_contain_text("The last message alone is longer")


@pytest.mark.full
def test_a_server_that_goes_and_comes(new_page: NewPage, tmp_path: Path) -> None:
    home = own_home(tmp_path / "home")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    model = str(tiny_checkpoint("llama", max_position_embeddings=8192))
    arguments = (model, "--name", "plain", "--port", port)
    first = Served(*arguments, COTERIE_HOME=str(home))
    try:
        page = chat_page(new_page, first, key="")
        steer(page)
        say(page, "a long story")
        expect(answers(page).last.locator(".text")).not_to_be_empty()
        first.process.kill()
        expect(page.locator(".problem")).to_contain_text("The connection was lost in the middle")
        expect(answers(page).last.locator(".text")).not_to_be_empty()
    finally:
        first.process.wait(60)
    say(page, "are you there?")
    expect(page.locator(".problem").last).to_contain_text("There is no connection to the server")
    second = Served(*arguments, wait_ready=False, COTERIE_HOME=str(home))
    try:
        page.reload()
        expect(page.locator("#model option", has_text="plain")).to_be_attached(timeout=60_000)
        expect(page.locator("#notice")).to_be_hidden()
        steer(page, max_tokens=4)
        answers(page).last.get_by_role("button", name="Try again").click()
        answered(page, 2)
    finally:
        page.close()
        second.stop()


@pytest.mark.full
@pytest.mark.parametrize("width", [320, 390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    chat_server: Served, new_page: NewPage, axe: str, width: int, scheme: str
) -> None:
    page = chat_page(new_page, chat_server, width=width, height=800, color_scheme=scheme)
    assert not serious(page, axe)
    page.get_by_label("Model or expert").select_option("plain")
    text = "\n\n".join(text for text, _ in CASES)
    speak(page, text)
    say(page, "everything")
    answered(page, 1)
    page.locator(".facts summary").last.click()
    expect(page.locator(".receipt")).to_be_visible()
    steer(page, temperature=-1)
    say(page, "wrong")
    expect(page.locator(".problem .fault")).to_be_visible()
    assert not serious(page, axe)
    assert not page.evaluate(WIDEST), page.evaluate(WIDEST)
    opens = ["Settings", "API key"] if width > 760 else ["Settings"]
    for name in opens:
        page.get_by_role("button", name=name).click()
        assert not serious(page, axe)
        page.keyboard.press("Escape")
    page.locator("#menu summary").click()
    assert not serious(page, axe)
    page.keyboard.press("Escape")
    if width < 760:
        page.get_by_role("button", name="Conversations").click()
        assert not serious(page, axe)
        assert not page.evaluate(WIDEST), page.evaluate(WIDEST)


@pytest.mark.full
def test_the_keyboard_is_enough(chat_server: Served, new_page: NewPage) -> None:
    page = chat_page(new_page, chat_server)
    steer(page, max_tokens=3, model="plain")
    active = "document.activeElement.id"
    assert page.evaluate(active) == "text"
    page.keyboard.type("one line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("another")
    page.keyboard.press("Enter")
    answered(page, 1)
    expect(page.locator(".said.user .text")).to_have_text("one line\nanother")
    assert page.evaluate(active) == "text"
    page.locator(".skip").focus()
    seen = ["skip"]
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(
            "document.activeElement.id || document.activeElement.textContent.trim()"
        ))  # fmt: skip
        if seen[-1] == "send":
            break
    order = ["skip", "new", "keys", "settings", "log", "text", "model", "send"]
    places = [seen.index(name) for name in order]
    assert places == sorted(places), seen
    assert {"Edit", "Copy", "Try again"} <= set(seen)
    # an edit is left with Escape, and the focus goes back
    page.get_by_role("button", name="Edit").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Your message"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == "Edit"


@pytest.mark.full
def test_what_is_copied(chat_server: Served, new_page: NewPage) -> None:
    page = chat_page(new_page, chat_server, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_label("Model or expert").select_option("plain")
    speak(page, "See:\n```py\nx = 1\n```")
    say(page, "code")
    answered(page, 1)
    page.get_by_role("button", name="Copy code").click()
    expect(page.locator(".code button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"
    # as over plain HTTP from another machine
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.get_by_role("button", name="Copy answer").click()
    expect(page.get_by_role("button", name="Copy answer")).to_have_text("Copied")


@pytest.mark.full
def test_a_browser_that_keeps_nothing(chat_server: Served, new_page: NewPage) -> None:
    page = chat_page(new_page, chat_server)
    steer(page, max_tokens=2, model="plain")
    page.evaluate("localStorage.setItem('filler', 'x'.repeat(5 * 1024 * 1024 - 200))")
    say(page, "hello " * 50)
    answered(page, 1)
    expect(page.locator("#notice")).to_contain_text("storage is full")
    page.evaluate("localStorage.removeItem('filler')")
    say(page, "and now")
    answered(page, 2)
    expect(page.locator("#notice")).to_be_hidden()


@pytest.mark.full
def test_the_pages_lead_to_each_other(chat_server: Served, new_page: NewPage) -> None:
    page = chat_page(new_page, chat_server)
    page.get_by_role("link", name="Dashboard").click()
    expect(page.locator("#specialists-body tbody tr").first).to_be_visible()
    page.get_by_role("link", name="Chat").click()
    expect(page.get_by_label("Message", exact=True)).to_be_visible()
    expect(page).to_have_url(chat_server.url + "/")
