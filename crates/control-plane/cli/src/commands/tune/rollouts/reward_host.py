"""Computes rewards with the function `reward` of a Python file: a line of JSON in, a line of JSON out."""

import importlib.util
import json
import os
import pathlib
import sys
import traceback

# The file's own output must not mix with the replies.
replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)


def reply(**fields):
    replies.write(json.dumps(fields) + "\n")
    replies.flush()


def failure(error):
    """The error's message, and the place in the user's file that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    place = f" (line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


path = sys.argv[1]
sys.path.insert(0, str(pathlib.Path(path).parent))
try:
    spec = importlib.util.spec_from_file_location("reward_of_user", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reward = module.reward
except BaseException as error:
    reply(error=failure(error))
    sys.exit(1)
reply(ready=True)

for line in sys.stdin:
    asked = json.loads(line)
    try:
        reply(reward=float(reward(asked["prompt"], asked["answer"], asked["row"])))
    except Exception as error:
        reply(error=failure(error))
