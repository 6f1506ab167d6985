"""Markdown of answers: elements made of it, and nothing else that somebody could want to make of it."""

import json

import pytest
from steps import CHAT, HOSTILE, answers, ask, set_options, stream

# Elements by name with what is in them, text as it is; what the page adds (the bar above code) left out.
OUTLINE = """(() => {
  const outline = (node) => (node.nodeType === Node.TEXT_NODE ? node.data : node.matches('.over') ? '' : 
    `<${node.localName}${node.href ? ` ${node.href}` : ''}>${[...node.childNodes].map(outline).join('')}</>`);
  return [...[...document.querySelectorAll('.answer .text')].at(-1).childNodes].map(outline).join('');
})()"""


@pytest.fixture(scope="module")
def kept(keep_page):
    return keep_page()


@pytest.fixture
def fresh(kept):
    """A new conversation on a page that all of these share."""
    kept.click("#fresh")
    return kept


def shown(page, *pieces):
    page.answer(*stream(*pieces))
    ask(page, "Say something")
    return page.eval(OUTLINE)


# What GitHub shows of these, but for the level of headings, the end of a line, and pictures.
CASES = {
    "One\ntwo\n\nthree": "<p>One\ntwo</><p>three</>",
    "# A `b`\n### c ###": "<h4>A <code>b</></><h6>c</>",
    "**a *b* c** and *d **e** f*": "<p><strong>a <em>b</> c</> and <em>d <strong>e</> f</></>",
    "***a*** __b__ _c_ ~~d~~": "<p><strong><em>a</></> <strong>b</> <em>c</> <del>d</></>",
    "2 * 3 * 4, a_b_c, ** x ** and \\*y\\*": "<p>2 * 3 * 4, a_b_c, ** x ** and *y*</>",
    "``a ` b`` and `**c**`": "<p><code>a ` b</> and <code>**c**</></>",
    "- a\n- b\n  - c\n\n  d\n- e": "<ul><li>a</><li>b<ul><li>c</></><p>d</></><li>e</></>",
    "3. a\n4. b\n\n- c": "<ol><li>a</><li>b</></><ul><li>c</></>",
    "```py\nif a < b:\n\n  # c\n```\nd": "<div><pre><code>if a < b:\n\n  # c</></></><p>d</>",
    "1. a\n   ```\n   b\n   ```\n2. c": "<ol><li>a<div><pre><code>b</></></></><li>c</></>",
    "~~~\n```\n# a": "<div><pre><code>```\n# a</></></>",
    "> a\n> > b\n\nc": "<blockquote><p>a</><blockquote><p>b</></></><p>c</>",
    "a\n\n***\n\n- - -": "<p>a</><hr></><hr></>",
    "| a | b |\n|---|--:|\n| **c** | d \\| e |\n| f |": "<div><table><thead><tr><th>a</><th>b</></></>"
    "<tbody><tr><td><strong>c</></><td>d | e</></><tr><td>f</><td></></></></></>",
    "[a *b*](https://c.example/d_(e) \"f\").": "<p><a https://c.example/d_(e)>a <em>b</></>.</>",
    "See https://a.example/b_c, or <http://d.example/>.": "<p>See <a https://a.example/b_c>https://a.example/b_c</>, "
    "or <a http://d.example/>http://d.example/</>.</>",
    "![a picture](https://a.example/b.png)": "<p><a https://a.example/b.png>a picture</></>",
    "a | b\nc": "<p>a | b\nc</>",
    "```": "<div><pre><code></></></>",
}


@pytest.mark.parametrize("source", CASES)
def test_markdown_is_shown_as_what_it_means(fresh, source):
    assert shown(fresh, source) == CASES[source]


def test_token_by_token_it_becomes_what_it_is_at_once(open_page):
    page = open_page()
    text = "\n\n".join(CASES)
    at_once = shown(page, text)
    assert shown(page, *text) == at_once


def test_links_lead_to_the_web_and_take_nothing_along(page):
    shown(page, "[a](https://a.example/)")
    link = page.eval("(() => { const { rel, target, title } = document.querySelector('.answer .text a'); return [rel, target, title]; })()")
    assert link == ["noopener noreferrer nofollow", "_blank", "https://a.example/"]


ATTACKS = [
    HOSTILE,
    "[a](javascript:window.hacked=1)", "[a](JaVaScRiPt:window.hacked=1)", "[a]( javascript:window.hacked=1)",
    "[a](java\tscript:window.hacked=1)", "<javascript:window.hacked=1>", "[a](data:text/html,<script>window.hacked=1</script>)",
    "[a](vbscript:x)", "[a](//a.example)", "[a](/v1/models)", "[a](https:window.hacked)", "[a](https://)", "[a](blob:https://a.example/x)",
    '[a](https://a.example/"onmouseover="window.hacked=1)', '[a](https://a.example "\\" onclick=\\"window.hacked=1")',
    "![a](https://a.example/x.png)", "![a](x\" onerror=\"window.hacked=1)", "<https://a.example/><img src=x onerror=window.hacked=1>",
    "```\"><img src=x onerror=window.hacked=1>\n</code></pre><script>window.hacked=1</script>\n```",
    "| <img src=x onerror=window.hacked=1> | b |\n|---|---|\n| <svg onload=window.hacked=1> | `<b>` |",
    "# <iframe src=javascript:window.hacked=1>", "> <form action=/v1/unload_lora_adapter><button>x</button></form>",
    "- <style>*{display:none}</style>", "[<img src=x onerror=window.hacked=1>](https://a.example)",
    "[a]: javascript:window.hacked=1\n\n[a]", "&lt;img src=x onerror=window.hacked=1&gt;", "<!-- --><object data=x>",
]
ALLOWED = {
    "a": ["href", "rel", "target", "title"], "blockquote": [], "button": ["class", "type"], "code": [], "del": [],
    "div": ["class", "tabindex"], "em": [], "h4": [], "h5": [], "h6": [], "hr": [], "li": [], "ol": ["start"], "p": [],
    "pre": ["tabindex"], "span": ["class"], "strong": [], "table": [], "tbody": [], "td": ["class"], "th": ["class"],
    "thead": [], "tr": [], "ul": [],
}


def test_nothing_that_a_model_says_becomes_anything_but_text_and_links(page):
    shown(page, "\n\n".join(ATTACKS))
    found = page.eval(
        "[...document.querySelectorAll('.answer .text *')].map((node) => [node.localName, node.getAttributeNames(), node.href ?? ''])")
    assert len(found) > len(ATTACKS)
    for name, attributes, href in found:
        assert set(attributes) <= set(ALLOWED[name]), (name, attributes)
        assert name != "a" or href.startswith("https://a.example"), href
    text = page.eval("document.querySelector('.answer .text').textContent")
    for attack in (HOSTILE, "[a](javascript:window.hacked=1)", "[a](//a.example)", "<svg onload=window.hacked=1>"):
        assert attack in text
    page.wait(0.3)
    assert page.eval("window.hacked") is None
    assert not [request for request in page.requests if "a.example" in request.url]
    assert page.complaints == []


@pytest.mark.parametrize("text", [
    "*" * 30_000 + "a", "`" * 30_000, "[" * 30_000, "**a " * 8_000, "[a](" * 8_000, "> " * 8_000, "- " * 8_000 + "a", "|" * 30_000,
    "```" + " " * 30_000 + "`", "#" + " " * 30_000 + "x", "\n".join(" " * depth + "- a" for depth in range(300)),
    "| a |\n|" + "-|" * 8_000, "_a" * 15_000, "https://" * 4_000, "a\n" * 15_000,
], ids=lambda text: repr(text[:6]))
def test_text_that_was_made_to_take_long_is_shown(fresh, text):
    fresh.answer(*stream(text[: len(text) // 2], text[len(text) // 2 :]))
    ask(fresh, "Say something")
    assert fresh.eval("document.querySelector('.answer .text').childNodes.length") > 0


def test_what_was_said_can_be_seen_and_copied_as_it_was_written(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = "# A *b*\n\n- c  \n```\nd\n```\n\n"
    shown(page, text)
    page.click(".acts button:has-text('copy')")
    page.until("document.querySelector('.acts').innerText.includes('copied')")
    assert page.eval("navigator.clipboard.readText()") == text
    page.click(".code button")
    page.until("document.querySelector('.code').innerText.includes('copied')")
    assert page.eval("navigator.clipboard.readText()") == "d"
    page.click("#settings summary")
    page.click("#markdown")
    assert answers(page)[0]["text"] == text
    page.click("#markdown")
    assert page.eval("document.querySelector('.answer .text h4').textContent") == "A b"


def test_a_conversation_goes_on_with_what_was_written_and_not_with_what_is_shown(page):
    set_options(page, temperature=0)
    shown(page, "**a**\n\n* b")
    ask(page, "And then?")
    bodies = [request.post_data_json for request in page.requests if request.url.endswith(CHAT)]
    assert json.dumps("**a**\n\n* b") in json.dumps(bodies[1]["messages"])
