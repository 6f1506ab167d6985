"""What an operator keeps open: plots, figures, the table of adapters and its changes, and keys."""

import pathlib
import re

import pytest
from steps import GENERATION, adapter, answers, ask, pick, refusal, set_options, status, table

ADAPTERS = ["haiku", "json", "pirate"]
ROWS = "#adapters tbody tr"
FILES = pathlib.Path(__file__).parents[2] / "examples/adapters"


@pytest.fixture
def operated(open_page):
    """The view of a server that says what is given here."""
    def operated(*answers, rows=1):
        given = (status(), table(adapter()), ("/metrics", 200, ""))
        return open_page("residency", answers=(*given, *answers),
                         until=f"document.querySelectorAll('{ROWS}').length === {rows}")
    return operated


def sent(page, path):
    return [request.post_data_json for request in page.requests if request.url.endswith(path)]


# --- Plots ------------------------------------------------------------------------------------------------------


def plots(page):
    """What each plot says to those who cannot see it."""
    return page.eval("[...document.querySelectorAll('.plot svg')].map((svg) => svg.getAttribute('aria-label'))")


def test_plots_are_live(open_page):
    page = open_page("residency", until="document.querySelectorAll('.plot .line[d*=L]').length >= 4")
    titles = [text.split(".")[0] for text in plots(page)]
    assert titles == ["Tokens per second, generated", "Tokens per second, prompts", "Requests", "Device memory by kind",
                      "Host memory by kind"]
    assert "running" in page.text("#plots") and "weights" in page.text("#plots")
    assert page.eval("document.querySelectorAll('.plot .area[d*=L]').length") >= 2
    assert page.complaints == []


def test_plots_say_what_the_server_says_with_units(operated):
    page = operated()
    page.until("document.querySelector('.plot .line[d*=L]')")
    said = plots(page)
    assert "generated: now 40, lowest 40, highest 40" in said[0]
    assert "running: now 3, lowest 3, highest 3; waiting: now 1" in said[2]
    assert "history: now 12.5 MiB" in said[3].replace("13 MiB", "12.5 MiB")
    assert said[4].split(". ")[1] == ("weights: now 100 MiB, lowest 100 MiB, highest 100 MiB; "
                                     "workers: now 24 MiB, lowest 24 MiB, highest 24 MiB")
    heights = page.eval("[...document.querySelectorAll('.heights')].map((node) => node.innerText.split('\\n'))")
    assert heights[0] == ["40", "20", "0"]
    assert heights[4] == ["128 MiB", "64 MiB", "0 B"]
    assert page.eval("document.querySelector('.ends').innerText").endswith("now")
    kinds = page.texts("#plots figure:last-child .legend li")
    assert [kind.split()[0] for kind in kinds] == ["weights", "workers"], "kinds that there are none of take no room"


def test_memory_of_several_executors_is_added_up(operated):
    (path, code, told) = status()
    memory = told.pop("memory")
    page = operated((path, code, {**told, "executors": [{"name": name, "memory": memory} for name in ("a", "b")]}))
    page.until("document.querySelector('.frame .area[d*=L]')")
    assert "weights: now 200 MiB" in plots(page)[4]


def test_what_is_under_the_pointer_is_said(operated):
    page = operated(status(tokens_per_s={"generated": 10.0, "prompt": 0.0}))
    page.until("document.querySelector('.plot .line[d*=L]')")
    page.answer(*status(tokens_per_s={"generated": 80.0, "prompt": 0.0}))
    page.until("document.querySelector('.legend b').textContent === '80'")
    box = page.tab.query_selector(".plot svg").bounding_box()
    page.tab.mouse.move(box["x"] + 1, box["y"] + 5)
    assert page.text(".legend b") == "10"
    page.tab.mouse.move(1, 1)
    assert page.text(".legend b") == "80"


def test_the_plots_are_there_as_a_table(operated):
    page = operated()
    page.click("#numbers summary")
    page.until("document.querySelectorAll('#numbers tbody tr').length > 0")
    rows = {row[0]: row[1:] for row in page.eval(
        "[...document.querySelectorAll('#numbers tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText))")}
    assert rows["Tokens per second, generated"] == ["40"] * 4
    assert rows["Host memory by kind: workers"] == ["24 MiB"] * 4


def histogram(name, *counts):
    """`counts` of first tokens up to 10 ms, 100 ms, 1 s, and in all, as the server writes them."""
    metric = "holobiont_adapter_time_to_first_token_seconds"
    lines = [f'{metric}_bucket{{adapter="{name}",le="{bound}"}} {count}'
             for bound, count in zip(("0.01", "0.1", "1", "+Inf"), counts, strict=True)]
    return "\n".join([*lines, f'{metric}_sum{{adapter="{name}"}} 1', f'{metric}_count{{adapter="{name}"}} {counts[-1]}', ""])


def first_tokens(page):
    return page.eval("[...document.querySelectorAll('.spread tbody tr')].map((row) => "
                     "[...row.cells].filter((cell) => cell.innerText).map((cell) => cell.innerText))")


def test_first_tokens_are_shown_by_adapter_those_first_that_are_asked_most(operated):
    quiet, idle = histogram("quiet", 0, 10, 10, 10), histogram("idle", 0, 0, 0, 0)
    page = operated(("/metrics", 200, quiet + histogram("busy", 0, 50, 100, 100) + idle))
    page.until("document.querySelectorAll('.spread tbody tr').length === 2")
    # Half of a bucket's are taken to be below its middle: 10 ms and half of 90; 100 ms; 100 ms and nine tenths of 900.
    assert first_tokens(page) == [["busy", "100 ms", "910 ms", "100"], ["quiet", "55 ms", "96 ms", "10"]]
    assert "since the server started" in page.text("#plots figure:nth-child(4) figcaption")
    page.answer("/metrics", 200, quiet + histogram("busy", 4, 54, 104, 104))
    page.until("document.querySelectorAll('.spread tbody tr').length === 1")
    assert first_tokens(page) == [["busy", "5 ms", "10 ms", "4"]]
    assert "in the last" in page.text("#plots figure:nth-child(4) figcaption")


def test_pause_holds_everything_still(operated):
    page = operated()
    page.click("#pause")
    page.wait(0.5)
    count = polls(page)
    page.wait(3)
    assert polls(page) == count
    page.click("#pause")
    page.until("document.querySelector('#pause[aria-pressed=false]')")
    page.wait(0.5)
    assert polls(page) > count


@pytest.mark.parametrize("look_away", ["location.hash = '#/chat'", "setHidden(true)"], ids=["view", "tab"])
def test_polling_pauses_while_nobody_looks_and_goes_on_after(open_page, look_away):
    page = open_page("residency", until=f"document.querySelectorAll('{ROWS}').length === 3")
    page.eval(
        "window.setHidden = (hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.eval(look_away)
    page.wait(0.5)
    count = polls(page)
    page.wait(3)
    assert polls(page) == count
    page.eval("location.hash = '#/residency'")
    page.eval("setHidden(false)")
    page.wait(0.5)
    assert polls(page) > count


def polls(page):
    return len([request for request in page.requests if request.url.endswith("/v1/status")])


# --- Adapters ---------------------------------------------------------------------------------------------------


def test_the_table_shows_every_adapter_and_is_sorted_by_what_is_clicked(open_page):
    page = open_page("residency", until=f"document.querySelectorAll('{ROWS}').length === 3")
    assert page.texts("#adapters tbody th") == ADAPTERS
    assert [title.split()[0] for title in page.texts("#adapters thead th")] == [
        "NAME", "GEN", "RANK", "SIZE", "TIER", "REQS", "TOK/S", "PINNED", "STATE",
    ]
    assert page.texts("#adapters tbody .state") == ["ready"] * 3
    page.click("#adapters thead th:nth-child(3) button")
    ranks = [int(rank) for rank in page.texts("#adapters tbody td:nth-child(3)")]
    assert ranks == sorted(ranks, reverse=True)
    assert page.eval("document.querySelector('th[aria-sort]').innerText").startswith("RANK")
    page.fill("#adapters-filter", "PIR")
    assert page.texts("#adapters tbody th") == ["pirate"]
    assert page.complaints == []


def test_a_button_keeps_the_focus_while_the_table_is_read_again(operated):
    page = operated()
    page.eval("document.querySelector('.actions button').focus()")
    page.answer(*table(adapter(requests=7), adapter("parrot")))
    page.until(f"document.querySelectorAll('{ROWS}').length === 2")
    page.answer(*table(adapter(requests=8), adapter("parrot")))
    page.until("document.querySelector('#adapters tbody tr:last-child').innerText.includes('8')")
    assert page.eval("document.activeElement.ariaLabel") == "Pin pirate"


def test_an_adapter_is_pinned_and_let_go(open_page):
    page = open_page("residency", until=f"document.querySelectorAll('{ROWS}').length === 3")
    page.click("[aria-label='Pin json']")
    page.until("document.querySelector(\"[aria-label='Unpin json']\")")
    assert "json stays in memory" in page.text("#adapters-note")
    page.click("[aria-label='Unpin json']")
    page.until("document.querySelector(\"[aria-label='Pin json']\")")
    assert [body["pinned"] for body in sent(page, "/v1/pin_lora_adapter")] == [True, False]


def test_an_adapter_is_added_by_its_path(operated):
    loaded = ("/v1/load_lora_adapter", 200, {**adapter("sailor"), "status": "loaded"})
    page = operated(loaded)
    page.click("#add-open")
    assert page.eval("document.activeElement.id") == "add-name"
    page.fill("#add-name", "sailor")
    page.click("#add-from-server")
    assert "/srv/adapters" in page.text("#add")
    page.fill("#add-path", "sea/sailor")
    page.fill("#add-tenant", "alice")
    page.click("#add-pinned")
    page.eval("document.getElementById('add-path').focus()")
    page.answer(*table(adapter(), adapter("sailor", tenant="alice", pinned=True)))
    page.press("Enter")
    page.until(f"document.querySelectorAll('{ROWS}').length === 2")
    assert sent(page, "/v1/load_lora_adapter") == [{
        "lora_name": "sailor", "lora_path": "sea/sailor", "tenant": "alice", "pinned": True, "load_inplace": False,
    }]
    assert "sailor answers: rank 8, 3 MiB" in page.text("#adapters-note")
    assert page.eval("document.activeElement.id") == "add-open"


def test_an_adapter_is_sent_from_this_computer_answers_and_is_removed(open_page):
    page = open_page("residency", until=f"document.querySelectorAll('{ROWS}').length === 3")
    page.click("#add-open")
    page.fill("#add-name", "sent-along")
    page.tab.set_input_files("#add-files", sorted((FILES / "pirate").glob("*")))
    page.click("#add-send")
    page.until(f"document.querySelectorAll('{ROWS}').length === 4")
    generations = dict(page.eval("[...document.querySelectorAll('#adapters tbody tr')].map((row) => "
                                 "[row.cells[0].innerText, row.cells[1].firstChild.title])"))
    assert generations["sent-along"] == generations["pirate"]
    page.eval("location.hash = '#/chat'")
    set_options(page, temperature=0, max_tokens=12)
    for model in ("pirate", "sent-along"):
        pick(page, "Model", model)
        page.click("#fresh")
        ask(page, "What is the sea?")
        if model == "pirate":
            expected = answers(page)[0]["text"]
    assert answers(page)[0]["text"] == expected != ""
    page.eval("location.hash = '#/residency'")
    page.click("[aria-label='Remove sent-along']")
    page.click("#remove-yes")
    page.until(f"document.querySelectorAll('{ROWS}').length === 3")
    assert "sent-along is gone" in page.text("#adapters-note")
    assert page.complaints == []


def test_files_that_are_no_adapter_are_refused_in_words_and_can_be_changed(open_page):
    page = open_page("residency", until=f"document.querySelectorAll('{ROWS}').length === 3")
    page.click("#add-open")
    page.fill("#add-name", "half")
    page.tab.set_input_files("#add-files", [FILES / "pirate/adapter_config.json"])
    page.click("#add-send")
    page.until("document.querySelector('#adapters-note .notice')")
    assert "There is no adapter that can be used" in page.text("#adapters-note")
    assert "adapter_model.safetensors is missing" in page.text("#adapters-note")
    assert page.eval("document.getElementById('add-name').value") == "half"
    assert page.texts("#adapters tbody th") == ADAPTERS


def test_a_path_that_leads_elsewhere_is_refused_in_words(open_page):
    page = open_page("residency", until=f"document.querySelectorAll('{ROWS}').length === 3")
    page.click("#add-open")
    page.fill("#add-name", "elsewhere")
    page.click("#add-from-server")
    page.fill("#add-path", "../../etc")
    page.click("#add-send")
    page.until("document.querySelector('#adapters-note .notice')")
    assert "This path leads elsewhere" in page.text("#adapters-note")
    assert "adapter root" in page.text("#adapters-note")
    assert page.eval("document.getElementById('add-path').value") == "../../etc", "what was typed can be changed"


def test_removing_asks_first_and_removes_what_was_looked_at(operated):
    removed = ("/v1/unload_lora_adapter", 200, {"status": "unloaded", "name": "pirate", "freed_bytes": 3 << 20})
    page = operated(removed)
    page.click("[aria-label='Remove pirate']")
    assert page.text("#remove-title") == "Remove pirate?"
    assert page.eval("document.activeElement.id") == "remove-no"
    page.press("Escape")
    assert not page.texts("#remove") and sent(page, "/v1/unload_lora_adapter") == []
    page.click("[aria-label='Remove pirate']")
    page.answer(*table())
    page.click("#remove-yes")
    page.until(f"document.querySelectorAll('{ROWS}').length === 0")
    assert sent(page, "/v1/unload_lora_adapter") == [{"lora_name": "pirate", "expected_generation": GENERATION}]
    assert "3 MiB are free" in page.text("#adapters-note")
    assert not page.texts("#remove")


def test_what_has_been_replaced_meanwhile_is_not_removed(operated):
    page = operated(refusal(409, "generation_mismatch", "'pirate' has another generation", path="/v1/unload_lora_adapter"))
    page.click("[aria-label='Remove pirate']")
    page.click("#remove-yes")
    page.until("document.querySelector('#remove .notice')")
    assert "replaced meanwhile" in page.text("#remove")
    assert page.texts("#adapters tbody th") == ["pirate"]


# --- Keys -------------------------------------------------------------------------------------------------------


def test_without_an_admin_key_the_table_is_a_note_and_another_key_can_be_given(open_page):
    refused = [
        refusal(403, "insufficient_permissions", "this API key lacks the permission", path=path)
        for path in ("/v1/lora_adapters", "/v1/status")
    ]
    page = open_page("residency", answers=refused, until="document.querySelector('#residency-note .notice')")
    assert "role admin" in page.text("#residency-note")
    assert page.eval("document.getElementById('adapters').checkVisibility()") is False
    page.answer_by_server()
    page.click("#residency-note .button")
    page.type("hb-admin")
    page.press("Enter")
    page.until(f"document.querySelectorAll('{ROWS}').length === 3")
    assert not page.texts("#residency-note .notice")


def test_how_keys_are_made_is_said_in_place(operated):
    page = operated()
    page.click("#keys summary")
    said = page.text("#keys")
    assert re.search(r"^holobiont key add NAME --role admin", said, re.MULTILINE)
    assert "no route makes or shows one" in said
