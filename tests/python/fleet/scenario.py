"""The `openai` package, unmodified, through Envoy to several hosts: whoever answers says what every host says by itself.

HOLOBIONT_URL is Envoy's, HOLOBIONT_HOSTS those of the gateways with commas; all serve the base `base` and the adapters
`pirate` and `haiku`. tests/tests/fleet_clients.rs starts them and runs this.
"""

import os

import openai

MODELS = ("base", "pirate", "haiku")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Long enough that two adapters of a cut model differ in any arithmetic.
DRAWN = {"temperature": 0.8, "seed": 7, "max_tokens": 40}


def client(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300)


def chat(to, model, **options):
    return to.chat.completions.create(model=model, messages=QUESTION, **{**DRAWN, **options})


def complete(to, model, **options):
    return to.completions.create(model=model, prompt="The quick brown fox", **{**DRAWN, **options})


def text(chunks):
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def main():
    front = client(os.environ["HOLOBIONT_URL"])
    hosts = [client(url) for url in os.environ["HOLOBIONT_HOSTS"].split(",")]
    assert len(hosts) > 1

    cards = {card.id: card for card in front.models.list()}
    assert set(cards) == set(MODELS), set(cards)
    assert [cards[name].parent for name in MODELS] == [None, "base", "base"]
    assert front.models.retrieve("pirate").id == "pirate"

    answers = {}
    for model in MODELS:
        said = {chat(to, model).choices[0].message.content for to in [front, *hosts]}
        assert len(said) == 1, (model, said)
        answers[model] = said.pop()
        assert text(chat(front, model, stream=True)) == answers[model]
        said = {complete(to, model).choices[0].text for to in [front, *hosts]}
        assert len(said) == 1, (model, said)
        generations = {complete(to, model).model_extra.get("adapter_generation") for to in [front, *hosts]}
        assert len(generations) == 1 and (None in generations) == (model == "base"), generations
    assert len(set(answers.values())) == len(MODELS), answers

    try:
        chat(front, "nobody's")
        raise AssertionError("an adapter that there is not has answered")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error


main()
