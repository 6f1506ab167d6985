//! Fields of published data sets that change what is shown or learned: each is honoured, or refused by name.

use crate::support::{AGENTS, CHATML, TemplateTokenizer, file};
use serde_json::{Map, Value, json};
use text::{chat::Chat, chat_template::GenerationPrompt};
use trainer::data::DataItems;

const HI: &str = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn with(mut line: Value, mut fields: Value) -> Value {
    line.as_object_mut().unwrap().append(fields.as_object_mut().unwrap());
    line
}

fn assert_fault(model: &TemplateTokenizer, line: &Value, expected: &str) {
    let fault = model.fault(line);
    assert!(fault.contains(expected), "{line}: {fault}");
}

#[test]
fn the_weight_of_a_line_multiplies_the_weights_of_its_tokens() {
    let model = TemplateTokenizer::new(CHATML);
    let weights = |fields: Value| {
        let line = with(json!({"messages": [message("user", "Hi"), message("assistant", "Yes")]}), fields);
        let DataItems::Examples(examples) = model.read(&line.to_string()).unwrap().items else {
            panic!("examples")
        };
        examples
            .iter()
            .flat_map(|example| example.weights.clone())
            .filter(|weight| *weight != 0.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(weights(json!({})), [1.0; 4]);
    assert_eq!(weights(json!({"weight": 1})), [1.0; 4]);
    assert_eq!(weights(json!({"weight": -2.0})), [-2.0; 4]);
    assert!(weights(json!({"weight": 0})).is_empty());
    let text = |weight: Value| json!({"text": "abc", "weight": weight});
    assert_fault(&model, &text(json!("heavy")), "'weight' must be a number from -1000 to 1000");
    assert_fault(&model, &text(json!(1e9)), "'weight' must be a number");
    assert_fault(&model, &json!({"chosen": "a", "rejected": "b", "weight": 2}), "'weight' is not supported");
    let part = json!({"role": "assistant", "content": [{"type": "text", "text": "No", "weight": -1}]});
    let line = json!({"messages": [message("user", "Hi"), part]});
    assert_fault(&model, &line, "'messages[1].content[0].weight' is not supported");
}

#[test]
fn a_turn_is_masked_by_every_trainers_name_for_the_mask() {
    let model = TemplateTokenizer::new(CHATML);
    let line = |flag: Value| {
        let masked = with(message("assistant", "5"), flag);
        json!({"messages": [message("user", "Hi"), masked, message("user", "Hi"), message("assistant", "4")]})
    };
    let masked = model.examples(&[line(json!({"weight": 0}))]);
    assert_eq!(masked, [[HI, "5<|im_end|>\n", HI, "[4<|im_end|>]"].concat()]);
    for name in ["train", "training", "loss", "loss_mask"] {
        assert_eq!(model.examples(&[line(json!({name: false}))]), masked, "{name}");
        assert_eq!(model.examples(&[line(json!({name: 0}))]), masked, "{name}");
        assert_ne!(model.examples(&[line(json!({name: true}))]), masked, "{name}");
    }
    assert_fault(&model, &line(json!({"train": "no"})), "'messages[1].train' must be 0 or false");
    assert_fault(&model, &line(json!({"train": true, "weight": 0})), "'messages[1].train' contradicts");
    let detail = json!({"training_detail": [{"begin_offset": 0, "end_offset": 1, "train": false}]});
    assert_fault(&model, &line(detail), "'messages[1].training_detail' is not supported");
    let asked =
        json!({"messages": [with(message("user", "Hi"), json!({"train": true})), message("assistant", "4")]});
    assert_fault(&model, &asked, "'messages[0].train' must be 0 or false");
    let share_gpt = json!({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "5", "train": false},
        {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "4"}]});
    assert_eq!(model.examples(&[share_gpt]), masked);
}

#[test]
fn system_prompts_and_history_beside_the_turns_are_shown() {
    let model = TemplateTokenizer::new(CHATML);
    let system = "<|im_start|>system\nArr<|im_end|>\n";
    let expected = [[system, HI, "[Yes<|im_end|>]"].concat()];
    let asked = [message("user", "Hi"), message("assistant", "Yes")];
    for line in [
        json!({"instruction": "Hi", "output": "Yes", "system": "Arr"}),
        json!({"system_prompt": "Arr", "question": "Hi", "response": "Yes"}),
        json!({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}], "system": "Arr"}),
        json!({"conversations": asked, "system": "Arr"}),
        json!({"messages": asked, "system": "Arr"}),
        json!({"messages": [message("system", "Arr"), asked[0], asked[1]], "system": "Arr"}),
    ] {
        assert_eq!(model.examples(std::slice::from_ref(&line)), expected, "{line}");
    }
    let line =
        json!({"instruction": "Hi", "input": "", "output": "Yes", "system": "", "history": [["Hi", "No"]]});
    assert_eq!(model.examples(&[line]), [[HI, "[No<|im_end|>]\n", HI, "[Yes<|im_end|>]"].concat()]);
    let line = json!({"messages": [message("system", "Be."), asked[0], asked[1]], "system": "Arr"});
    assert_fault(&model, &line, "'system' differs from the system message");
    assert_fault(&model, &json!({"text": "abc", "system": "Arr"}), "'system' is not supported");
    assert_fault(
        &model,
        &json!({"instruction": "a", "output": "b", "history": [["a"]]}),
        "'history[0]' must be",
    );
    for field in ["images", "videos", "audios"] {
        let line = with(json!({"messages": asked}), json!({field: ["a.png"]}));
        assert_fault(&model, &line, &format!("'{field}' is not supported"));
    }
}

#[test]
fn reasoning_content_is_learned_where_the_template_shows_it() {
    let model = TemplateTokenizer::new(AGENTS);
    let line = |name: &str| json!({"messages": [message("user", "Hi"), with(message("assistant", "4"), json!({name: "Add."}))]});
    for name in ["reasoning_content", "reasoning", "thinking"] {
        assert_eq!(
            model.examples(&[line(name)]),
            [[HI, "[<think>Add.</think>4<|im_end|>]"].concat()],
            "{name}"
        );
        let forgetful = TemplateTokenizer::new(CHATML);
        let expected = format!("this model's chat template does not show 'messages[1].{name}'");
        assert_fault(&forgetful, &line(name), &expected);
    }
    let both = json!({"thinking": "Add.", "reasoning": "Sum."});
    let both = json!({"messages": [message("user", "Hi"), with(message("assistant", "4"), both)]});
    assert_fault(&model, &both, "'messages[1].thinking' contradicts 'messages[1].reasoning'");
    let of_user = json!({"messages": [with(message("user", "Hi"), json!({"thinking": "a"})), message("assistant", "4")]});
    assert_fault(&model, &of_user, "'messages[0].thinking' is not supported");
}

#[test]
fn variables_of_the_template_are_those_of_the_line() {
    let model = TemplateTokenizer::new(AGENTS);
    let line = json!({"messages": [message("user", "Hi"), message("assistant", "-4")],
        "chat_template_kwargs": {"enable_thinking": false}});
    assert_eq!(model.examples(&[line]), [[HI, "-[4<|im_end|>]"].concat()]);
    let line = json!({"messages": [message("user", "Hi"), message("assistant", "4")], "chat_template_kwargs": {"tools": []}});
    assert_fault(&model, &line, "'chat_template_kwargs.tools' is not supported");
}

fn weather() -> Value {
    json!({"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}})
}

#[test]
fn tool_calls_and_answers_are_shown_as_in_a_request_and_calls_are_learned() {
    let model = TemplateTokenizer::new(AGENTS);
    let tool = json!({"type": "function", "function": weather()});
    let shown = serde_json::to_string(&tool).unwrap();
    let call = |arguments: Value| json!({"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}});
    let calls =
        |arguments: Value| json!({"role": "assistant", "content": null, "tool_calls": [call(arguments)]});
    let result = json!({"role": "tool", "tool_call_id": "c1", "content": "12"});
    let end = message("assistant", "Cold");
    let line = |tools: Value, calling: Value, result: Value| {
        json!({"tools": tools, "parallel_tool_calls": false,
        "messages": [message("user", "Hi"), calling, result, end]})
    };
    let share_gpt = |call: Value| {
        json!({"tools": json!([weather()]).to_string(), "conversations": [
        {"from": "human", "value": "Hi"}, {"from": "function_call", "value": call.to_string()},
        {"from": "observation", "value": "12"}, {"from": "gpt", "value": "Cold"}]})
    };
    let named = json!({"name": "weather", "arguments": {"city": "Rome"}});
    let older = json!({"role": "assistant", "function_call": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}});
    let forms = [
        line(json!([tool]), calls(json!("{\"city\": \"Rome\"}")), result.clone()),
        line(json!([tool]), calls(json!({"city": "Rome"})), result.clone()),
        line(
            json!([weather()]),
            calls(json!({"city": "Rome"})),
            json!({"role": "tool", "name": "weather", "content": "12"}),
        ),
        with(
            line(Value::Null, older, json!({"role": "function", "name": "weather", "content": "12"})),
            json!({"functions": [weather()]}),
        ),
        share_gpt(named.clone()),
        share_gpt(json!([named])),
    ];
    let begin = "<call>weather ";
    for form in forms {
        let examples = model.examples(std::slice::from_ref(&form));
        let [example] = examples.as_slice() else { panic!("one example: {examples:?}") };
        assert!(example.starts_with("<|im_start|>system\n{"), "{example}");
        for part in
            [begin, "\"Rome\"", "<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n[Cold<|im_end|>]"]
        {
            assert!(example.contains(part), "{form}: {example}");
        }
        assert!(example.contains(&["<|im_start|>assistant\n[", begin].concat()), "{example}");
    }
    // The prompt is the one that a request with these messages gets.
    let DataItems::Examples(examples) = model
        .read(&file(&[line(json!([tool]), calls(json!({"city": "Rome"})), result.clone())]))
        .unwrap()
        .items
    else {
        panic!("examples")
    };
    let sent = [
        message("user", "Hi"),
        with(calls(json!({"city": "Rome"})), json!({"content": ""})),
        with(result, json!({"name": "weather"})),
    ];
    let tools = Map::from_iter([("tools".to_owned(), json!([tool]))]);
    let chat = Chat::new(&model.tokenizer, model.template.as_ref().unwrap(), TemplateTokenizer::now());
    let prompt = chat.encode_values(&sent, &tools, GenerationPrompt::Add).unwrap();
    assert!(examples[0].tokens.starts_with(&prompt), "{shown}");
}

#[test]
fn tools_that_no_template_shows_and_calls_that_are_malformed_are_refused() {
    let model = TemplateTokenizer::new(AGENTS);
    let line = |tools: Value, call: Value| {
        json!({"tools": tools, "messages": [
        message("user", "Hi"), {"role": "assistant", "tool_calls": [call]}]})
    };
    let call = json!({"function": {"name": "weather", "arguments": {}}});
    let plain = TemplateTokenizer::new(CHATML);
    assert_fault(&plain, &line(json!([weather()]), call.clone()), "chat template does not show 'tools'");
    assert_fault(&plain, &line(Value::Null, call.clone()), "does not show 'messages[1].tool_calls'");
    for (tools, call, expected) in [
        (json!([{}]), call.clone(), "'tools[0].function.name' is missing"),
        (json!("{"), call.clone(), "'tools' must be an array of tools, and its text is not JSON"),
        (json!({}), call, "'tools' must be an array of tools, not an object"),
        (json!([weather()]), json!({}), "'messages[1].tool_calls[0].function' is missing"),
        (json!([weather()]), json!({"function": {}}), "'messages[1].tool_calls[0].function.name' is missing"),
        (
            json!([weather()]),
            json!({"function": {"name": "weather", "arguments": "{\"city"}}),
            "'messages[1].tool_calls[0].function.arguments' must be an object, and its text is not JSON",
        ),
        (
            json!([weather()]),
            json!({"function": {"name": "weather", "arguments": [1]}}),
            "'messages[1].tool_calls[0].function.arguments' must be an object, not an array",
        ),
        (
            json!([weather()]),
            json!({"type": "custom", "function": {"name": "weather"}}),
            "'messages[1].tool_calls[0].type' is not supported",
        ),
    ] {
        assert_fault(&model, &line(tools, call), expected);
    }
    let share_gpt = json!({"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "weather()"}]});
    assert_fault(
        &model,
        &share_gpt,
        "'conversations[1].value' must be JSON of a call, and its text is not JSON",
    );
}

#[test]
fn fields_that_nobody_reads_are_named_once() {
    let model = TemplateTokenizer::new(CHATML);
    let line = |id: u32| {
        json!({"id": id, "source": null, "messages": [
        with(message("user", "Hi"), json!({"name": "Bo"})), with(message("assistant", "Yes"), json!({"score": 3}))]})
    };
    let read = model.read(&file(&[line(1), line(2)])).unwrap();
    assert_eq!(read.unread, ["id", "messages[].name", "messages[].score"]);
}
