"""Makes the golden files of the text tests from independent implementations.

    python make_golden.py SMOLLM2.gguf

needs: transformers, tokenizers, sentencepiece, gguf, torch. Writes beside itself, and the last where the model's tests are:

smollm2.json             token ids of SmolLM2's own tokenizer, read from the GGUF file by transformers
byte_level.json          a small byte-level vocabulary and its ids under every pre-tokenizer name
sentencepiece.json       a small SentencePiece model and the ids the sentencepiece library gives
directory.json           small tokenizer.json directories and the ids transformers gives
templates.json           chat templates rendered by transformers
sampling.json            what transformers' logits processors leave, and log-probabilities by torch
"""

import io
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.generation import logits_process as lp
from transformers.integrations.gguf import convert_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent

TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  spaces   three    four",
    "tab\tand\t\ttabs",
    "line\nline\n\nline\n\n\n",
    "\r\nwindows\r\nlines\r\n",
    "   \n  \n mixed \t\n white \u00a0space\u3000wide",
    "don't I'll you've they're we'd it's I'm CAN'T WE'LL",
    "0 1 12 123 1234 12345 1234567890",
    "3.14159 -2.5e10 1,000,000 50% $9.99 #1",
    "٣٤٥ १२३ ⅷ ½ ²³",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    "<html><body class=\"x\">&amp;</body></html>",
    "https://example.org/path?q=1&r=%20#frag user@example.org",
    "C:\\Users\\name\\file.txt /usr/local/bin",
    "{\"key\": [1, 2.0, null, true], \"s\": \"\\u00e9\"}",
    "SELECT * FROM t WHERE a >= 10 AND b <> 'x';",
    "$\\int_0^1 x^2\\,dx = \\frac{1}{3}$",
    "...!!!???---___***///",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "你好，世界！今天天气很好。",
    "こんにちは世界。カタカナとひらがな",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Việt Nam tiếng Việt",
    "Zażółć gęślą jaźń",
    "naïve café résumé Ærøskøbing Straße ẞ",
    "e\u0301 vs é, n\u0303 vs ñ",
    "😀 😃😄 👍🏽 👨‍👩‍👧‍👦 🇩🇪🇫🇷 ❤️",
    "a😀b",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ → ∞ ≠ ≈",
    "“curly” ‘quotes’ — dashes – and… ellipsis",
    "™ © ® € £ ¥ ¢ § ¶ †",
    "\u200bzero\u200dwidth\ufeff",
    "control \x01\x02\x1b[31m chars \x7f",
    "nul \x00 byte",
    "\U0001d54f\U00010348 astral 𝕏𐍈",
    "ꙮ ﷽ ꧁꧂",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " " * 70 + "x",
    "=" * 40 + "\n" + "-" * 33,
    "I have 3 cats, 12 dogs and 1024 fish.",
    "Mr. O'Neill's U.S.A. e.g. i.e. etc.",
    "1st 2nd 3rd 4th x2 2x 3D v1.2.3-rc4",
    "MixedCASEWords iPhone eBay McDonald's LaTeX",
    "\n\n    indented\n\tcode\n        deeper\n",
    "end with newline\n",
    " \n",
    "word\u2028separator\u2029end",
    "ＦＵＬＬＷＩＤＴＨ １２３",
    "İstanbul ıI ﬁ ﬂ ǅ",
]

SPECIAL_TEXTS = [
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "a<|im_end|>b <|im_end|> c",
    "<|im_end|><|im_end|>",
    "<|im_end",
    "<|im_start|> system <repo_name>x<file_sep>y",
    "<|IM_END|>",
]


def write(name, value):
    path = HERE / name
    path.write_text(json.dumps(value, ensure_ascii=True, indent=None, separators=(",", ":")) + "\n")
    print(path.name, path.stat().st_size, "bytes")


def smollm2(path):
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # transformers' GGUF reader does not know the name `smollm`. This is the pre-tokenizer of the model's tokenizer.json.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])

    def ids(text, **options):
        return tokenizer.encode(text, add_special_tokens=False, **options)

    cases = [{"text": text, "ids": ids(text)} for text in TEXTS + SPECIAL_TEXTS]
    plain = [{"text": text, "ids": ids(text, split_special_tokens=True)} for text in SPECIAL_TEXTS]
    decoded = []
    for case in cases:
        for special in (False, True):
            decoded.append({
                "ids": case["ids"],
                "skip_special": special,
                "text": tokenizer.decode(case["ids"], skip_special_tokens=special, clean_up_tokenization_spaces=False),
            })
    # Halves of characters.
    emoji = ids("😀日本")
    for cut in range(len(emoji)):
        decoded.append({
            "ids": emoji[cut:],
            "skip_special": False,
            "text": tokenizer.decode(emoji[cut:], clean_up_tokenization_spaces=False),
        })
    write("smollm2.json", {"cases": cases, "plain": plain, "decoded": decoded})
    return tokenizer


CORPUS = [text for text in TEXTS for _ in range(3)] + [
    "the cat sat on the mat and the dog ran to the cat",
    "hello hello world world worlds hello's",
    "12345 123 1234 99 100 1000 10000",
    "token tokens tokenizer tokenization",
]

BYTE_LEVEL_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# The expressions of names that transformers' GGUF reader does not know, as llama.cpp has them (src/llama-vocab.cpp).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943]+"
)
DEEPSEEK_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
LLAMA_CPP_SPLITS = {
    "smollm": [r"\p{N}", GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"],
    "deepseek-llm": [
        r"[\r\n]",
        DEEPSEEK_LETTERS,
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        DEEPSEEK_IDEOGRAPHS,
        r"\p{N}+",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_IDEOGRAPHS, r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ],
}


def train_byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1400,
        special_tokens=BYTE_LEVEL_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=12,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def byte_level():
    # Merges are learned across word borders on purpose: only the pre-tokenizer keeps them from being used.
    tokens, merges = train_byte_level()
    types = [3 if token in BYTE_LEVEL_SPECIALS else 1 for token in tokens]
    metadata = {"tokenizer_type": "gpt2", "tokens": tokens, "token_type": types, "merges": merges}
    pre = {}
    for name in ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", *LLAMA_CPP_SPLITS]:
        # A copy: transformers' builders keep what they are given.
        backend, _ = convert_gguf_tokenizer("llama", dict(metadata, pre_tokenizer_type=name))
        if name in LLAMA_CPP_SPLITS:
            splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in LLAMA_CPP_SPLITS[name]]
            end = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, end])
        # These two look whole words up first (`ignore_merges` in their tokenizer.json, and in llama.cpp).
        backend.model.ignore_merges = name in ("llama-bpe", "tekken")
        pre[name] = [backend.encode(text, add_special_tokens=False).ids for text in TEXTS + SPECIAL_TEXTS]
    write("byte_level.json", {
        "tokens": tokens, "types": types, "merges": merges, "texts": TEXTS + SPECIAL_TEXTS, "pre": pre,
    })
    return tokens, merges


def train_sentencepiece():
    model = io.BytesIO()
    lines = [line for text in CORPUS for line in text.replace("\x00", "").splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_by_whitespace=True,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.98,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


SENTENCEPIECE_SPECIAL_TEXTS = [
    "<s>[INST] Hi [/INST] Hello</s><s>[INST] Bye [/INST]",
    "</s>",
    "a</s> b",
    " <s> x",
    "use the <tool> now",
]


def sentencepiece_json(processor):
    """The tokenizer.json that transformers' converter writes for Llama 2: `Prepend` and `Replace`, fused bytes."""
    count = processor.get_piece_size()
    vocab = {processor.id_to_piece(i): i for i in range(count)}
    scores = {processor.id_to_piece(i): processor.get_score(i) for i in range(count)}
    skip = {processor.id_to_piece(i) for i in range(count)
            if processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i)}
    merges = generate_merges(vocab, scores, skip)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def sentencepiece_model():
    processor = train_sentencepiece()
    count = processor.get_piece_size()

    def kind(i):
        if processor.is_unknown(i):
            return 2
        if processor.is_control(i):
            return 3
        if processor.is_byte(i):
            return 6
        return 4 if processor.id_to_piece(i) == "<tool>" else 1

    texts = [text for text in TEXTS if "\x00" not in text]
    converted = sentencepiece_json(processor)
    write("sentencepiece.json", {
        "tokens": [processor.id_to_piece(i) for i in range(count)],
        "scores": [processor.get_score(i) for i in range(count)],
        "types": [kind(i) for i in range(count)],
        "cases": [{"text": text, "ids": processor.encode(text), "decoded": processor.decode(processor.encode(text))}
                  for text in texts],
        "special": [{"text": text, "ids": converted.encode(text, add_special_tokens=False).ids}
                    for text in SENTENCEPIECE_SPECIAL_TEXTS],
    })
    return converted


def directories(tokens, merges, spm):
    """Directories as models have them, with the ids that transformers gives."""
    byte = Tokenizer(models.BPE(
        {t: i for i, t in enumerate(tokens) if t not in BYTE_LEVEL_SPECIALS}
        | {t: i for i, t in enumerate(tokens) if t in BYTE_LEVEL_SPECIALS},
        [tuple(merge.split(" ")) for merge in merges],
        ignore_merges=True,
    ))
    byte.normalizer = normalizers.NFC()
    byte.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    byte.decoder = decoders.ByteLevel()
    byte.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in BYTE_LEVEL_SPECIALS])
    beyond = AddedToken("<|beyond|>", normalized=False, special=True)
    byte.add_special_tokens([beyond])
    byte.add_tokens([AddedToken("<tool_call>", normalized=False)])
    byte.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    byte.enable_truncation(4)
    texts = TEXTS + SPECIAL_TEXTS + ["<tool_call>x<|beyond|>"]
    out = []
    backends = {"byte level": byte, "sentencepiece": spm}
    for name, key, config in [
        ("byte level with a post-processor", "byte level",
         {"bos_token": "<|im_start|>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False}}),
        # transformers ignores the flags where there is a tokenizer.json.
        ("byte level with explicit flags", "byte level",
         {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False, "add_eos_token": True}),
        ("sentencepiece", "sentencepiece",
         {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}),
    ]:
        with TemporaryDirectory() as folder:
            Path(folder, "tokenizer.json").write_text(backends[key].to_str())
            Path(folder, "tokenizer_config.json").write_text(
                json.dumps(dict(config, tokenizer_class="PreTrainedTokenizerFast")))
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            encoded = [tokenizer.encode(text, truncation=False) for text in texts]
            decoded = [tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                       for ids in encoded]
        out.append({"name": name, "tokenizer": key, "config": config, "ids": encoded, "decoded": decoded})
    write("directory.json", {
        "tokenizers": {key: json.loads(backend.to_str()) for key, backend in backends.items()},
        "texts": texts,
        "cases": out,
    })


NOW_S = 1_753_000_000

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# In the manner of Llama 3.1: date, tools, whitespace control, raise_exception.
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{#- A comment, as long templates have them #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to the following functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# In the manner of Qwen 2.5 and 3: tool blocks, namespace, reversed loops, split, strip, thinking.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# In the manner of Mistral 7B Instruct: alternation enforced, system message folded in.
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- " [INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- " [INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, got " + message['role']) }}
    {%- endif %}
{%- endfor %}
"""

# In the manner of gpt-oss: recursive macros that write schemas as TypeScript, the date, channels, calls named by the last call.
HARMONY = """{%- macro type_of(spec, required) -%}
    {%- if spec.type == "array" -%}
        {{- type_of(spec['items'], required) if spec['items'] else "any" }}[]
    {%- elif spec.enum is defined and spec.enum -%}
        {{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- elif spec.type in ["integer", "number"] -%}
        {{- "number" }}
    {%- elif spec.type == "object" and spec.properties is defined -%}
        {{- "{\n" }}
        {%- for name, inner in spec.properties.items() -%}
            {{- name }}{{- "?" if name not in (spec.required or []) }}: {{ type_of(inner, spec.required or []) }}
            {{- ", " if not loop.last }}
        {%- endfor -%}
        {{- "}" }}
    {%- else -%}
        {{- spec.type or "any" }}
    {%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(name, tools) -%}
    {{- "## " + name + "\n\nnamespace " + name + " {\n\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\n" }}
        {{- "type " + tool.name + " = " }}
        {%- if tool.parameters and tool.parameters.properties %}
            {{- "(_: {\n" }}
            {%- for name, spec in tool.parameters.properties.items() %}
                {{- "// " + spec.description + "\n" if spec.description else "" }}
                {{- name }}
                {%- if name not in (tool.parameters.required or []) %}{{- "?" }}{%- endif -%}
                {{- ": " + type_of(spec, tool.parameters.required or []) }}
                {%- if spec.default is defined %}{{- ", // default: " ~ spec.default }}{%- else %}{{- "," }}{%- endif %}
                {{- "\n" }}
            {%- endfor %}
            {{- "}) => any;\n\n" }}
        {%- else %}
            {{- "() => any;\n\n" }}
        {%- endif %}
    {%- endfor %}
    {{- "} // namespace " + name }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}
{%- if model_identity is not defined %}{%- set model_identity = "You are a model." %}{%- endif %}
{{- model_identity + "\nCurrent date: " + strftime_now("%Y-%m-%d") + "\n\n" }}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "Reasoning: " + reasoning_effort + "\n\n# Valid channels: analysis, commentary, final." }}
{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer_message = "" %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if developer_message %}{{- "# Instructions\n\n" + developer_message + "\n\n" }}{%- endif %}
    {%- if tools -%}{{- "# Tools\n\n" + namespace_of("functions", tools) }}{%- endif -%}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and "<|channel|>" in message.content %}
            {{- raise_exception("Channels belong into other fields") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set later = namespace(found=false) %}
            {%- for next in loop_messages[loop.index:] %}
                {%- if next.role == 'assistant' and "tool_calls" not in next %}{%- set later.found = true %}{%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("A call has a text or reasoning, not both") }}
            {%- elif message.thinking and not later.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary " }}
            {{- (call.content_type if call.content_type is defined else "json") + "<|message|>" + call.arguments|tojson + "<|call|>" }}
            {%- set last.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last.name is none %}{{- raise_exception("No call precedes this answer") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""

# Plain blocks on lines of their own: trim_blocks and lstrip_blocks decide every newline.
LINES = """{% for message in messages %}
    {% if message['role'] == 'assistant' %}
    {% generation %}
    {{ message['content'] }}
    {%- endgeneration %}

    {% else %}
{{ message.role | upper }}: {{ message.get('content', 'nothing') }}
    {% endif %}
    {% if loop.index is divisibleby 2 %}
{% continue %}
    {% endif %}
after {{ loop.index }} of {{ loop.length }}, {{ loop.previtem is defined }}
{% endfor %}
{% macro turn(name, text='-') %}[{{ name }}|{{ text }}]{% endmacro %}
{{ turn('a') }}{{ turn('b', text=messages[-1].content) }}
end
"""

# What Python shows where Jinja prints values, and every option of tojson.
PRINTS = """{{ true }} {{ none }} {{ 1.0 }} {{ 3 // 2 }} {{ 7 / 2 }} {{ [1, 'a', none, true] }} {{ {'k': 'v', 'n': 1} }}
{{ value | tojson }}
{{ value | tojson(indent=2) }}
{{ value | tojson(ensure_ascii=true, sort_keys=true) }}
{{ value | tojson(separators=(',', ':')) }}
{{ [] | tojson(indent=2) }} {{ {} | tojson(indent=2) }}
{{ value.items() | list | length }} {{ value.keys() | join(',') }} {{ 'a,b'.split(',') | last }} {{ 'x' * 3 }}
{{ 'Hello'.lower() }} {{ 'hello'.upper() }} {{ ' s '.strip() }}| {{ 'hello world'.title() }} {{ 'abc'.replace('b', 'B') }}
{{ 'abc'[::-1] }} {{ 'abc'[-1] }} {{ messages | map(attribute='role') | join('/') }} {{ missing is defined }}
{{ messages | rejectattr('role', 'equalto', 'user') | list | length }} {{ undefined_value | default('fallback') }}
{{ 'a' ~ 1 ~ none }} {{ 'é<>&"' }} {{ 5 is odd }} {{ 'x' in 'xyz' }} {{ dict(a=1)['a'] }} {{ range(3) | list }}
{% set ns = namespace(total=0) %}{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{% set ns.total = ns.total + i %}{% endfor %}{{ ns.total }}
{% set block %}captured {{ 1 + 1 }}{% endset %}{{ block }} {{ "%s has %d" | format("it", 2) }} {{ '{} and {}'.format(1, 2) }}
{%- raw %} {{ raw }} {% endraw %}{{ 'tail' if false else 'else' }} {{ strftime_now('%Y-%m-%d %H:%M') }}
"""

TOOLS = [{
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says <how> the weather is & more: \"naïve\"",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Köln", "東京"]},
                       "days": {"type": "integer", "default": 3}}, "required": ["city"]},
    },
}]

CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hello"}],
    "system": [{"role": "system", "content": " Be <brief> & kind. "}, {"role": "user", "content": "  Hi 😀 \n"}],
    "turns": [
        {"role": "user", "content": "What's 2+2?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\nFour. "},
        {"role": "user", "content": "And 3+3?"},
        {"role": "assistant", "content": "Six"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 1, "f": 0.5}}}]},
        {"role": "tool", "content": "{\"sunny\": true}"},
        {"role": "assistant", "content": "Sunny."},
    ],
    "thought": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "thinking": "I look.", "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 1}}}]},
        {"role": "tool", "content": "{\"sunny\": true}"},
    ],
    "bad order": [{"role": "assistant", "content": "I begin"}, {"role": "assistant", "content": "again"}],
}

VALUE = {"text": "a <b> & 'c' \"d\" \\ / \n\t\u0001 é 😀", "n": [0, -1, 1.5, 1e20, 1e-7, 12345678901234567890, True, None],
         "deep": {"empty": {}, "list": [[], [{}]]}, "Z": 1, "a": 2}


def templates():
    class Fixed(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.fromtimestamp(NOW_S, timezone.utc)

    chat_template_utils.datetime = Fixed
    sources = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "lines": LINES, "prints": PRINTS, "harmony": HARMONY}
    cases = []
    for template in sources:
        for name, messages in CONVERSATIONS.items():
            extras = [{}]
            if name == "tools" and template in ("llama3", "qwen"):
                extras = [{"tools": TOOLS}, {}]
            if template == "qwen":
                extras.append({"enable_thinking": False})
            if template == "harmony" and name in ("tools", "thought"):
                extras = [{"tools": TOOLS, "reasoning_effort": "high"}, {}]
            if template == "prints":
                extras = [{"value": VALUE}]
            for extra in extras:
                for prompt in (False, True, "continue"):
                    if name == "thought" and prompt == "continue":
                        continue  # Nobody continues the answer of a tool.
                    case = {"template": template, "conversation": name, "extra": extra, "generation_prompt": prompt}
                    try:
                        rendered, _ = chat_template_utils.render_jinja_template(
                            [messages], chat_template=sources[template], add_generation_prompt=prompt is True, continue_final_message=prompt == "continue",
                            bos_token="<s>", eos_token="</s>", **extra)
                        case["text"] = rendered[0]
                    except Exception as error:  # whatever the template raises is its refusal
                        case["error"] = str(error)
                    cases.append(case)
    write("templates.json", {
        "now_s": NOW_S, "templates": sources, "conversations": CONVERSATIONS, "cases": cases,
    })


def sampling():
    generator = torch.Generator().manual_seed(1)
    vocab = 64
    rows = [
        torch.randn(vocab, generator=generator) * 3,
        torch.randn(vocab, generator=generator),
        torch.zeros(vocab),
        torch.linspace(-20, 5, vocab),
    ]
    settings = [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.1},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "temperature": 0.6, "top_p": 0.7},
    ]
    history = [3, 3, 10, 20, 63]
    cases = []
    for row_index, row in enumerate(rows):
        for setting in settings:
            scores = row.clone().unsqueeze(0)
            ids = torch.tensor([history])
            # The order of transformers' `_get_logits_processor`.
            chain = []
            if "repetition_penalty" in setting:
                chain.append(lp.RepetitionPenaltyLogitsProcessor(setting["repetition_penalty"]))
            if "temperature" in setting:
                chain.append(lp.TemperatureLogitsWarper(setting["temperature"]))
            if "top_k" in setting:
                chain.append(lp.TopKLogitsWarper(setting["top_k"]))
            if "top_p" in setting:
                chain.append(lp.TopPLogitsWarper(setting["top_p"]))
            if "min_p" in setting:
                chain.append(lp.MinPLogitsWarper(setting["min_p"]))
            for processor in chain:
                scores = processor(ids, scores)
            probabilities = torch.softmax(scores.double(), -1)[0].tolist()
            # Ties at the border of a filter are decided by id here and arbitrarily there: no case of equal logits
            # with a border.
            if row_index == 2 and any(key in setting for key in ("top_k", "top_p", "repetition_penalty")):
                continue
            cases.append({"row": row_index, "setting": setting, "probabilities": probabilities})
    write("../../../../data-plane/model/tests/golden/sampling.json", {
        "rows": [row.tolist() for row in rows],
        "history": history,
        "cases": cases,
        "logprobs": [torch.log_softmax(row.double(), -1).tolist() for row in rows],
    })


def main():
    torch.set_num_threads(1)
    smollm2(Path(sys.argv[1]))
    tokens, merges = byte_level()
    directories(tokens, merges, sentencepiece_model())
    templates()
    sampling()


main()
