"""Has transformers render the chat templates of a folder, for scripts/compare-templates.

    python make_published.py FOLDER OUT.json

needs: transformers, jinja2. A template that Jinja ends with an error of Python's is left out there: what it says to that is its
own affair. So are texts in parts, which are one text before a template sees them.
"""

import json
import sys
from datetime import datetime, timezone
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers.utils import chat_template_utils

NOW_S = 1_753_000_000

# Jinja escapes as HTML what a template adds to a text that it calls safe, quotes of JSON too; here it stays what it is.
ESCAPED = {"meetkai-functionary-medium-v3.1"}

TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "Says how the weather is",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "Which city", "enum": ["Köln", "東京"]},
            "days": {"type": "integer", "default": 3},
            "place": {"type": "object", "properties": {"lat": {"type": "number"}}},
            "tags": {"type": "array", "items": {"type": "string"}}}}}},
    {"type": "function", "function": {
        "name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}},
]


def call(number, name, arguments):
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hello"}],
    "system": [{"role": "system", "content": " Be <brief> & kind. "}, {"role": "user", "content": "  Hi 😀 \n"}],
    "turns": [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": "What's 2+2?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\nFour. "},
        {"role": "user", "content": "And 3+3?"},
        {"role": "assistant", "content": "Six"},
        {"role": "user", "content": "And 4+4?"},
    ],
    "answered": [{"role": "user", "content": "What's 2+2?"}, {"role": "assistant", "content": "Four."}],
    "call": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call(1, "weather", {
            "city": "Köln", "days": 1, "f": 0.5, "on": True, "no": None, "tags": ["a", "b"], "place": {"lat": 1}})]},
        {"role": "tool", "content": "{\"sunny\": true}", "tool_call_id": "call00001", "name": "weather"},
    ],
    "calls": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather and time?"},
        {"role": "assistant", "content": "Let me see.",
         "tool_calls": [call(1, "weather", {"city": "東京"}), call(2, "now", {})]},
        {"role": "tool", "content": "rain", "tool_call_id": "call00001", "name": "weather"},
        {"role": "tool", "content": "12:00", "tool_call_id": "call00002", "name": "now"},
        {"role": "assistant", "content": "It rains at noon."},
        {"role": "user", "content": "Thanks"},
    ],
}


def variables(conversation):
    yield {}
    if conversation in ("one", "system", "call", "calls"):
        yield {"tools": TOOLS}
    if conversation in ("one", "turns"):
        yield {"enable_thinking": False}


def rendered(source, messages, begins, extra):
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=begins, bos_token="<s>", eos_token="</s>", **extra)
        return {"text": texts[0]}
    except TemplateError as error:
        # Only what a template says itself: the others are subclasses.
        return {"error": str(error)} if type(error) is TemplateError else None
    except Exception:  # Python's own
        return None


def main():
    class Fixed(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.fromtimestamp(NOW_S, timezone.utc)

    chat_template_utils.datetime = Fixed
    folder, out = sys.argv[1:]
    sources = {path.stem: path.read_text() for path in sorted(Path(folder).glob("*.jinja")) if path.stem not in ESCAPED}
    cases = []
    for template, source in sources.items():
        for conversation, messages in CONVERSATIONS.items():
            for extra in variables(conversation):
                for begins in (False, True):
                    case = {"template": template, "conversation": conversation, "extra": extra, "generation_prompt": begins}
                    said = rendered(source, messages, begins, extra)
                    if said is not None:
                        cases.append(case | said)
    Path(out).write_text(json.dumps(
        {"now_s": NOW_S, "templates": sources, "conversations": CONVERSATIONS, "cases": cases}, ensure_ascii=False))
    print(f"{len(sources)} templates, {len(cases)} cases")


main()
