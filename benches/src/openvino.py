"""Answers questions about the speed of OpenVINO GenAI, a line with a rate in tokens/s for each:

    prefill TOKENS                  one prompt
    decode STREAMS PROMPT TOKENS    streams that each generate TOKENS behind a prompt

Arguments: the folder that optimum-cli exported, and the number of threads. Prompts are random tokens, which no cache of
prefixes can know.
"""

import random
import sys
import time

import numpy
import openvino
import openvino_genai

folder, threads = sys.argv[1], int(sys.argv[2])
properties = {"INFERENCE_NUM_THREADS": threads}
single = openvino_genai.LLMPipeline(folder, "CPU", **properties)
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 1
scheduler.enable_prefix_caching = False
batched = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)


def prompt(tokens):
    ids = [random.randrange(1000, 100000) for _ in range(tokens)]
    return openvino.Tensor(numpy.array([ids], dtype=numpy.int64))


def config(tokens):
    return openvino_genai.GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True, do_sample=False)


def seconds(streams, prompts, tokens):
    start = time.perf_counter()
    if streams == 1:
        single.generate(prompts[0], config(tokens))
    else:
        batched.generate(prompts, [config(tokens)] * streams)
    return time.perf_counter() - start


def rate(question):
    kind, *numbers = question.split()
    numbers = [int(number) for number in numbers]
    if kind == "prefill":
        return numbers[0] / seconds(1, [prompt(numbers[0])], 1)
    streams, length, tokens = numbers
    prompts = [prompt(length) for _ in range(streams)]
    first = seconds(streams, prompts, 1)
    return streams * (tokens - 1) / (seconds(streams, prompts, tokens) - first)


seconds(1, [prompt(16)], 2)
seconds(2, [prompt(16)] * 2, 2)
for line in sys.stdin:
    print(rate(line), flush=True)
