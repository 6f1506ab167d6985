"""How far a deployment's answers are from transformers'."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Agreement:
    """Of some prompts: the largest error of a log-probability, answers with equal tokens, and where others part.

    Errors are of the tokens that both sides list, at all positions before the tokens differ. `widest_margin` is the largest
    distance of the first token from the second, in transformers' log-probabilities, where an answer parts; 0 if none does.
    """

    largest_error: float
    equal_answers: int
    answers: int
    widest_margin: float

    def holds(self, tolerance):
        """Errors are within the tolerance, and answers part only where two tokens are as good as equal."""
        return self.largest_error <= tolerance and self.widest_margin <= 2 * tolerance


def compare(expected, answers):
    """`expected` has the steps of the peer for each prompt, `answers` the tokens and likeliest tokens of the deployment."""
    errors, margins = [0.0], [0.0]
    equal = 0
    for steps, (tokens, tops) in zip(expected, answers, strict=True):
        for step, token, top in zip(steps, tokens, tops, strict=True):
            errors += [abs(step.top[id] - top[id]) for id in step.top.keys() & top.keys()]
            if token != step.token:
                margins.append(step.margin)
                break
        else:
            equal += 1
    return Agreement(max(errors), equal, len(expected), max(margins))


def told(agreement, tolerance):
    return asdict(agreement) | {"tolerance": tolerance, "holds": agreement.holds(tolerance)}
