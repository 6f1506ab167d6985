"""The page at `/`, in a real browser, against a running Holobiont.

HOLOBIONT_URL (for example http://127.0.0.1:8080) must serve SmolLM2-135M-Instruct with the adapters pirate, json and
haiku of `examples/adapters`, without keys. What a healthy server does not do (refuse, fail, send hostile names) is
answered in its place, between the page and the network. With HOLOBIONT_SCREENSHOTS, a folder, pictures are left there.
"""

import json
import subprocess

import pytest
from steps import (
    CHAT, HOSTILE, MODELS, MODELS_SHOWN, SAID, URL, answers, ask, cards, job, look, pick, refusal, set_options, stream,
    training,
)

ADAPTERS = ["haiku", "json", "pirate"]


# --- What is there ----------------------------------------------------------------------------------------------


def test_the_page_loads_without_a_complaint_and_says_that_the_server_is_ready(page):
    page.until("document.querySelector('#status[data-state=ready]')")
    page.until("/\\d+\\.\\d+/.test(document.getElementById('status').innerText)")
    assert page.text("#status").startswith("ready")
    assert page.complaints == []


def test_the_page_asks_nobody_but_its_own_server(page):
    page.until("document.querySelector('#status[data-state=ready]')")
    assert page.requests
    assert all(request.url.startswith((URL, "data:")) for request in page.requests)


def test_html_cannot_be_made_of_a_string_and_no_other_host_be_asked(page):
    thrown = page.eval("(() => { try { document.body.innerHTML = 'x'; } catch (error) { return error.name; } })()")
    assert thrown == "TypeError"
    assert page.eval("fetch('http://127.0.0.2:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert any("Content Security Policy" in complaint for complaint in page.complaints)


def test_the_base_is_listed_first_and_then_the_adapters(page):
    page.click("#chat [data-picker=Model]")
    page.until("document.querySelector('#chat .panel li')")
    names = page.texts("#chat .panel li bdi")
    assert names[1:] == ADAPTERS
    assert page.texts("#chat .panel li .soft") == ["base"]
    assert page.eval("document.activeElement.getAttribute('role')") == "combobox"


def test_hundreds_of_adapters_are_searched(open_page):
    page = open_page(answers=[cards(*(f"tenant-{number}" for number in range(400)))])
    page.click("#chat [data-picker=Model]")
    page.until("document.querySelector('#chat .panel li')")
    assert len(page.texts("#chat .panel li")) == 100
    assert "301 more" in page.text("#chat .panel")
    page.type("ANT-39")
    assert page.texts("#chat .panel li bdi") == ["tenant-39"] + [f"tenant-{number}" for number in range(390, 400)]
    page.press("ArrowDown")
    page.press("Enter")
    assert page.text("#chat .picker button bdi") == "tenant-390"


# --- Chat -------------------------------------------------------------------------------------------------------


def test_an_answer_streams_and_says_how_it_ended_and_which_generation_gave_it(page):
    pick(page, "Model", "pirate")
    set_options(page, temperature=0)
    ask(page, "What is the capital of France?")
    [answer] = answers(page)
    assert answer["model"] == "pirate"
    assert answer["text"].strip()
    facts = answer["facts"]
    assert facts["finish"] == "stop"
    generation = page.eval("document.querySelector('[data-fact=generation]').title")
    assert len(generation) == 64
    assert facts["generation"] == f"gen {generation[:12]}"
    assert set(facts) >= {"tokens", "first", "speed", "seed", "prompt"}
    assert page.complaints == []


def test_the_text_is_what_the_server_answers_to_the_same_request(page):
    set_options(page, temperature=0, max_tokens=24, seed=7)
    page.eval("document.getElementById('markdown').click()")
    ask(page, "What is the sea?")
    [answer] = answers(page)
    sent = [request.post_data_json for request in page.requests if request.url.endswith(CHAT)]
    assert [(body["seed"], body["temperature"], body["max_tokens"]) for body in sent] == [(7, 0, 24)]
    body = json.dumps({key: value for key, value in sent[0].items() if not key.startswith("stream")})
    whole = page.eval(
        "fetch('v1/chat/completions', { method: 'POST', headers: { 'content-type': 'application/json' },"
        f" body: {json.dumps(body)} }}).then((response) => response.json())"
    )
    assert answer["text"] == whole["choices"][0]["message"]["content"]
    assert answer["facts"]["finish"].startswith(whole["choices"][0]["finish_reason"])


def test_what_was_said_and_the_system_prompt_go_along(page):
    set_options(page, system="You are brief.", max_tokens=8)
    ask(page, "What is tea?")
    ask(page, "And coffee?")
    said = [answer["text"] for answer in answers(page)]
    [_, body] = [request.post_data_json for request in page.requests if request.url.endswith(CHAT)]
    told = [(message["role"], message["content"]) for message in body["messages"]]
    assert told == [
        ("system", "You are brief."), ("user", "What is tea?"), ("assistant", said[0]), ("user", "And coffee?"),
    ]


def test_stop_ends_an_answer_and_keeps_what_was_said(page):
    set_options(page, max_tokens=4000, temperature=0)
    page.fill("#prompt", "Write a long essay about the history of the sea and of all who sailed it.")
    page.press("Enter")
    page.until(f"{SAID}.length > 20")
    page.click("#stop")
    page.until("document.querySelector('[data-fact=finish]')")
    [answer] = answers(page)
    assert answer["facts"]["finish"] == "stopped by you"
    assert len(answer["text"]) > 20
    assert page.eval("document.activeElement.id") == "prompt"


def drafted(*choices, ending="data: [DONE]\n\n"):
    """An event stream with what is told of drafts in it."""
    chunks = [{"choices": [{"index": 0, "delta": {}, "finish_reason": None, **choice}]} for choice in choices]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ending
    return (CHAT, 200, body, {"content-type": "text/event-stream"})


def test_what_is_drafted_and_taken_back_is_no_part_of_an_answer(open_page):
    said, told = {"delta": {"content": "one"}}, {"provisional": {"text": " two 😀!"}}
    page = open_page()
    page.answer(*drafted(said, told, {"retract": {"characters": 3}}, {"delta": {"content": " two"}, "finish_reason": "stop"}))
    ask(page, "Count")
    assert answers(page)[0]["text"] == "one two"
    page.answer(*drafted(said, told, {"retract": {"characters": 2}}, ending=""))
    ask(page, "Count on")
    assert "broke off" in page.text(".notice")
    assert [answer["text"] for answer in answers(page)] == ["one two", "one"]


def test_an_answer_can_be_had_again_with_curl(page):
    set_options(page, temperature=0, max_tokens=12)
    ask(page, "It's a 'quote' and a $HOME; what is it?")
    page.click(".acts button:has-text('as curl')")
    command = page.eval("document.querySelector('#curl pre').textContent")
    look(page, "curl")
    told = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60).stdout
    pieces = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"])
    assert text == answers(page)[0]["text"] != ""
    page.press("Escape")
    assert not page.texts("#curl")


def test_sampling_is_what_the_fields_say_and_what_is_empty_is_left_to_the_model(page):
    page.answer(*stream("Yes"))
    ask(page, "Hello")
    set_options(page, temperature=0.5, top_p=0.9, top_k=40, max_tokens=9, seed=3)
    summary = page.text("#settings summary")
    ask(page, "Hello")
    fields = {"temperature", "top_p", "top_k", "max_tokens", "seed"}
    empty, full = [
        {name: request.post_data_json[name] for name in fields & set(request.post_data_json)}
        for request in page.requests if request.url.endswith(CHAT)
    ]
    assert set(empty) == {"temperature", "max_tokens", "seed"}
    assert full == {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 9, "seed": 3}
    assert summary == "temperature 0.5 · top p 0.9 · top k 40 · 9 tokens · seed 3"


def test_a_field_that_cannot_be_meant_sends_nothing_and_is_shown(page):
    set_options(page, top_p=2)
    page.fill("#prompt", "Hello")
    page.press("Enter")
    assert page.eval("document.activeElement.id") == "top-p"
    assert page.eval("document.getElementById('settings').open")
    assert not [request for request in page.requests if request.url.endswith(CHAT)]


def test_again_asks_with_another_seed_and_what_was_said_last_goes_along(page):
    page.answer(*stream("One"))
    set_options(page, seed=1)
    ask(page, "Hello")
    page.answer(*stream("Two"))
    page.click(".acts button:has-text('again')")
    page.until("document.querySelector('.answer .text').textContent === 'Two'")
    ask(page, "And then?")
    first, again, then = [request.post_data_json for request in page.requests if request.url.endswith(CHAT)]
    assert first["messages"] == again["messages"]
    assert first["seed"] == 1 != again["seed"]
    assert [message["content"] for message in then["messages"]] == ["Hello", "Two", "And then?"]


def test_what_a_model_thinks_is_folded_and_no_part_of_what_it_said(page):
    page.answer(*stream("No, ", "<b>.", thought=("hm, ", "<i>maybe")))
    ask(page, "Hello")
    assert page.text(".thoughts summary").startswith("Thought for")
    assert not page.texts(".thoughts div")
    page.click(".thoughts summary")
    assert page.texts(".thoughts div") == ["hm, <i>maybe"]
    look(page, "a-thought")
    ask(page, "And then?")
    asked = [request.post_data_json for request in page.requests if request.url.endswith(CHAT)][-1]
    assert [message["content"] for message in asked["messages"]] == ["Hello", "No, <b>.", "And then?"]


def test_escape_stops_an_answer_but_not_from_within_a_dialog(page):
    set_options(page, max_tokens=4)
    ask(page, "Hello")
    set_options(page, max_tokens=4000, temperature=0)
    page.fill("#prompt", "Write a long essay about the history of the sea and of all who sailed it.")
    page.press("Control+Enter")
    page.until(f"{SAID}.length > 20")
    page.eval("document.querySelector('.acts button:last-child').click()")
    page.press("Escape")
    assert page.eval("document.querySelectorAll('dialog[open]').length") == 0
    assert page.eval("document.querySelectorAll('[aria-busy=true]').length") == 1
    page.press("Escape")
    page.until("document.querySelectorAll('[data-fact=finish]').length === 2")
    assert answers(page)[1]["facts"]["finish"] == "stopped by you"


# --- Comparing --------------------------------------------------------------------------------------------------


def compare(page, a, b, question):
    pick(page, "Model A", a)
    pick(page, "Model B", b)
    ask(page, question)
    both = answers(page)
    assert [answer["model"] for answer in both] == [a, b]
    return both


def test_two_adapters_give_two_answers_side_by_side(open_page):
    page = open_page("compare")
    a, b = compare(page, "pirate", "haiku", "What is the sea?")
    assert a["text"].strip() and b["text"].strip()
    assert a["text"] != b["text"]
    assert a["facts"]["generation"] != b["facts"]["generation"]
    assert a["facts"]["seed"] == b["facts"]["seed"]
    left, right = page.eval(
        "[...document.querySelectorAll('#compare .answer')].map((node) => node.getBoundingClientRect())"
        ".map((box) => [box.top, box.left, box.right])"
    )
    assert left[0] == right[0]
    assert left[2] < right[1]


def test_one_model_with_one_seed_gives_one_answer_twice(open_page):
    page = open_page("compare")
    set_options(page, temperature=0, max_tokens=48)
    a, b = compare(page, "json", "json", "Name a city.")
    assert a["text"] == b["text"] != ""


# --- Training ---------------------------------------------------------------------------------------------------


def test_jobs_are_shown_with_their_losses_and_can_be_paused(open_page):
    paused = ("/v1/fine_tuning/jobs/ftjob-1/pause", 200, job(status="paused"))
    page = open_page("training", answers=[paused, *training(job())], until="document.querySelector('.job path.line[d*=L]')")
    assert page.text(".job h3 bdi") == "sailor" and page.text(".job .state") == "running"
    assert "step 4 of 20" in page.text(".job p") and "loss 1.00" in page.text(".job p")
    assert page.eval("document.querySelector('.job path.line').getAttribute('d').split('L').length") == 4
    assert page.texts(".job button:not([hidden])") == ["Pause", "Cancel"]
    look(page, "training")
    for answer in training(job(status="paused")):
        page.answer(*answer)
    page.click(".job button")
    page.until("document.querySelector('.job .state').innerText === 'paused'")
    assert page.texts(".job button:not([hidden])") == ["Resume", "Cancel"]
    assert [request.method for request in page.requests if request.url.endswith("/pause")] == ["POST"]
    assert page.complaints == []


def test_jobs_of_a_real_server_are_shown(open_page):
    page = open_page("training", until="document.querySelector('.job') || document.getElementById('jobs-rest').innerText")
    assert page.eval("document.querySelectorAll('#training-note .notice').length") == 0
    assert page.complaints == []


# --- Text stays text --------------------------------------------------------------------------------------------


def test_hostile_names_answers_and_errors_stay_text(open_page):
    row = {"name": HOSTILE, "generation": HOSTILE, "rank": HOSTILE, "tier": HOSTILE, "state": HOSTILE, "error": HOSTILE,
           "requests": None, "tokens_per_s": None, "pinned": HOSTILE, "tenant": HOSTILE}
    page = open_page(answers=[
        cards(HOSTILE), stream(HOSTILE[:9], HOSTILE[9:]), ("/v1/lora_adapters", 200, {"data": [row]}),
        ("/version", 200, {"version": HOSTILE}),
    ])
    pick(page, "Model", HOSTILE)
    ask(page, HOSTILE)
    [answer] = answers(page)
    assert (answer["text"], answer["model"]) == (HOSTILE, HOSTILE)
    page.answer(*refusal(400, HOSTILE, HOSTILE))
    ask(page, "Again")
    assert HOSTILE in page.text(".notice")
    page.eval("location.hash = '#/residency'")
    page.until("document.querySelector('#adapters tbody tr')")
    assert HOSTILE in page.text("#adapters tbody th")
    for answer in training(job(user_provided_suffix=HOSTILE, status=HOSTILE, error={"message": HOSTILE})):
        page.answer(*answer)
    page.eval("location.hash = '#/training'")
    page.until("document.querySelector('.job')")
    assert HOSTILE in page.text(".job h3 bdi")
    assert page.eval("window.hacked") is None
    assert page.eval("document.querySelectorAll('img, body script:not([type=module])').length") == 0


# --- When things go wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "title", "next_step"),
    [
        (refusal(404, "model_not_found", "the model 'x' does not exist"), "This model is gone", "Pick another"),
        (refusal(403, "insufficient_permissions", "no"), "This key may not do that", "another role"),
        (refusal(400, "context_length_exceeded", "8192 tokens"), "The conversation is too long", "Start a new one"),
        (refusal(400, "invalid_value", "seed is wrong"), "The server refused this", "Change what it names"),
        (refusal(503, "executor_unavailable", "killed by signal 9"), "The model is not there", "restarted by itself"),
        (refusal(500, "internal_error", "its log says which"), "The server made a mistake", "Try again"),
        ((CHAT, 502, "<h1>Bad gateway</h1>", {"content-type": "text/html"}), "The server made a mistake", "Try again"),
        ((CHAT, 200, "<h1>Hello</h1>", {"content-type": "text/html"}), "Something else answered", "a proxy"),
        (stream("Half an", ending=""), "The answer broke off", "may be incomplete"),
        (stream("Half", ending='data: {"error": {"message": "gone", "code": "executor_unavailable"}}\n\n'),
         "The model is not there", "restarted by itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failure_says_what_why_and_what_to_do(page, answer, title, next_step):
    page.answer(*answer)
    ask(page, "Hello")
    told = page.text(".notice")
    assert title in told
    assert next_step in told
    message = answer[2]["error"]["message"] if isinstance(answer[2], dict) else ""
    assert message.lower() in told.lower()
    page.answer_by_server()
    page.click(".notice .button")
    page.until("document.querySelector('.answer .facts')")
    assert not page.texts(".notice")


def test_a_full_server_says_when_to_try_again(page):
    page.answer(*refusal(429, "rate_limit_exceeded", "30 requests a minute are allowed", {"retry-after": "3"}))
    ask(page, "Hello")
    assert "Too many requests" in page.text(".notice")
    assert page.text(".notice .button") == "Try again in 3 s"
    assert page.eval("document.querySelector('.notice .button').disabled")
    page.answer_by_server()
    page.until("!document.querySelector('.notice .button').disabled")
    page.click(".notice .button")
    page.until("document.querySelector('.answer .facts')")


def test_a_key_is_asked_for_when_the_server_wants_one_and_kept_in_this_tab_only(open_page):
    wanted = refusal(401, "invalid_api_key", "no API key", path=MODELS)
    page = open_page(answers=[wanted], until="!document.getElementById('key').hidden")
    assert "wants an API key" in page.text("#key")
    look(page, "key")
    page.fill("#key-field", "hb-wrong")
    page.press("Enter")
    page.until("document.getElementById('key-why').textContent.includes('does not accept')")
    page.answer_by_server()
    page.fill("#key-field", "hb-right")
    page.press("Enter")
    page.until(MODELS_SHOWN)
    page.eval("fetch('v1/models')")
    sent = [request.headers.get("authorization") for request in page.requests if request.url.endswith(MODELS)]
    assert sent == [None, "Bearer hb-wrong", "Bearer hb-right", None]
    assert page.eval("localStorage.length") == 0
    assert page.eval("document.cookie") == ""
    assert not page.texts("#key")


def test_loading_and_loss_are_told_and_pass_by_themselves(open_page):
    loading = {"status": "loading", "stage": "reading weights", "percent": 43, "detail": "loading 43 %"}
    page = open_page(answers=[("/ready", 503, loading)], until="document.querySelector('#status[data-state=loading]')")
    assert "loading 43 %" in page.text("#status")
    assert "reading weights" in page.text("#status")
    assert page.eval("document.getElementById('loading').value") == 43
    look(page, "loading")
    page.answer("/ready", 503, {"status": "lost", "detail": "killed by signal 9"})
    page.until("document.querySelector('#status[data-state=lost]')")
    assert "restarting" in page.text("#status")
    page.answer_by_server()
    page.until("document.querySelector('#status[data-state=ready]')")
    page.until(MODELS_SHOWN)


# --- On every screen -----------------------------------------------------------------------------------------------


# What reaches over an edge of the screen, but for what scrolls sideways on purpose.
BESIDE = (
    "[...document.querySelectorAll('body *')].filter((node) => node.checkVisibility()"
    " && !node.closest('.scroll, pre, .unseen')).map((node) => [node, node.getBoundingClientRect()])"
    ".filter(([node, box]) => box.left < -0.5 || box.right > innerWidth + 0.5 || node.scrollWidth > node.clientWidth + 1"
    "   && getComputedStyle(node).overflowX !== 'hidden' && node.clientWidth > 0)"
    ".map(([node]) => node.outerHTML.slice(0, 100))"
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("device", "width", "height"), [("desktop", 1280, 800), ("phone", 390, 844)])
def test_nothing_is_wider_than_the_screen(open_page, scheme, device, width, height):
    page = open_page(width=width, height=height, scheme=scheme, touch=device == "phone")

    def check(name):
        look(page, f"{device}-{scheme}-{name}")
        assert page.eval(BESIDE) == []
        assert page.eval("[document.documentElement, document.body].every((node) => (node.scrollTop = 9, node.scrollTop === 0))")
        assert page.eval("document.scrollingElement.scrollWidth") <= width

    check("welcome")
    page.click("#chat [data-picker]")
    check("picker")
    page.press("Escape")
    pick(page, "Model", "pirate")
    set_options(page, max_tokens=64, temperature=0)
    ask(page, "What is the capital of France?")
    page.answer(*refusal(429, "queue_full", "64 requests are waiting already; try again", {"retry-after": "5"}))
    ask(page, "And a word without an end: " + "abcdefghij" * 20)
    check("chat")
    page.answer_by_server()
    page.eval("location.hash = '#/compare'")
    pick(page, "Model A", "pirate")
    ask(page, "What is the sea?")
    check("compare")
    page.click("#settings summary")
    check("settings")
    page.eval("location.hash = '#/residency'")
    page.until("document.querySelectorAll('.plot .line[d*=L]').length >= 4")
    check("residency")
    page.click("#add-open")
    page.eval("['numbers', 'keys'].forEach((id) => { document.getElementById(id).open = true; })")
    page.eval("document.getElementById('adapters').scrollIntoView()")
    check("adapters")
    page.click(".actions button:last-child")
    check("remove")
    page.press("Escape")
    for answer in training(job(), job(id="ftjob-2", status="failed", error={"message": "abcdefghij" * 30})):
        page.answer(*answer)
    page.eval("location.hash = '#/training'")
    page.until("document.querySelectorAll('.job path.line[d*=L]').length === 2")
    check("training")
