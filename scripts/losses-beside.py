"""What `holobiont --json tune` said of two runs of the same steps, as rows of a table: losses epoch by epoch.

    losses-beside.py NAME SERVING EXACT
"""

import json
import statistics
import sys

name, *paths = sys.argv[1:]


def losses(path):
    """Means of the steps of each epoch, and the losses of what is held out behind each."""
    steps, judged, epochs = [], {}, 0
    for line in open(path):
        event = json.loads(line)
        match event["event"]:
            case "plan":
                epochs = event["epochs"]
            case "step":
                steps.append(event)
            case "evaluation":
                judged[event["step"]] = event["loss"]
    stride = len(steps) // epochs
    learned = [statistics.mean(step["loss"] for step in steps[at : at + stride]) for at in range(0, len(steps), stride)]
    return learned, [judged[(epoch + 1) * stride] for epoch in range(epochs)]


(serving, serving_judged), (exact, exact_judged) = map(losses, paths)
print("| | epoch | loss, serving | exact | held out, serving | exact |\n|---|---|---|---|---|---|")
for epoch, row in enumerate(zip(serving, exact, serving_judged, exact_judged), 1):
    print(f"| `{name}` | {epoch} | " + " | ".join(f"{value:.4f}" for value in row) + " |")
