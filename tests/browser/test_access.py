"""For everybody: contrast, names, sizes, the order of the focus, and colours that can be chosen.

The rules are those of WCAG 2.2 (AA) that can be looked up in a page, as axe looks them up.
"""

import pytest
from steps import (
    MODELS_SHOWN, adapter, answers, ask, job, look, refusal, status, stream, table, training,
)

VIEWS = ["chat", "compare", "residency", "training"]

# WCAG 1.4.3: what is read has 4.5 to 1 against what is behind it, large text 3 to 1. 1.4.11: so have edges of fields,
# and what plots are drawn with.
CONTRAST = r"""(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const colour = (text) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const luminance = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const ratio = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const chain = (node) => (node ? [...chain(node.parentElement), node] : []);
  const behind = (node) => chain(node).reduce((back, part) => over(colour(getComputedStyle(part).backgroundColor), back),
    [255, 255, 255, 1]);
  const dimmed = (text, node) => { const [r, g, b, a] = colour(text);
    return [r, g, b, chain(node).reduce((alpha, part) => alpha * Number(getComputedStyle(part).opacity), a)]; };
  const bad = [];
  const check = (node, what, text, back, least) => {
    const found = ratio(over(dimmed(text, node), back), back);
    if (found < least) bad.push(`${what} ${found.toFixed(2)} of ${least}: ${node.outerHTML.slice(0, 90)}`);
  };
  const isShown = (node) => node.checkVisibility({ visibilityProperty: true }) && !node.closest('.unseen, .skip, :disabled');
  let looked = 0;
  for (const node of document.querySelectorAll('body *')) {
    if (!isShown(node)) continue;
    const style = getComputedStyle(node);
    const reads = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
    const size = Number.parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    if (reads || node.matches('input, textarea, select')) { looked += 1; check(node, 'text', style.color, behind(node), least); }
    if (node.placeholder && !node.value) check(node, 'placeholder', getComputedStyle(node, '::placeholder').color, behind(node), least);
    if (node.matches('input:not([type=checkbox]), textarea, select, .button:not(.first)')) {
      check(node, 'edge', style.borderTopColor, behind(node.parentElement), 3);
    }
    if (node.matches('.frame path.line')) check(node, 'line', style.stroke, behind(node.closest('.plot')), 3);
    if (node.matches('.frame path.area')) check(node, 'area', style.fill, behind(node.closest('.plot')), 3);
    if (node.matches('.dot')) check(node, 'dot', style.backgroundColor, behind(node.parentElement), 3);
  }
  return [looked, bad];
})()"""

# WCAG 4.1.2, 1.3.1, 2.4.6, 2.5.8 and good sense: names that are there once, references that lead somewhere, headings
# without a gap, things to press that are 24 pixels high and wide, or are words in a text.
STRUCTURE = r"""(() => {
  const isShown = (node) => node.checkVisibility({ visibilityProperty: true });
  const bad = [];
  const ids = [...document.querySelectorAll('[id]')].map((node) => node.id);
  ids.filter((id, index) => ids.indexOf(id) !== index).forEach((id) => bad.push(`twice: #${id}`));
  for (const name of ['for', 'aria-labelledby', 'aria-describedby', 'aria-controls', 'aria-activedescendant']) {
    for (const node of document.querySelectorAll(`[${name}]`)) {
      node.getAttribute(name).split(' ').filter((id) => id && !document.getElementById(id))
        .forEach((id) => bad.push(`${name} leads nowhere: ${id}`));
    }
  }
  const levels = [...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].filter((node) => isShown(node) && !node.closest('.text'))
    .map((node) => Number(node.localName[1]));
  if (levels.filter((level) => level === 1).length !== 1) bad.push('there is one heading of the first level');
  for (const node of document.querySelectorAll('input, textarea, select')) {
    if (!node.labels?.length && !node.ariaLabel) bad.push(`without a label: ${node.outerHTML.slice(0, 90)}`);
  }
  for (const node of document.querySelectorAll('th')) if (!node.scope && !node.closest('.text')) bad.push(`a title of what? ${node.outerHTML}`);
  for (const node of document.querySelectorAll('button, a[href], input, select, textarea, summary, [role=option]')) {
    const box = node.getBoundingClientRect();
    if (!isShown(node) || node.closest('.skip, .text p, .text li') || (node.closest('label')?.getBoundingClientRect().height ?? 0) >= 24) continue;
    if (box.height < 23.5 || box.width < 23.5) bad.push(`${box.width} by ${box.height}: ${node.outerHTML.slice(0, 90)}`);
  }
  if (document.querySelector('[tabindex]:not([tabindex="0"], [tabindex="-1"])')) bad.push('an order of its own');
  if (!document.documentElement.lang || !document.title) bad.push('a page has a language and a title');
  for (const list of document.querySelectorAll('ul, ol')) {
    if ([...list.children].some((node) => node.localName !== 'li')) bad.push(`a list of what? ${list.outerHTML.slice(0, 90)}`);
  }
  return bad;
})()"""

EVERYTHING = "# A `b`\n\n[c](https://a.example/), *d*\n\n> e\n\n- f\n\n```py\ng\n```\n\n| h | i |\n|---|---|\n| j | k |"


def fill(open_page, view, **options):
    """A view with all in it that can be there."""
    rows = [adapter(), adapter("parrot", tenant="alice", state="failed", error="its files are gone", pinned=True)]
    metrics = "".join(f'holobiont_adapter_time_to_first_token_seconds_bucket{{adapter="base",le="{bound}"}} 9\n'
                      for bound in ("0.1", "1", "+Inf"))
    kinds = ("weights", "blocks", "adapters", "history", "workers", "clients", "drafts")
    held = {f"{kind}_bytes": 100 << 20 for kind in kinds} | {"limit_bytes": 1 << 33}
    memory = status()[2]["memory"] | {"held": held}
    given = [*training(job(), job(id="ftjob-2", status="failed", error={"message": "no"})), status(memory=memory),
             table(*rows), ("/metrics", 200, metrics)]
    page = open_page(view, answers=given, **options)
    # What breathes is paler for a moment.
    page.tab.emulate_media(reduced_motion="reduce")
    if view in ("chat", "compare"):
        page.answer(*stream(EVERYTHING))
        ask(page, "Hello")
        page.answer(*refusal(429, "queue_full", "full", {"retry-after": "600"}))
        ask(page, "Again")
    else:
        page.until("document.querySelector('.plot .line[d*=L]')")
    page.eval("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    if view == "residency":
        page.click("#add-open")
        page.until("document.querySelector('#numbers tbody tr')")
    return page


@pytest.fixture(scope="module")
def full(keep_page):
    """Views with all in them, each filled once."""
    filled = {}

    def full(view, scheme="light", width=1280):
        page = filled[view] = filled.get(view) or fill(keep_page, view)
        page.tab.emulate_media(color_scheme=scheme)
        page.tab.set_viewport_size({"width": width, "height": 800})
        # What moves has the colours it goes to.
        page.wait(0.5)
        return page
    return full


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_everything_can_be_read(full, view, scheme):
    page = full(view, scheme=scheme)
    looked, bad = page.eval(CONTRAST)
    assert bad == []
    assert looked > 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_opens_above_the_page_can_be_read(open_page, scheme):
    page = fill(open_page, "chat", scheme=scheme)
    page.wait(0.5)
    page.click("#chat [data-picker]")
    page.until("document.querySelector('#chat .panel li')")
    assert page.eval(CONTRAST)[1] == []
    page.press("Escape")
    page.eval("[...document.querySelectorAll('.acts button')].at(-1).click()")
    assert page.eval(CONTRAST)[1] == []
    page.press("Escape")
    page.eval("location.hash = '#/residency'")
    page.until("document.querySelector('.actions button')")
    page.click(".actions button:last-child")
    assert page.eval(CONTRAST)[1] == []


def test_colours_too_pale_to_read_are_found(open_page):
    page = fill(open_page, "chat")
    page.eval("document.documentElement.style.setProperty('--soft', '#999')")
    assert any("text 2." in found for found in page.eval(CONTRAST)[1])


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("view", VIEWS)
def test_everything_is_what_it_says_and_large_enough_to_press(full, view, width):
    page = full(view, width=width)
    assert page.eval(STRUCTURE) == []


@pytest.mark.parametrize("view", VIEWS)
def test_everything_that_can_be_used_has_a_name(full, view):
    page = full(view)
    usable = {"button", "textbox", "searchbox", "combobox", "spinbutton", "checkbox", "link", "meter", "image", "dialog",
              "DisclosureTriangle", "region", "form"}
    roles = page.names()
    assert [role for role, name in roles if role in usable and not name] == []
    assert sum(role in usable for role, _ in roles) > 8


# Of choices of which there is one, the chosen one; arrows go to the others.
TABBABLE = """[...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex="0"]')]
  .filter((node) => !node.disabled && (node.type !== 'radio' || node.checked) && node.checkVisibility({ visibilityProperty: true }))"""
FOCUSED = """(() => {
  const node = document.activeElement;
  const style = getComputedStyle(node);
  const box = node.getBoundingClientRect();
  const isSeen = node.matches('.skip') || box.width > 1 && box.bottom > 0 && box.top < innerHeight;
  const isMarked = style.outlineStyle !== 'none' && Number.parseFloat(style.outlineWidth) >= 2;
  return [window.tabbable.indexOf(node), isSeen, isMarked, node.outerHTML.slice(0, 90)];
})()"""


@pytest.mark.parametrize("view", VIEWS)
def test_tab_goes_through_everything_in_order_and_shows_where_it_is(full, view):
    page = full(view)
    if view == "residency":
        page.click("#pause")
    page.eval("document.activeElement.blur()")
    count = page.eval(f"(window.tabbable = {TABBABLE}).length")
    page.eval("document.body.tabIndex = -1; document.body.focus()")
    seen = []
    for _ in range(count):
        page.press("Tab")
        index, is_seen, is_marked, node = page.eval(FOCUSED)
        assert is_seen and is_marked, node
        seen.append(index)
    assert seen == list(range(count))
    assert count > 6


def test_the_keyboard_alone_is_enough(page):
    assert page.eval("document.activeElement.id") == "prompt"
    page.eval("document.querySelector('#chat [data-picker]').focus()")
    page.press("Enter")
    page.type("haiku")
    page.press("Enter")
    assert page.eval("document.activeElement.dataset.picker") == "Model"
    page.press("Enter")
    page.press("Escape")
    assert page.eval("document.activeElement.dataset.picker") == "Model"
    ask(page, "What is snow?")
    assert answers(page)[0]["model"] == "haiku"
    spoken = page.eval("document.getElementById('spoken').textContent")
    assert spoken.strip()


def test_the_content_can_be_skipped_to(open_page):
    page = open_page("residency")
    page.press("Tab")
    assert page.text(":focus") == "Skip to the content"
    page.press("Enter")
    assert page.eval("document.activeElement.id") == "main"


PAPER = "getComputedStyle(document.body).backgroundColor"


def test_colours_are_the_systems_until_others_are_chosen_which_are_kept(open_page):
    page = open_page(scheme="dark")
    dark = page.eval(PAPER)
    assert page.eval("document.getElementById('theme').ariaLabel") == "Colours: as the system's"
    page.click("#theme")
    light = page.eval(PAPER)
    assert light != dark
    look(page, "light-on-dark")
    page.tab.reload()
    page.until(MODELS_SHOWN)
    assert (page.eval(PAPER), page.eval("document.getElementById('theme').ariaLabel")) == (light, "Colours: light")
    page.click("#theme")
    assert page.eval(PAPER) == dark
    page.click("#theme")
    assert page.eval("localStorage.length") == 0
