"""Rewards answers that are a JSON object with the name and the age of a person, and nothing else.

    holobiont tune examples/rewards/people.jsonl --name people --method grpo --reward examples/rewards/json_object.py
"""

import json


def reward(prompt, answer, row):
    """1 for the right object, less for an object that lacks something, 0 for no object at all."""
    try:
        found = json.loads(answer)
    except ValueError:
        # A part of the way: the object is there, with text around it.
        return 0.1 if f'"name": "{row["name"]}"' in answer else 0.0
    if not isinstance(found, dict):
        return 0.1
    right = [found.get("name") == row["name"], found.get("age") == row["age"], set(found) == {"name", "age"}]
    return 0.4 + 0.2 * sum(right)
