//! Bodies of the Responses API, of Anthropic's Messages API and of Ollama's routes.

use serde_json::{Value, json};

use super::{Maker, Seed};

const NUMBERS: &str = "vLLM's n = 16,384, and similar numbers";
const SILENCE: &str = "silent ignorance";
const SSRF: &str = "CVE-2026-24779, -25960 (SSRF)";
const TEMPLATES: &str = "GHSA-69j4-grxj-j64p (templates of requests)";

fn with(body: &Value, field: &str, value: Value) -> Vec<u8> {
    let mut body = body.clone();
    body[field] = value;
    body.to_string().into_bytes()
}

pub(super) fn responses() -> Vec<Seed> {
    let mut make = Maker::new("response");
    let call = json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\"a\": 1}"});
    let output = json!({"type": "function_call_output", "call_id": "1", "output": "b"});
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true});
    let format = json!({"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}});
    let body = json!({
        "model": "base", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, call, output],
        "instructions": "b", "tools": [tool], "tool_choice": {"type": "function", "name": "f"}, "text": format,
        "max_output_tokens": 4, "metadata": {"a": "b"}, "previous_response_id": "resp_1", "stream": true,
    });
    make.valid("a response", body.to_string().into_bytes());
    make.valid("a text", json!({"model": "base", "input": "Hello"}).to_string().into_bytes());
    let picture = json!([{"role": "user", "content": [{"type": "input_image", "image_url": "http://169.254.169.254/"}]}]);
    let deep = format!("{{\"a\":{}", "[".repeat(100_000));
    for (name, class, field, value, why) in [
        (
            "10,000 items",
            NUMBERS,
            "input",
            json!(vec![json!({"role": "user", "content": "a"}); 10_000]),
            "input",
        ),
        ("no items", NUMBERS, "input", json!([]), "input"),
        ("an item that is a number", NUMBERS, "input", json!([1]), "input"),
        (
            "an item that is elsewhere",
            SILENCE,
            "input",
            json!([{"type": "item_reference", "id": "x"}]),
            "item_reference",
        ),
        ("a picture to fetch", SSRF, "input", picture, "content"),
        (
            "a tool that is elsewhere",
            SILENCE,
            "tools",
            json!([{"type": "mcp", "server_url": "http://a"}]),
            "mcp",
        ),
        ("10,000 tools", NUMBERS, "tools", json!(vec![tool; 10_000]), "tools"),
        ("a response behind one's back", SILENCE, "background", json!(true), "background"),
        ("0 tokens", NUMBERS, "max_output_tokens", json!(0), "max_output_tokens"),
        ("many words", NUMBERS, "metadata", json!({"a": "b".repeat(1 << 16)}), "metadata"),
        ("a prompt that is elsewhere", TEMPLATES, "prompt", json!({"id": "pmpt_1"}), "prompt"),
    ] {
        make.refused(name, class, with(&body, field, value), why);
    }
    let cut = json!([{"type": "function_call", "call_id": "1", "name": "f", "arguments": deep}]);
    make.bounded("arguments 100,000 deep", NUMBERS, with(&body, "input", cut));
    make.bounded(
        "a number of a mebibyte",
        NUMBERS,
        with(&body, "previous_response_id", json!("r".repeat(1 << 20))),
    );
    make.seeds
}

pub(super) fn messages() -> Vec<Seed> {
    let mut make = Maker::new("message");
    let said = |role: &str, block: Value| json!([{"role": role, "content": [block]}]);
    let call = json!({"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}});
    let result = json!({"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "b"}], "is_error": true});
    let thought = json!({"type": "thinking", "thinking": "", "signature": "holobiont:aG0"});
    let tool = json!({"name": "f", "input_schema": {"type": "object"}, "strict": true, "input_examples": [{"a": 1}]});
    let body = json!({
        "model": "base", "max_tokens": 4, "system": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]},
        ],
        "tools": [tool], "tool_choice": {"type": "tool", "name": "f"}, "thinking": {"type": "enabled", "budget_tokens": 2048},
        "output_config": {"effort": "max"}, "stop_sequences": ["x"], "stream": true, "metadata": {"user_id": "u"},
    });
    make.valid("a message", body.to_string().into_bytes());
    let picture = json!({"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/"}});
    let server = json!([{"type": "mcp_toolset", "name": "a", "mcp_server_name": "http://a"}]);
    for (name, class, field, value, why) in [
        (
            "10,000 messages",
            NUMBERS,
            "messages",
            json!(vec![json!({"role": "user", "content": "a"}); 10_000]),
            "messages",
        ),
        ("a picture to fetch", SSRF, "messages", said("user", picture), "image"),
        ("a call of an assistant in a user's name", SILENCE, "messages", said("user", call), "tool_use"),
        ("10,000 tools", NUMBERS, "tools", json!(vec![tool; 10_000]), "tools"),
        ("a tool that is elsewhere", SILENCE, "tools", server, "mcp_toolset"),
        (
            "a budget below none",
            NUMBERS,
            "thinking",
            json!({"type": "enabled", "budget_tokens": -1}),
            "budget",
        ),
        ("an effort that is a number", NUMBERS, "output_config", json!({"effort": 1e300}), "effort"),
        ("tokens below none", NUMBERS, "max_tokens", json!(-1), "max_tokens"),
        (
            "stop sequences of a mebibyte",
            NUMBERS,
            "stop_sequences",
            json!(["a".repeat(1 << 20)]),
            "stop_sequences",
        ),
        ("an unknown option", SILENCE, "unheard_of", json!(1), "unheard_of"),
    ] {
        make.refused(name, class, with(&body, field, value), why);
    }
    let sealed = json!({"type": "thinking", "thinking": "", "signature": format!("holobiont:{}", "A".repeat(1 << 20))});
    make.bounded("a signature of a mebibyte", NUMBERS, with(&body, "messages", said("assistant", sealed)));
    make.seeds
}

fn refused_by_ollama(make: &mut Maker, body: &Value) {
    for (name, class, field, value, why) in [
        ("tokens below none", NUMBERS, "options", json!({"num_predict": -3}), "num_predict"),
        ("a context of 2^40", NUMBERS, "options", json!({"num_ctx": 1_u64 << 40}), "num_ctx"),
        ("options as a list", NUMBERS, "options", json!([1]), "options"),
        ("an option that is not honoured", SILENCE, "options", json!({"mirostat": 2}), "mirostat"),
        ("an endless penalty", NUMBERS, "options", json!({"repeat_penalty": 1e300}), "repeat_penalty"),
        ("a time that is a list", NUMBERS, "keep_alive", json!([5]), "keep_alive"),
        ("a model that is to go", SILENCE, "keep_alive", json!("0s"), "keep_alive"),
        ("a format that is a number", NUMBERS, "format", json!(5), "format"),
        ("a template of the request", TEMPLATES, "template", json!("{{ range 10000000 }}"), "template"),
        ("an unknown option", SILENCE, "unheard_of", json!(1), "unheard_of"),
    ] {
        make.refused(name, class, with(body, field, value), why);
    }
    make.refused("a list", NUMBERS, b"[]".to_vec(), "");
    make.bounded("a time of many digits", NUMBERS, with(body, "keep_alive", json!("9".repeat(1 << 16))));
}

pub(super) fn ollama_chats() -> Vec<Seed> {
    let mut make = Maker::new("ollama_chat");
    let call = json!({"function": {"name": "f", "arguments": {"a": [1]}}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let body = json!({
        "model": "base:latest", "tools": [tool], "format": "json", "keep_alive": "5m", "stream": false,
        "options": {"num_predict": -1, "temperature": 0.5, "num_ctx": 512, "repeat_penalty": 1.1},
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "b", "tool_name": "f"}],
    });
    make.valid("a chat of Ollama's", body.to_string().into_bytes());
    make.valid("nothing to say", json!({"model": "base"}).to_string().into_bytes());
    let many = json!(vec![json!({"role": "user", "content": "a"}); 10_000]);
    make.refused("10,000 messages", NUMBERS, with(&body, "messages", many), "messages");
    let picture = json!([{"role": "user", "content": "a", "images": ["AAAA"]}]);
    make.refused("a picture", SILENCE, with(&body, "messages", picture), "images");
    let call = json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]);
    make.bounded("arguments as a text", NUMBERS, with(&body, "messages", call));
    refused_by_ollama(&mut make, &body);
    make.seeds
}

pub(super) fn ollama_prompts() -> Vec<Seed> {
    let mut make = Maker::new("ollama_generate");
    let body = json!({"model": "base", "prompt": "Hello", "system": "b", "format": {"type": "object"}, "options": {"seed": 1, "stop": ["x"]}});
    make.valid("a prompt of Ollama's", body.to_string().into_bytes());
    make.valid(
        "a raw prompt",
        json!({"model": "base", "prompt": "Hello", "raw": true}).to_string().into_bytes(),
    );
    make.refused("a raw prompt with a system", SILENCE, with(&body, "raw", json!(true)), "system");
    make.refused("a prompt as a list", NUMBERS, with(&body, "prompt", json!(["a"])), "prompt");
    make.refused("tokens of another model", SILENCE, with(&body, "context", json!([1, 2])), "context");
    refused_by_ollama(&mut make, &body);
    make.seeds
}

pub(super) fn embeddings() -> Vec<Seed> {
    let mut make = Maker::new("embedding");
    let body = json!({"model": "base", "input": ["a", [1, 2]], "pooling": "mean", "encoding_format": "base64", "normalize": false});
    make.valid("texts and tokens", body.to_string().into_bytes());
    make.valid("a text", json!({"model": "base", "input": "a"}).to_string().into_bytes());
    for (name, class, field, value, why) in [
        ("a pooling that is not there", SILENCE, "pooling", json!("cls"), "pooling"),
        ("numbers of 8 bits", SILENCE, "encoding_format", json!("int8"), "encoding_format"),
        ("a length that is a number", NUMBERS, "normalize", json!(2), "normalize"),
        ("fewer dimensions", SILENCE, "dimensions", json!(1_u64 << 40), "dimensions"),
    ] {
        make.refused(name, class, with(&body, field, value), why);
    }
    make.bounded("a million texts", NUMBERS, with(&body, "input", json!(vec!["a"; 1_000_000])));
    make.seeds
}

pub(super) fn scores() -> Vec<Seed> {
    let mut make = Maker::new("score");
    let body = json!({"model": "base", "text_1": "a", "text_2": ["b", {"text": "c"}], "pooling": "mean", "truncate_prompt_tokens": -1});
    make.valid("a text and others", body.to_string().into_bytes());
    let classes = json!({"model": "base", "queries": ["a", "b"], "documents": ["c", "d"], "classifier_from_token": ["no", 7],
        "template": "{instruction}{query}{document}", "instruction": "Find", "use_activation": false});
    make.valid("pairs, by tokens", classes.to_string().into_bytes());
    for (name, class, field, value, why) in [
        ("a third list", SILENCE, "queries", json!("a"), "text_1"),
        ("a template without its texts", SILENCE, "template", json!("{query}"), "template"),
        ("a field that no text has", SILENCE, "text_2", json!([{"text": "a", "image": "b"}]), "image"),
        ("no tokens left", NUMBERS, "truncate_prompt_tokens", json!(0), "truncate_prompt_tokens"),
        ("tokens below none", NUMBERS, "truncate_prompt_tokens", json!(-2), "truncate_prompt_tokens"),
        ("more queries than documents", NUMBERS, "text_1", json!(["a", "b", "c"]), "text_1"),
    ] {
        make.refused(name, class, with(&body, field, value), why);
    }
    make.bounded(
        "a million tokens",
        NUMBERS,
        with(&body, "classifier_from_token", json!(vec![1; 1_000_000])),
    );
    make.bounded("a long template", NUMBERS, with(&body, "template", json!("{document}".repeat(100_000))));
    make.seeds
}

pub(super) fn rerankings() -> Vec<Seed> {
    let mut make = Maker::new("rerank");
    let body = json!({"model": "base", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": false});
    make.valid("a query and documents", body.to_string().into_bytes());
    for (name, class, field, value, why) in [
        ("several queries", SILENCE, "query", json!(["a", "b"]), "query"),
        ("documents that are numbers", NUMBERS, "documents", json!([1, 2]), "documents"),
        ("results below none", NUMBERS, "top_n", json!(-1), "top_n"),
        ("a limit of Cohere's", SILENCE, "max_tokens_per_doc", json!(10), "max_tokens_per_doc"),
    ] {
        make.refused(name, class, with(&body, field, value), why);
    }
    make.bounded("a million documents", NUMBERS, with(&body, "documents", json!(vec!["a"; 1_000_000])));
    make.seeds
}

pub(super) fn classifications() -> Vec<Seed> {
    let mut make = Maker::new("classify");
    let body = json!({"model": "base", "input": ["a", [1, 2]], "classifier_from_token": ["no", "yes"], "use_activation": false, "truncate_prompt_tokens": 8});
    make.valid("texts and tokens", body.to_string().into_bytes());
    for (name, class, field, value, why) in [
        ("tokens that are no list", NUMBERS, "classifier_from_token", json!("no"), "classifier_from_token"),
        ("an activation that is a number", NUMBERS, "use_activation", json!(1), "use_activation"),
        ("an old name of an option", SILENCE, "softmax", json!(true), "softmax"),
    ] {
        make.refused(name, class, with(&body, field, value), why);
    }
    make.seeds
}

pub(super) fn ollama_embeds() -> Vec<Seed> {
    let mut make = Maker::new("ollama_embed");
    let body = json!({"model": "base:latest", "input": ["a", "b"], "truncate": false, "keep_alive": "5m", "options": {"num_ctx": 512}});
    make.valid("texts for Ollama", body.to_string().into_bytes());
    for (name, class, field, value, why) in [
        ("tokens for Ollama", NUMBERS, "input", json!([[1, 2]]), "input"),
        ("options as a list", NUMBERS, "options", json!([1]), "options"),
        ("a model that is to go", SILENCE, "keep_alive", json!(0), "keep_alive"),
        ("fewer dimensions", SILENCE, "dimensions", json!(8), "dimensions"),
    ] {
        make.refused(name, class, with(&body, field, value), why);
    }
    make.seeds
}
